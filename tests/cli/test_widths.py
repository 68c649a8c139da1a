"""Every width and every encoding: no name is cut, no line ends in blanks, no character is lost."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support import ROOT

from attnreg import Registry
from attnreg.cli import main

GPT_OSS = str(ROOT / "examples/configs/gpt-oss-120b")
COMMANDS = [
    ("list", "--platform", "rocm"),
    ("show", "ROCM_AITER_UNIFIED_ATTN"),
    ("show", "FLASH_ATTN"),
    ("models", "gpt_oss", "mixtral"),
    ("explain", "--platform", "rocm", "--model", GPT_OSS),
    ("explain", "--platform", "rocm", "--model", GPT_OSS, "--brief"),
    ("explain", "--arch", "sm90", "--head-size", "100", "--kv-dtype", "nvfp4"),
    ("doctor",),
]


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(c[:3]) for c in COMMANDS])
def test_nothing_is_cut(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, default: Registry, command: tuple[str, ...], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    widest = run(*command).out
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run(*command).out.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    # a word that is wider than the terminal, such as a path, stands alone on its line
    assert [line for line in lines if len(line) > columns and " " in line.strip(" ·")] == []
    names = [name for name in default.backends if re.search(rf"\b{name}\b", widest)]
    printed = "\n".join(lines)
    assert [name for name in names if not re.search(rf"\b{name}\b", printed)] == []
    # every word is printed, whatever its place; only the first column needs no heading
    words = {word for word in widest.split() if word.isalpha()} - {"backend", "layers", "model_type"}
    assert words - set(re.findall(r"\w+", printed)) == set()


def test_a_narrow_list_names_its_columns(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = run("list", "--arch", "gfx942").out.splitlines()
    at = lines.index("ROCM_AITER_UNIFIED_ATTN")
    assert lines[at + 1 : at + 6] == [
        "  attention: mha",
        "  platforms: rocm",
        "  run by: attnreg",
        "  what it is: aiter's Triton kernel that serves prompts and",
        "    generated tokens in one launch.",
    ]


class Terminal(io.TextIOWrapper):
    """Standard output of an encoding, which may be a terminal."""

    tty = False

    def isatty(self) -> bool:
        return self.tty


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(c[:3]) for c in COMMANDS])
def test_an_encoding_that_lacks_characters_gets_their_likes(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], encoding: str
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", Terminal(raw, encoding, write_through=True))
    assert main(command) in (0, 1)
    text = raw.getvalue().decode(encoding)
    assert text
    assert not re.search(r"\\[xu]\w\w|\?\?", text)


def test_ascii_is_an_answer_and_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", Terminal(raw, "ascii", write_through=True))
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["explain", "--arch", "sm90", "--model", GPT_OSS]) == 0
    lines = raw.getvalue().decode("ascii").splitlines()
    assert lines[0].startswith("gpt-oss-120b | 36 layers | bfloat16 | CUDA sm90 (H100, ...) | every package assumed |")
    assert lines[2] == "18 layers (0, 2, ... 34)   64/8 heads of 64 | sliding window 128 | sinks"
    assert lines[4].startswith("> HOPPER_ATTN   1st choice of 4 (order cuda/hopper-sinks, priorities.yaml:")


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_leaves_out_every_style(monkeypatch: pytest.MonkeyPatch, no_color: str) -> None:
    raw = io.BytesIO()
    stdout = Terminal(raw, "utf-8", write_through=True)
    stdout.tty = True
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    assert main(["explain", "--arch", "sm90", "--head-size", "128"]) == 0
    # by the standard an empty variable is as good as none
    assert (b"\x1b[" in raw.getvalue()) == (not no_color)


def test_a_retired_variable_is_said_once(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    status, out, err = run("doctor")
    assert (status, (out + err).count("VLLM_ATTENTION_BACKEND")) == (0, 1)
    data = json.loads(run("doctor", "--json").out)
    assert len([p for p in data["problems"] if "VLLM_ATTENTION_BACKEND" in p]) == 1


@pytest.mark.parametrize("columns", ["0", "-5", "", "wide", "1" * 5000])
def test_a_width_that_no_terminal_has_is_as_none(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    expected = run("explain", "--arch", "sm90", "--model", GPT_OSS, "--brief")
    monkeypatch.setenv("COLUMNS", columns)
    assert run("explain", "--arch", "sm90", "--model", GPT_OSS, "--brief") == expected
    assert "HOPPER_ATTN" in expected.out
