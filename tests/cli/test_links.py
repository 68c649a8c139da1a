"""Cited lines are links to their files on a terminal with styles, and plain text elsewhere."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import click
import pytest
from rich.segment import Segment
from support import ROOT

from attnreg.cli.commands import main
from attnreg.cli.screen.links import cite, linked

PRIORITIES = (ROOT / "registry/priorities.yaml").as_uri()


class Terminal(io.StringIO):
    """A stream that calls itself a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def links_of(text: str, *files: str) -> list[tuple[str, str]]:
    """The parts of a text that are links, with what they open, in a command that reads some files."""
    with click.Context(click.Command("x")):
        cite(files)
        parts = list(linked(Segment(text)))
    assert "".join(part.text for part in parts) == text
    return [(part.text, part.style.link) for part in parts if part.style and part.style.link]


def test_a_cited_line_opens_the_file_that_the_command_read() -> None:
    files = ("registry/priorities.yaml", "registry/backends.yaml")
    assert links_of("(order cuda/mha, priorities.yaml:84)", *files) == [("priorities.yaml:84", f"{PRIORITIES}#84")]
    two = links_of("registry/priorities.yaml:84:5: a, backends.yaml:3", *files)
    assert two == [
        ("registry/priorities.yaml:84:5", f"{PRIORITIES}#84"),
        ("backends.yaml:3", f"{(ROOT / 'registry/backends.yaml').as_uri()}#3"),
    ]


PLAIN = [
    "",
    "priorities.yaml",
    "there are 12:30 hours",
    "nowhere.yaml:3",
    "https://example.com/priorities.yaml:84",
    "priorities.yaml:",
]


@pytest.mark.parametrize("text", PLAIN)
def test_other_text_is_plain(text: str) -> None:
    assert links_of(text, "registry/priorities.yaml") == []


def test_a_name_of_two_files_is_no_link() -> None:
    files = ("registry/priorities.yaml", "registry/engines/vllm-0.33.0/priorities.yaml")
    assert links_of("priorities.yaml:84", *files) == []
    assert len(links_of("registry/priorities.yaml:84", *files)) == 1


def test_a_file_of_the_user_is_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.sh").touch()
    assert links_of("serve.sh:2:3: no such backend") == [("serve.sh:2:3", f"{(tmp_path / 'serve.sh').as_uri()}#2")]


def test_a_long_word_takes_a_moment() -> None:
    for text in ("a" * 200_000, "a/" * 100_000, "a." * 100_000, "+a" * 100_000, "a.yaml" * 40_000):
        assert links_of(text) == []


@pytest.mark.parametrize(
    ("stream", "variables", "expected"),
    [
        (Terminal, {"TERM": "xterm-256color"}, True),
        (Terminal, {"TERM": "dumb"}, False),
        (Terminal, {"TERM": "xterm-256color", "NO_COLOR": "1"}, False),
        (io.StringIO, {"TERM": "xterm-256color"}, False),
        (io.StringIO, {"TERM": "xterm-256color", "FORCE_COLOR": "1"}, False),
    ],
)
def test_terminals_get_links(
    stream: type[io.StringIO], variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    out = stream()
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["show", "cuda/mha"]) == 0
    assert bool(re.search(rf"\x1b]8;[^;]*;{re.escape(PRIORITIES)}#\d+\x1b\\", out.getvalue())) is expected
    assert expected or "\x1b]" not in out.getvalue()
