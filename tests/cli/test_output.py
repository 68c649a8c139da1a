"""What reaches the terminal: no control character, and an honest status where nothing can be written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.registries.files import write

from attnreg import cli
from attnreg.analysis.check.findings import check
from attnreg.cli import commands

# controls, marks of direction and other invisible formats, line and paragraph separators
HOSTILE = [c for c in map(chr, range(1, 0x110000)) if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")]
WORD = "x" + "".join(HOSTILE) + "\nFORGED"
# what YAML may hold: the reader refuses the others
IN_DATA = "x" + "".join(c for c in HOSTILE if unicodedata.category(c) != "Cc") + "y"
PLAIN = ["--arch", "sm90", "--head-size", "128"]


def hostile_path(below: Path) -> Path:
    """A directory below another whose path holds every hostile character."""
    parts = [WORD[i : i + 50] for i in range(0, len(WORD), 50)]
    path = below.joinpath(*parts)
    path.mkdir(parents=True)
    return path


def assert_plain(*texts: str) -> None:
    for text in texts:
        lines = text.split("\n")
        # a tab moves no cursor back
        assert [c for line in lines for c in line if not (c.isprintable() or c == "\t")] == []
        assert not any(line.startswith("FORGED") for line in lines)


ARGUMENTS: list[list[str]] = [
    *(["explain", *PLAIN, option, WORD] for option in ("--registry", "--overlay", "--model", "--draft", "--backend")),
    *(["explain", *PLAIN, option, WORD] for option in ("--prefer", "--deny", "--platform", "--flag", "--package")),
    *(["explain", *PLAIN, option, WORD] for option in ("--kv-dtype", "--feature", "--set", "--tp", "--trust", WORD)),
    ["explain", *PLAIN, "--set", f"{WORD}=1"],
    ["explain", *PLAIN, "--package", f"torch=={WORD}"],
    ["explain", "--arch", WORD],
    [WORD],
    ["show", WORD],
    ["models", WORD],
    ["completion", WORD],
    ["diff", "default", WORD],
    ["diff", f"{WORD}:registry", "default"],
    ["diff", "default", "default", "--facet", f"{WORD}=1"],
    ["check", "--lock", WORD],
    ["lock", *PLAIN[:2], "--model", "examples/configs/gpt-oss-120b", "-o", f"/nowhere/{WORD}"],
    ["verify", WORD, *PLAIN[:2]],
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda a: " ".join(a).replace(WORD, "…")[:60])
def test_an_argument_is_printed_without_control_characters(run: Callable[..., Any], arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.status in (0, 1, 2)
    assert_plain(result.out, result.err)


@pytest.mark.parametrize("variable", ["ATTNREG_FLAGS", "ATTNREG_REGISTRY", f"ATTNREG_{WORD.upper()}"])
def test_a_variable_is_printed_without_control_characters(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, WORD)
    for command in (["doctor"], ["doctor", "--json"], ["explain", "--head-size", "64"]):
        result = run(*command)
        assert_plain(result.out, result.err)


def test_a_path_is_printed_without_control_characters(run: Callable[..., Any], tmp_path: Path) -> None:
    place = hostile_path(tmp_path)
    config = json.loads((ROOT / "examples/configs/gpt-oss-120b/config.json").read_text())
    (place / "config.json").write_text(json.dumps(config))
    (place / "broken.json").write_text("{")
    (place / "overlay.yaml").write_text("choices: [{prefer: NOTHING}]\n")
    (place / "right.yaml").write_text("choices: [{prefer: TRITON_ATTN, because: b}]\n")
    write(place / "registry", backends="{")
    commands = [
        ["explain", *PLAIN[:2], "--model", str(place)],
        ["explain", *PLAIN[:2], "--model", str(place), "--json"],
        ["explain", *PLAIN[:2], "--model", str(place / "broken.json")],
        ["explain", *PLAIN, "--overlay", str(place / "overlay.yaml")],
        ["explain", *PLAIN, "--registry", str(place / "right.yaml")],
        ["check", "--registry", str(place / "registry")],
        ["lock", *PLAIN[:2], "--model", str(place)],
        ["lock", *PLAIN[:2], "--model", str(place), "-o", str(place)],
        ["check", "--lock", str(place / "overlay.yaml")],
    ]
    for command in commands:
        result = run(*command)
        assert_plain(result.out, result.err)
    for line in (run(*commands[0]).out.splitlines()[0], run(*commands[6]).out):
        assert "\\U000e00" in line


def test_data_are_printed_without_control_characters(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = tmp_path / "mine.yaml"
    data = {
        "choices": [{"prefer": "TRITON_ATTN", "because": IN_DATA}, {"deny": ["FLASHINFER"], "because": IN_DATA}],
        "backends": {"FLASH_ATTN": {"notes": [IN_DATA], "summary": IN_DATA}},
        "vocabulary": {"features": {"new": IN_DATA}},
        "invariants": [{"name": "i", "says": IN_DATA, "never": ["FLASH_ATTN"]}],
    }
    overlay.write_text(json.dumps(data, ensure_ascii=False))
    # what is found does not depend on how it is printed
    found: list[Any] = []
    monkeypatch.setattr("attnreg.analysis.check.findings.check", lambda *of: found or found.extend(check(*of)) or found)
    for command in (["explain", *PLAIN], ["show", "FLASH_ATTN"], ["list"], ["check"]):
        for more in ([], ["--json"]):
            result = run(*command, *more, "--overlay", str(overlay))
            assert result.status != 2, result.err
            assert_plain(result.out, result.err)


def test_a_config_is_printed_without_control_characters(run: Callable[..., Any], tmp_path: Path) -> None:
    config = json.loads((ROOT / "examples/configs/gpt-oss-120b/config.json").read_text())
    for name in ("model_type", "dtype", "torch_dtype", "_name_or_path", "architectures", "layer_types", "head_dim"):
        for value in (WORD, [WORD] * config["num_hidden_layers"], {WORD: WORD}):
            (tmp_path / "config.json").write_text(json.dumps(config | {name: value, WORD: WORD}))
            for command in (["explain", *PLAIN[:2], "--model"], ["lock", *PLAIN[:2], "--model"]):
                result = run(*command, str(tmp_path))
                assert_plain(result.out, result.err)


def attnreg(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "PYTHONIOENCODING")}
    environment |= options.pop("env", {})
    command = [sys.executable, "-m", "attnreg", *arguments]
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    return subprocess.run(command, encoding=encoding, cwd=ROOT, env=environment, timeout=120, check=False, **options)


WRITERS = [["explain", *PLAIN], ["explain", *PLAIN, "--json"], ["--help"], ["--version"], ["help", "explain"]]


@pytest.mark.parametrize("arguments", WRITERS, ids=" ".join)
def test_output_that_cannot_be_written_is_said_and_no_verdict(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = attnreg(*arguments, stdout=full, stderr=subprocess.PIPE)
    said = "attnreg: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = attnreg(*arguments, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_streams() -> None:
    shell = f'"{sys.executable}" -m attnreg explain --arch sm90 --head-size 128'
    cases = [
        (">&-", 2, "", "attnreg: standard output cannot be written: it is closed\n"),
        ("2>&-", 0, None, ""),
        ("--arch sm91 2>&-", 2, "", ""),
        ("--arch sm91 2>/dev/full", 2, "", ""),
    ]
    for words, status, out, err in cases:
        done = subprocess.run(f"{shell} {words}", shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (status, err)
        assert out is None or done.stdout == out


def test_a_file_that_cannot_be_written_is_said(run: Callable[..., Any], tmp_path: Path) -> None:
    command = ["lock", *PLAIN[:2], "--model", "examples/configs/gpt-oss-120b", "-o"]
    for name, why in (("absent/x.lock", "No such file or directory"), (".", "Is a directory")):
        result = run(*command, str(tmp_path / name))
        assert result.status == 2
        assert result.err == f"attnreg: {tmp_path / name}:1:1: cannot be written: {why}\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_encoding_that_lacks_characters_costs_no_answer(encoding: str) -> None:
    for arguments in (WRITERS[0], WRITERS[1], ["models", "llama"]):
        done = attnreg(*arguments, env={"PYTHONIOENCODING": encoding}, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")
    assert "\n> HOPPER_ATTN" in attnreg(*WRITERS[0], env={"PYTHONIOENCODING": "ascii"}, capture_output=True).stdout


FAULT = "attnreg: internal error: KeyError: 'lost'\n  help: please report it with the traceback, which "


@pytest.mark.parametrize("fault", [KeyError("lost"), RecursionError("deep"), SystemExit(1), MemoryError()])
def test_a_fault_of_attnreg_is_no_verdict(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise fault

    monkeypatch.delenv("ATTNREG_DEBUG", raising=False)
    monkeypatch.setattr(commands, "cli", fail)
    result = run("list")
    name = type(fault).__name__
    assert result.status == 70
    first, second = result.err.splitlines()[:2]
    assert first == f"attnreg: internal error: {name}: {fault}".rstrip()
    assert second.startswith("  help: please report it with the trace")
    assert "Traceback" not in result.err
    monkeypatch.setenv("ATTNREG_DEBUG", "1")
    result = run("list")
    assert result.status == 70
    assert result.err.startswith("Traceback")


def test_an_interrupt_is_quiet_from_the_first_import_on(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import builtins, os, signal, sys
imported = builtins.__import__
def interrupting(name, *rest, **named):
    if name == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGINT)
    return imported(name, *rest, **named)
builtins.__import__ = interrupting
from attnreg.cli import main
sys.exit(main(["explain", "--arch", "sm90", "--head-size", "128"]))
"""
    # where no registry is kept, what compiles is imported too
    unkept = {**os.environ, "XDG_CACHE_HOME": os.devnull}
    for module in ("click", "attnreg.cli.command", "attnreg.compile.cache", "yaml", "pydantic", "rich.console"):
        command = [sys.executable, "-c", code, module]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=unkept)
        assert (done.returncode, done.stderr.strip()) == (130, "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def interrupt(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "main", interrupt)
    assert cli.main([]) == 130
