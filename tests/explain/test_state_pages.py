"""The states of layers without softmax attention: how a block follows from them, by rules of small registries."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from support import ROOT
from support.registries.asking import at
from support.registries.files import row
from support.registries.starts import load, vocabulary

import attnreg
from attnreg import AttentionRequest, Platform, RegistryError
from attnreg.explain import explain, render
from attnreg.explain.answers import Explanation
from attnreg.explain.block_size import BlockSize, pages_of
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.models.states import StateDims
from attnreg.selection.question import Question
from attnreg.selection.selector import evaluate

G2 = Platform(platform="gpu", arch="g2")
# 8,192 bytes, which 32 tokens of 256 bytes take
LINEAR = StateDims("linear_attention", heads=4, head_size=32, model_dtype="float16")
# 1,024 bytes, and 512 for each token that a draft proposes
CONV = StateDims("short_conv", channels=256, kernel=3, model_dtype="float16")
QWEN = "Qwen3-Next-80B-A3B-Instruct"


def page(directory: Path, rules: str, *states: StateDims | None, draft: bool = False, blocks: str = "16") -> BlockSize:
    """What is said of a model with a layer of 256 bytes a token, and a layer with each of these states."""
    rows = row("capabilities: {dtypes: [float16, bfloat16]}", f"consequences: [{{kernel_blocks: {blocks}}}]")
    words = yaml.safe_load(vocabulary())
    bits = {"float16": 16, "bfloat16": 16, "float32": 32}
    words["words"]["dtypes"] = {word: {"bits": number, "legend": "l"} for word, number in bits.items()}
    steps = f"page: {{agree: common, default: [{{tokens: 16}}], {rules}}}\n"
    registry = load(directory, steps, backends=rows, vocabulary=yaml.safe_dump(words, sort_keys=False))

    def asked(role: str, model: str) -> Question:
        request = AttentionRequest(
            head_size=64, num_heads=1, num_kv_heads=1, dtype="float16", role=role, model=model, kv_dtype="auto"
        )
        return Question(request, members=frozenset({("draft" if role == "draft" else "", "", False, 0)}))

    mixers = [Question(None, members=frozenset({("", "", False, i + 1)}), state=s) for i, s in enumerate(states)]
    drafts = [asked("draft", "m")] if draft else []
    questions = [asked("target", "m"), *mixers, *drafts]
    (found,) = pages_of(questions, [G2], registry, lambda request, on: evaluate(request, on, registry, None), None)
    return found


HELD = "held: [{states: 2}]"
RULES: dict[str, tuple[str, list[StateDims], int]] = {
    "a block holds a state": (HELD, [LINEAR], 32),
    "it holds the largest": (HELD, [CONV, LINEAR], 32),
    "a small one changes nothing": (HELD, [CONV], 16),
    "a multiple": (f"{HELD}, multiples: [{{multiple_of: 24}}]", [LINEAR], 48),
    "of another kind": (f"{HELD}, multiples: [{{kinds: [gdn], multiple_of: 24}}]", [LINEAR], 32),
    "of other keys": (f"{HELD}, multiples: [{{key_size: 128, multiple_of: 24}}]", [LINEAR], 32),
    "of other layers": (f"{HELD}, multiples: [{{when: {{dtype: bfloat16}}, multiple_of: 24}}]", [LINEAR], 32),
    "at least": (f"{HELD}, multiples: [{{at_least: 128}}]", [LINEAR], 128),
    "a chunk": (f"{HELD}, multiples: [{{multiple_of: chunk}}]", [LINEAR._replace(chunk=80)], 80),
    "the dtype of the config": (HELD, [LINEAR._replace(dtype="float32")], 64),
    "which is not read": (f"{HELD}, config_dtype: {{dtype: bfloat16}}", [LINEAR._replace(dtype="float32")], 32),
}


@pytest.mark.parametrize("what", RULES)
def test_a_block_follows_from_the_states(what: str, tmp_path: Path) -> None:
    rules, states, tokens = RULES[what]
    found = page(tmp_path, f"states: {{{rules}}}", *states)
    assert found.tokens == tokens, found.text
    assert found.states is not None
    assert found.states.page_bytes == tokens * 256
    assert found.states.request_bytes == 2 * tokens * 256 * len(states)


def test_a_draft_widens_some_states_and_adds_one(tmp_path: Path) -> None:
    wide = f"states: {{{HELD}, widened: [short_conv]}}"
    alone, drafted = page(tmp_path / "a", wide, CONV), page(tmp_path / "b", wide, CONV, draft=True)
    assert alone.states is not None
    assert drafted.states is not None
    ((first,), (second,)) = alone.states.layers, drafted.states.layers
    assert (first.own_bytes, first.held) == (1024, 2)
    assert (second.own_bytes, second.held) == (1536, 3)


UNKNOWN: dict[str, tuple[str, list[StateDims | None], str]] = {
    "a state": (f"states: {{{HELD}}}, unknown: [{{mixers: true, because: u}}]", [None, LINEAR], "u"),
    "no rules": ("unknown: [{mixers: true, because: u}]", [LINEAR], "u"),
    "a kind": (f"states: {{{HELD}, unknown: [{{kinds: [linear_attention], because: u}}]}}", [LINEAR], "u"),
    "a chunk": (
        f"states: {{{HELD}, multiples: [{{multiple_of: chunk}}]}}",
        [LINEAR],
        "the number of tokens that a layer computes at a time is not known",
    ),
    "a dtype": (
        f"states: {{{HELD}}}",
        [LINEAR._replace(dtype="float3")],
        "the registry knows no dtype 'float3', which the config names",
    ),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_not_known_is_no_number(what: str, tmp_path: Path) -> None:
    rules, states, text = UNKNOWN[what]
    found = page(tmp_path, rules, *states)
    assert (found.tokens, found.text, found.states) == (None, text, None)


def test_models_without_such_layers_may_be_unknown_instead(tmp_path: Path) -> None:
    rules = f"states: {{{HELD}}}, unknown: [{{mixers: false, when: {{dtype: float16}}, because: u}}]"
    assert page(tmp_path / "a", rules).tokens is None
    assert page(tmp_path / "b", rules, LINEAR).tokens == 32


def test_a_draft_of_unknown_length_is_said(tmp_path: Path) -> None:
    rules = f"states: {{{HELD}, unknown: [{{drafted: true, because: u}}]}}"
    assert page(tmp_path / "a", rules, LINEAR).tokens == 32
    assert page(tmp_path / "b", rules, LINEAR, draft=True).text == "u"


def test_a_block_that_a_backend_does_not_read_stops_the_engine(tmp_path: Path) -> None:
    found = page(tmp_path, f"states: {{{HELD}, multiples: [{{at_least: 40}}]}}", LINEAR, blocks="[16]")
    assert found.tokens is None
    assert found.text.endswith("reads no blocks of that size, and the engine stops")


def test_states_of_a_request_without_a_rule_are_not_known(tmp_path: Path) -> None:
    found = page(tmp_path, "states: {held: [{kinds: [gdn], states: 2}]}", LINEAR)
    assert found.tokens == 32
    assert found.states is not None
    assert found.states.request_bytes is None


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("multiples: [{kinds: [gdn]}]", "has no number, or two"),
        ("multiples: [{multiple_of: 2, at_least: 3}]", "has no number, or two"),
        ("proposed: head_sise", "unknown facet"),
        ("proposed: dtype", "`dtype` holds no integer"),
    ],
)
def test_faulty_rules_are_refused(rules: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=message):
        page(tmp_path, f"states: {{{rules}}}", LINEAR)


# of an engine ---------------------------------------------------------------------------------------------------------


def answer(model: str = QWEN, arch: str = "sm90", **options: Any) -> Explanation:
    registry = attnreg.load_registry("vllm-0.33.0", plugins=())
    found = model_questions(str(ROOT / "examples/configs" / model), ModelOptions(**options), registry)
    return explain(found.questions, [at(a, registry) for a in arch.split()], registry, memory=found.memory)


def test_the_memory_of_a_request_has_its_states() -> None:
    (memory,) = answer().memory
    data = memory.to_dict()
    states, attends = data["groups"]
    # 36 layers, three states each, of pages of 576 tokens and 1,024 bytes a token and rank
    assert states["state_bytes"] == 36 * 3 * 576 * 2 * 2 * 256 * 2
    assert states["note"] == ""
    assert set(states["bytes_at"].values()) == {states["state_bytes"]}
    assert "state_bytes" not in attends
    assert data["bytes_at"]["8192"] == states["state_bytes"] + attends["bytes_at"]["8192"]
    assert data["bytes_per_token"] == attends["bytes_per_token"]


def test_states_are_said_in_text_and_in_json() -> None:
    said = answer()
    (block,) = said.to_dict()["block_sizes"]
    assert block["states"]["page_bytes"] == 576 * 2 * 2 * 256 * 2
    assert [array["shape"] for array in block["states"]["kinds"][0]["arrays"]] == [[3, 8192], [32, 128, 128]]
    console = Console(width=140, file=io.StringIO(), highlight=False)
    render(said, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "states, the same at any length" in text
    assert "KV cache in blocks of 576 tokens, raised from 16: a block is as large as a state of a layer" in text


def test_architectures_that_keep_other_states_have_a_table_each() -> None:
    said = answer(arch="sm80 sm90")
    assert [(p.tokens, p.archs) for p in said.pages] == [(544, ("sm80",)), (576, ("sm90",))]
    assert [m.archs for m in said.memory] == [("sm80",), ("sm90",)]


def test_states_that_are_not_known_are_not_counted() -> None:
    (memory,) = answer(arch="xe2").memory
    group = memory.to_dict()["groups"][0]
    assert (group["state_bytes"], group["note"]) == (None, "a state of fixed size, not counted")
