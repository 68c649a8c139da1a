"""The guide's examples load, and show every kind of matcher."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.schemas import validator

from attnreg.compile.conditions import Parser
from attnreg.compile.yaml_source import Document
from attnreg.errors import Problem, RegistryError
from attnreg.loader import load_registry
from attnreg.registry import Registry

GUIDE = ROOT / "docs/writing_data.md"


_FENCE = re.compile(r"^```(\S+) ?(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry("default")


def examples() -> list[Any]:
    text = GUIDE.read_text(encoding="utf-8")
    found = [(m[2], m[3]) for m in _FENCE.finditer(text) if m[1] == "yaml"]
    return [pytest.param(kind, body, id=f"{kind}-{i}") for i, (kind, body) in enumerate(found)]


@pytest.mark.parametrize(("kind", "body"), examples())
def test_examples_load(kind: str, body: str, tmp_path: Path, registry: Registry) -> None:
    if kind == "conditions":
        document = Document(body, "example.yaml")
        problems: list[Problem] = []
        conditions = [
            Parser(registry.vocabulary, document, problems).condition(c, (i,)) for i, c in enumerate(document.data)
        ]
        assert not problems
        assert all(condition.describe() != "always" for condition in conditions)
        return
    nested = {"vocabulary.yaml": "vocabulary", "priorities.yaml": "orders"}.get(kind)
    assert kind in ("overlay", "error", "backends.yaml", "invariants.yaml") or nested
    file = tmp_path / "mine.yaml"
    file.write_text(f"{nested}:\n{textwrap.indent(body, '  ')}" if nested else body, encoding="utf-8")
    if kind == "error":
        with pytest.raises(RegistryError):
            load_registry("default", [file])
        return
    load_registry("default", [file])
    if nested != "vocabulary":
        validator("overlay").validate(Document.load(file).data)


def test_the_guide_shows_every_kind_of_matcher() -> None:
    [body] = [m[3] for m in _FENCE.finditer(GUIDE.read_text(encoding="utf-8")) if m[2] == "conditions"]
    words = ("min", "max", "below", "multiple_of", "not", "only", "any", "without", "packages", "flags", "features")
    assert not [word for word in words if not re.search(rf"\b{word}:", body)]
    assert not [sign for sign in ("*", "?", "null", "[") if sign not in body]


def test_the_families_that_are_shown_are_the_files() -> None:
    text = (ROOT / "docs/writing_models.md").read_text(encoding="utf-8")
    shown = {m[3].splitlines()[0].removeprefix("# "): m[3].partition("\n")[2] for m in _FENCE.finditer(text)}
    assert len(shown) == 2
    assert {name: (ROOT / name).read_text(encoding="utf-8") for name in shown} == shown
