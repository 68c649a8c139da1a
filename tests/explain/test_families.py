"""Model families as a person and as a program read them."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from support.registries import small_families

from attnreg.explain.families import family_dict, print_families, print_family
from attnreg.models.families import Families


@pytest.fixture(scope="module")
def families() -> Families:
    return small_families.families(
        """
        parent:
          heads: 16
          window: 128
          pattern: {repeat: [sliding, full]}
          layers: 4
        child:
          like: parent
          note: It has more heads.
          heads: 32
        bare:
          layers: depth
        """
    )


def printed(console: Console) -> list[str]:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return [re.sub(r"\.yaml:\d+", ".yaml:*", line).rstrip() for line in text.splitlines()]


def console() -> Console:
    return Console(width=100, file=io.StringIO(), highlight=False)


def test_a_family_is_printed_with_those_that_it_is_like(families: Families) -> None:
    out = console()
    print_family(families, "child", out)
    assert printed(out) == [
        "child   child.yaml:*",
        "  like: parent",
        "  note: It has more heads.",
        "  heads: 32",
        "  source: here:file.py#Name",
        "",
        "parent   which child is like   parent.yaml:*",
        "  heads: 16",
        "  window: 128",
        "  pattern: {repeat: [sliding, full]}",
        "  layers: 4",
        "  source: here:file.py#Name",
        "",
        "a config without any other field",
        "  2 layers (0, 2)   32/8 heads of 64 · sliding window 128",
        "  2 layers (1, 3)   32/8 heads of 64",
    ]


def test_a_family_whose_class_has_no_default_says_so(families: Families) -> None:
    out = console()
    print_family(families, "bare", out)
    assert printed(out)[-1] == "  cannot be read: the class has no default for something that every file says"
    assert family_dict(families, "bare")["groups"] == []


def test_families_are_listed_with_their_layers(families: Families) -> None:
    out = console()
    print_families(families, ["child", "bare"], out)
    lines = [" ".join(line.split()) for line in printed(out)]
    assert [line for line in lines if line and "─" not in line] == [
        "2 model families",
        "model_type like layers of its class by default",
        "child parent 2 layers (0, 2) 32/8 heads of 64 · sliding window 128",
        "2 layers (1, 3) 32/8 heads of 64",
        "bare",
    ]
    alone = console()
    print_families(families, ["bare"], alone)
    assert printed(alone)[0].strip() == "1 model family"


def test_a_family_as_json_has_its_file_and_its_layers(families: Families) -> None:
    data = family_dict(families, "child")
    assert (data["model_type"], data["like"], data["note"]) == ("child", "parent", "It has more heads.")
    assert data["source"] == "here:file.py#Name"
    assert data["where"] == "models/child.yaml:1:1"
    assert "heads: 32" in data["rule"]
    assert data["groups"] == [
        {"layers": "2 layers (0, 2)", "label": "32/8 heads of 64 · sliding window 128"},
        {"layers": "2 layers (1, 3)", "label": "32/8 heads of 64"},
    ]
