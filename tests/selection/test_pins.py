"""What is advised to somebody whose packages pin the versions of others: only what an installer would do."""

from __future__ import annotations

import re
from typing import Any

import pytest

from attnreg import AttentionRequest, Platform, Registry
from attnreg.errors import Location
from attnreg.language.matchers import Requirement
from attnreg.language.vocabulary import Word
from attnreg.selection.pins import means
from attnreg.selection.remedies import remedy
from attnreg.selection.selector import evaluate

TORCH = {"2.9": ["triton~=3.5.0"], "2.13": ["triton==3.7.1"], "2.14": ["triton~=3.8.0"], "2.15": ["triton~=3.9.0"]}
ENGINE = {"1": ["torch==2.13.0"], "2": ["torch==2.14.0"]}
KNOWN = {
    name: Word(name, "l", Location("v.yaml", 1, 1), {"brings": table})
    for name, table in {"torch": TORCH, "engine": ENGINE, "triton": {}}.items()
}

# installed, what is wanted of triton, how it is had
CASES: list[tuple[dict[str, str], str, str]] = [
    ({}, ">=3.6", "triton>=3.6"),
    ({"torch": ""}, ">=3.6", "triton>=3.6"),
    ({"torch": "2.9.1", "triton": "3.5.1"}, ">=3.6", "torch>=2.13, which brings triton 3.7.1"),
    ({"torch": "2.9.1"}, "", "triton"),
    ({"torch": "2.14.0+cu130"}, ">=3.8", "triton>=3.8"),
    ({"torch": "2.14.0"}, ">=3.8.1", "triton>=3.8.1"),
    ({"torch": "2.14.0"}, ">=3.6,<3.8", "torch==2.13.*, which brings triton 3.7.1"),
    ({"torch": "2.14.0"}, ">=3.9", "torch>=2.15, which brings triton 3.9"),
    ({"torch": "2.9.0"}, "==3.8.*", "torch==2.14.*, which brings triton 3.8"),
    ({"torch": "2.14.0"}, ">=4", "triton>=4, which torch 2.14.0 excludes: it brings triton 3.8"),
    # nothing is known of what it brings
    ({"torch": "2.16.0"}, ">=4", "triton>=4"),
    ({"torch": "no version"}, ">=4", "triton>=4"),
    ({"other": "1"}, ">=4", "triton>=4"),
    # the engine pins torch in turn
    ({"engine": "1.4", "torch": "2.13.0"}, ">=3.8", "engine>=2, which brings torch 2.14.0 and triton 3.8"),
    (
        {"engine": "2.0", "torch": "2.14.0"},
        ">=3.9",
        "triton>=3.9, which torch 2.14.0 excludes: it brings triton 3.8",
    ),
]


@pytest.mark.parametrize(("installed", "versions", "text"), CASES)
def test_how_a_version_is_had(installed: dict[str, str], versions: str, text: str) -> None:
    packages = tuple(sorted(installed.items()))
    assert means(Requirement("triton", versions), packages, KNOWN).text == text


@pytest.mark.parametrize(
    ("packages", "text"),
    [
        ({"torch": "2.9.1", "triton": "3.5.1"}, "would win with package torch>=2.10, which brings triton 3.6.0"),
        ({"torch": "2.14.0"}, "would win with package triton>=3.6"),
    ],
)
def test_a_remedy_names_the_torch_that_brings_a_triton(default: Registry, packages: dict[str, str], text: str) -> None:
    platform = Platform(platform="cuda", arch="sm90", packages=packages)
    selection = evaluate(AttentionRequest(head_size=128, dtype="bfloat16", block_size=16), platform, default)
    [refused] = [c for c in selection.candidates if c.name == "HOPPER_ATTN"]
    answer = remedy(selection, refused)
    assert answer is not None
    assert answer.sentence == text


def test_what_the_vocabulary_says_is_brought_are_packages_that_it_knows(default: Registry) -> None:
    known: Any = default.vocabulary.packages
    tables = [word.facts.get("brings", {}) for word in known.values()]
    pinned = {re.split("[=~]", pin)[0] for table in tables for pins in table.values() for pin in pins}
    assert {"torch", "triton"} <= pinned <= set(known)
