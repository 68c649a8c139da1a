"""The command's manners: its help, and what it says of options and commands that it does not have."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click
import pytest

from attnreg.cli.command import SECTIONS, Command
from attnreg.cli.commands import cli
from attnreg.version import __version__

REFUSED = [
    ("explian", "there is no command 'explian'", "did you mean `explain`?"),
    ("frobnicate", "there is no command 'frobnicate'", "`attnreg --help` lists the commands"),
    ("help lokc", "there is no command 'lokc'", "did you mean `lock`?"),
    ("explain --modle x", "explain has no option --modle", "did you mean `--model`?"),
    ("explain --KV_dtype fp8", "explain has no option --KV_dtype", "did you mean `--kv-dtype`?"),
    ("explain --frobnicate", "explain has no option --frobnicate", "`attnreg explain --help` lists its options"),
    ("--frobnicate", "there is no option --frobnicate", "`attnreg --help` lists its options"),
    ("explain gpt-oss-120b", "explain takes no arguments, got gpt-oss-120b", "did you mean `--model gpt-oss-120b`?"),
    ("explain h100", "explain takes no arguments, got h100", "did you mean `--arch h100`?"),
    (
        "explain FLASH_ATTN/FA3",
        "explain takes no arguments, got FLASH_ATTN/FA3",
        "did you mean `--backend FLASH_ATTN/FA3`?",
    ),
    ("list llama", "list takes no arguments, got llama", ""),
    (
        "explain --arch sm90 --set kv_dtype=fp8",
        "--set kv_dtype: this facet has an option of its own",
        "give --kv-dtype fp8",
    ),
    (
        "explain --arch sm90 --set features=sinks",
        "--set features: this facet has an option of its own",
        "give --feature sinks",
    ),
    ("show FLASH_ATTN MORE", "show takes no more arguments, got MORE", ""),
    (
        "lock --arch sm90",
        "lock needs --model",
        "give it once for each model; or give --head-size for one request",
    ),
    ("diff default", "diff needs AFTER", "`attnreg diff --help` describes it"),
    ("explain --arch", "--arch needs a value", ""),
    ("explain --brief=yes", "--brief takes no value", ""),
    ("explain --head-size wide", "--head-size is 'wide'; expected an integer", ""),
    ("explain --tp 0", "--tp is 0; expected an integer of at least 1", ""),
    ("explain --tp nan", "--tp is 'nan'; expected an integer of at least 1", ""),
    ("explain --prefer \x93", "--prefer or --deny: the control character U+0093 is not allowed", ""),
    ("completion csh", "SHELL: 'csh' is not one of 'bash', 'zsh', 'fish'", ""),
    ("explain --head-size 64 --head-size=128", "--head-size given twice: 64, 128", "it takes one value"),
    ("explain --backend A --backend B --backend C", "--backend given 3 times: A, B, C", "it takes one value"),
    ("lock --tp 2 --tp 4 --model x", "--tp given twice: 2, 4", "it takes one value"),
    ("list --registry default --registry default", "--registry given twice: default, default", "it takes one value"),
]


@pytest.mark.parametrize(("line", "message", "hint"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_is_refused_is_said_in_one_style(run: Callable[..., Any], line: str, message: str, hint: str) -> None:
    expected = f"attnreg: {message}\n" + (f"  help: {hint}\n" if hint else "")
    assert run(*line.split()) == (2, "", expected)


def test_the_version_and_the_help_are_where_people_look_for_them(run: Callable[..., Any]) -> None:
    assert run("-V") == run("--version") == (0, f"attnreg {__version__}\n", "")
    assert run("help") == run("--help") == run("-h")
    assert run("help", "explain") == run("explain", "--help")
    assert run("help", "explain").out.startswith("Usage: attnreg explain [OPTIONS]\n")
    # without a command the help is an error
    assert run() == (2, "", run("help").out)


@pytest.mark.parametrize("name", cli.list_commands(click.Context(cli)))
def test_help_lists_every_option_in_a_section_and_fits_80_columns(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    text = run(name, "--help-all" if getattr(command, "rare", ()) else "--help").out
    assert max(map(len, text.splitlines())) <= 80
    sections = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert sections == [section for section in SECTIONS if section in sections]
    options = [param for param in command.params if isinstance(param, click.Option)]
    # the line of usage has the arguments
    assert not re.search(r"^  [A-Z_|]+$", text, re.MULTILINE)
    assert [o.opts[0] for o in options if not re.search(rf"^  .*{o.opts[0]}\b", text, re.MULTILINE)] == []


LONG = ["explain", "lock", "diff", "upgrade", "tune", "plan"]


@pytest.mark.parametrize("name", LONG)
def test_the_short_help_leaves_out_rare_options_and_says_where_they_are(run: Callable[..., Any], name: str) -> None:
    text, whole = run(name, "--help").out, run(name, "--help-all").out
    command = cli.get_command(click.Context(cli), name)
    assert isinstance(command, Command)
    rare = {param.opts[0] for param in command.rare}
    assert {"--index-topk", "--v-head-dim", "--role", "--set"} <= rare
    listed = {word for line in text.splitlines() for word in re.findall(r"^  (--[\w-]+)", line)}
    assert listed.isdisjoint(rare)
    assert {"--model", "--kv-dtype", "--help-all"} <= listed
    assert text.endswith(f"\n{len(rare)} more options: attnreg {name} --help-all\n")
    assert rare <= set(re.findall(r"--[\w-]+", whole))
    assert "more options" not in whole
    # completion does not leave them out
    assert not any(getattr(param, "hidden", False) for param in command.params)


def test_a_command_with_few_rare_options_has_one_help() -> None:
    for name in sorted({*cli.list_commands(click.Context(cli))} - set(LONG)):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert getattr(command, "rare", []) == []


def test_an_option_that_takes_several_values_keeps_them_all(run: Callable[..., Any]) -> None:
    result = run("explain", "--arch", "sm90", "--arch", "sm80", "--head-size", "64", "--json", "--json")
    assert result.out.count('"arch": "sm80"') == result.out.count('"arch": "sm90"') == 1
