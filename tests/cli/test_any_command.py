"""Any words and files on the command line: an honest exit status, plain text, one style of error, and an end.

``pytest --hypothesis-profile long tests/cli/test_any_command.py`` tries thirty times as many.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT
from support.suite.examples import examples

from attnreg.cli import main
from attnreg.cli.commands import cli

GPT_OSS = str(ROOT / "examples/configs/gpt-oss-120b")
# a command with what it needs to come to its work; a lock and files for output stand below the directory
PLACE = "{place}"
BASES = [
    *(["explain"], ["explain", "--arch", "sm90"], ["explain", "--arch", "sm90", "--model", GPT_OSS]),
    *(["list"], ["show"], ["show", "FLASH_ATTN"], ["show", "llama"], ["models", "llama"], ["doctor"]),
    *(["check"], ["check", "--lock", f"{PLACE}/good.lock"]),
    *(["lock"], ["lock", "--arch", "sm90", "--head-size", "64"], ["lock", "--arch", "sm90", "--model", GPT_OSS]),
    ["diff", "default", "default", "--arch", "sm90", "--head-size", "64"],
    ["diff", "default", f"{PLACE}/good.yaml", "--arch", "sm90", "--model", GPT_OSS],
    *(["verify", "TORCH_SDPA", "--arch", "x86_64"], ["completion"], ["help"], ["help", "explain"], []),
]
# bytes of a file -> its name
FILES = {
    "good.yaml": b"choices: [{deny: FLASHINFER}]\n",
    "empty": b"",
    "binary": bytes(range(256)),
    "nul.yaml": b"choices: []\0\n",
    "mark.yaml": b"\xef\xbb\xbfchoices: [{deny: FLASHINFER}]\r\n",
    "latin.yaml": "choices: [{because: \xe4}]".encode("latin-1"),
    "deep.yaml": b"choices: " + b"[" * 5000,
    "deep.json": b'{"format": ' + b"[" * 5000,
    "wide.json": b'{"model_type": "' + b"x" * 100_000 + b'"}',
    "huge.json": b'{"model_type": "llama", "num_hidden_layers": 1' + b"0" * 30 + b"}",
    "list.json": b"[]",
    "null.json": b"null",
    "format.json": b'{"format": 4}',
    "escape.json": b'{"model_type": "\\u001b[31m\\u202e", "format": 4, "selections": []}',
    "lines.yaml": b"extends: default\r\nchoices:\r\n- deny: \xe2\x80\xae\r\n",
}
HOSTILE = [
    "\x1b[31mred",
    "\u202eright",
    "a\nattnreg: forged",
    "\t",
    "\x00",
    "\udc80",
    "é",
    "x" * 5000,
    "-",
    "--",
    "=",
    "a=b",
]
TEXTS = st.one_of(st.sampled_from(["", " ", ".", "/", "~", "none", "null", "auto", *HOSTILE]), st.text(max_size=12))
NUMBERS = st.one_of(
    st.integers(-3, 600).map(str), st.sampled_from(["1" + "0" * 30, "-" + "9" * 5000, "1e9", "0x10", "nan", "٣"])
)
WORDS = [
    *("sm90", "h100", "gfx942", "x86_64", "cuda", "rocm", "fp8", "bfloat16", "mla", "sinks", "sliding_window", "draft"),
    *(
        "FLASH_ATTN",
        "FLASH_ATTN/FA3",
        "TORCH_SDPA",
        "default",
        "vllm-0.33.0",
        "mtp",
        "torch",
        "flash-attn==2.8",
        "aiter",
    ),
    *("cache_layout=SPLIT", "role=draft", "kv_dtype=fp8", "gpt-oss-20b", "turboquant_k8v4", "all", "cpu", "null=null"),
]
WRITTEN = ("-o", "--output", "--record")


class Stuck(BaseException):
    """Raised where a command does not end: nothing in attnreg catches it."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of odd files, which no command writes to."""
    folder = tmp_path_factory.mktemp("files")
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    (folder / "directory").mkdir()
    (folder / "unreadable").touch(mode=0)
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    assert main(["lock", "--arch", "sm90", "--head-size", "64", "-o", str(folder / "good.lock")]) == 0
    return folder


@pytest.fixture(autouse=True)
def no_long_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither all configurations nor kernels are tried: other tests do."""
    from attnreg.conformance import verify
    from attnreg.conformance.evidence import Evidence

    def unrun(claims: Any, device: Any, size: Any, *more: Any) -> Evidence:
        return verify._failure(Evidence(claims.backend, claims.platform, size), "not run")

    monkeypatch.setattr("attnreg.analysis.check.findings.check", lambda registry, here=None, **options: [])
    monkeypatch.setattr(verify, "_verify", unrun)
    monkeypatch.setattr(verify, "probe", lambda modules: {})
    monkeypatch.chdir(tmp_path)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def stuck(number: int, frame: FrameType | None) -> None:
        raise Stuck(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, stuck)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def options_of(name: str) -> list[click.Option]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return [param for param in command.params if isinstance(param, click.Option)]


OPTIONS = {name: options_of(name) for name in cli.list_commands(click.Context(cli))}
PATHS = st.sampled_from(
    [*FILES, "good.lock", "directory", "unreadable", "fifo", "loop", "dangling", "nowhere", "empty/x"]
)
VALUES = st.one_of(TEXTS, NUMBERS, st.sampled_from(WORDS), PATHS.map(lambda name: f"{PLACE}/{name}"))
UNWRITABLE = st.sampled_from(
    ["{place}", "/dev/full", "{place}/empty/x", "{place}/loop", "{place}/nowhere/x", "", "out"]
)


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """A command line: a command, some of its options with any values, and further words."""
    line = list(draw(st.sampled_from(BASES)))
    options = OPTIONS.get(line[0] if line else "", [])
    for _ in range(draw(st.integers(0, 3)) if options else 0):
        option = draw(st.sampled_from(options))
        name = draw(st.sampled_from(option.opts))
        if option.is_flag:
            line.append(name)
            continue
        value = draw(UNWRITABLE if name in WRITTEN else VALUES)
        line += draw(st.sampled_from([[name, value], [f"{name}={value}"]]))
    # the last option may lack its value
    line += [draw(st.sampled_from(options)).opts[0]] if options and draw(st.integers(0, 9)) == 0 else []
    return line + draw(st.lists(VALUES, max_size=2)) if draw(st.integers(0, 3)) == 0 else line


ENVIRONMENTS: st.SearchStrategy[dict[str, str | None]] = st.fixed_dictionaries(
    {},
    optional={
        "COLUMNS": st.integers(0, 300).map(str) | st.sampled_from(["", "x", "-5", "9" * 30]),
        "HOME": st.sampled_from([None, "", "/nowhere"]),
        "NO_COLOR": st.just("1"),
        "FORCE_COLOR": st.just("1"),
        "ATTNREG_REGISTRY": st.sampled_from(["default", "", "nowhere", "\x1b[31m"]),
        "ATTNREG_FLAGS": st.sampled_from(["aiter", "", ",,", "\x1b[31m", "all"]),
        "ATTNREG_REGSITRY": st.just("default"),
        "HF_HUB_CACHE": st.sampled_from(["", "/nowhere", "/dev/null"]),
    },
)


def judge(line: list[str], status: int, out: str, err: str) -> None:
    """Fail for anything that a user should never see."""
    assert status in (0, 1, 2), err
    for text in (out, err):
        assert "Traceback" not in text
        assert "internal error" not in text
        assert [c for c in text if not (c.isprintable() or c in "\n\t")] == []
        assert [part for part in text.split("\n") if part.startswith("attnreg: forged")] == []
    if status == 2:
        assert err.startswith(("attnreg: ", "Usage: ")), err
        # what is refused has printed no half of an answer
        assert not out
    # another program reads it
    if "--json" in line and out and status != 2:
        json.loads(out)


@given(line=lines(), environment=ENVIRONMENTS, encoding=st.sampled_from(["utf-8", "utf-8", "ascii", "latin-1"]))
@examples(60)
def test_any_command_line_ends_in_an_answer_or_in_one_style_of_error(
    place: Path, line: list[str], environment: dict[str, str | None], encoding: str
) -> None:
    line = [word.replace(PLACE, str(place)) for word in line]
    set_ = {name: value for name, value in environment.items() if value is not None}
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    with mock.patch.dict(os.environ, set_), within(120), redirect_stdout(out), redirect_stderr(err):
        for name in environment.keys() - set_.keys():
            os.environ.pop(name, None)
        status = main(line)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode(encoding))  # type: ignore[attr-defined]
    # a console that is told to has styles
    if "FORCE_COLOR" in environment:
        texts[0] = click.unstyle(texts[0])
    judge(line, status, *texts)


SURROUNDINGS: list[tuple[str, str, int]] = [
    ("no home, another locale", "env -u HOME LC_ALL=xx_YY.bad {command} explain --arch sm90", 0),
    ("a deleted directory", "mkdir gone && cd gone && rmdir ../gone && {command} explain --arch sm90", 0),
    ("closed streams", "{command} explain --arch sm90 >&- 2>&- <&-", 2),
    ("a reader that goes", "set -o pipefail; {command} explain --arch sm90 --json | true", 141),
    ("a narrow locale", "LC_ALL=C PYTHONUTF8=0 {command} list --arch gfx942", 0),
]


@pytest.mark.parametrize(
    ("shell", "status"), [case[1:] for case in SURROUNDINGS], ids=[case[0] for case in SURROUNDINGS]
)
def test_the_surroundings_change_no_verdict(shell: str, status: int, tmp_path: Path) -> None:
    line = shell.format(command=f"{sys.executable} -m attnreg")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, cwd=tmp_path, env=environment, timeout=120, check=False
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (status, False), done.stderr.decode()
