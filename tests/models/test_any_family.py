"""Any text is a family, or is refused with located errors; and any family answers for any config."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from support.registries.spoiling import paths, spoil
from support.suite.examples import examples

from attnreg.compile.source.yaml_source import Document
from attnreg.errors import RegistryError
from attnreg.language.numbers import as_data
from attnreg.models.families import Families
from attnreg.models.patterns import PATTERNS
from attnreg.models.reader import ConfigError, bundled_families, requests_from_model
from attnreg.models.schema import CallData, FamilyData
from attnreg.models.values import FORMS

TEXTS = {name: bundled_families().text(name) for name in bundled_families().files if name != "_sources"}
# families that use every form of the language between them
FUZZED = (
    *("bert", "blt", "cohere2_moe", "csm", "deepseek_v4", "dots3_note_text", "gemma3n_text", "gpt2", "hy_v4"),
    *("inkling_text", "nemotron_h", "t5"),
)
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "hidden_size": 512,
    "sliding_window": 8,
    "layer_types": ["full_attention"] * 4,
}
KEYS = sorted({*FORMS, *PATTERNS, *CallData.model_fields, *FamilyData.model_fields, *CONFIG, "min", "any"})
WORD = st.sampled_from(KEYS) | st.sampled_from(["full_attention", "..x", "a.b", "*", "", "m"])
SCALAR = st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | WORD | st.text(max_size=4)
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORD, inner, max_size=3),
    max_leaves=6,
)
PUT = ["", " ", "\n", "\n  ", "{", "}", "[", "]", ": ", ", ", "- ", "#", "&a ", "*a", "'", '"', "0", "null", "true"]


def answers(name: str, text: str) -> None:
    """Read, check and use a family; only located errors and errors of the config are raised."""
    known = Families.of(TEXTS | {"_sources": "sources: {}\n", name: text}, "models")
    for problem in _problems(known, name):
        assert problem.message
        assert str(problem.where).startswith("models/")
    for config in ({}, CONFIG, CONFIG | {"layer_types": None, "text_config": CONFIG, "vision_config": CONFIG}):
        try:
            requests_from_model({"model_type": name} | config, families=known)
        except (ConfigError, RegistryError) as error:
            assert str(error)  # noqa: PT017


def _problems(known: Families, name: str) -> Any:
    try:
        for part in known.get(name).parts:
            part.family(None)
    except RegistryError as error:
        return error.problems
    return ()


@st.composite
def edited(draw: st.DrawFn) -> tuple[str, str]:
    """The file of a family, with some characters or lines of it changed."""
    name = draw(st.sampled_from(FUZZED))
    text = TEXTS[name]
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, len(text)))
        last = min(len(text), first + draw(st.integers(0, 12)))
        text = text[:first] + draw(st.sampled_from(PUT)) + text[last:]
    return name, text


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, str]:
    """The file of a family, with some value in it replaced."""
    name = draw(st.sampled_from(FUZZED))
    data = copy.deepcopy(as_data(Document(TEXTS[name], name).data))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths(data)))
        spoil(data, path, draw(st.none() | WORD), draw(VALUE))
    return name, json.dumps(data)


@examples(300)
@given(edited())
def test_any_text(family: tuple[str, str]) -> None:
    answers(*family)


@examples(300)
@given(mutated())
@example(("m", "{model_type: m, source: 'a:b#c', heads: null}"))
@example(("m", "{model_type: m, source: 'a:b#c', kv_shared: {last: 9}}"))
@example(("m", "{model_type: m, source: 'a:b#c', layers: {power: [4, 0.3]}}"))
@example(("m", "{model_type: m, source: 'a:b#c', layers: {difference: [1, 3]}}"))
@example(("m", "{model_type: m, source: 'a:b#c', head_size: {power: [64, 0.5]}}"))
@example(("m", "{model_type: m, source: 'a:b#c', pattern: {every: {difference: [1, 1]}, is: mamba, others: mamba}}"))
@example(("m", "{model_type: m, source: 'a:b#c', attention: layer_types}"))
@example(("m", "{model_type: m, source: 'a:b#c', parts: [{like: m}]}"))
def test_any_values(family: tuple[str, str]) -> None:
    answers(*family)
