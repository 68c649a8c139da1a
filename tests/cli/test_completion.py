"""Completion of every name, as the shells ask for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import CompletionItem, ShellComplete
from support import ROOT

from attnreg import bundled_registries
from attnreg.cli.commands import cli

# what is typed, the last word unfinished -> some completions of it, and some words that are none
COMPLETED: list[tuple[list[str], set[str], set[str]]] = [
    (["plan", "--engine", "vllm-0.33", "--layout", ""], {"LBNHC", "HND"}, set()),
    (["plan", "--engine", "vllm-0.33", "--graphs", "full"], {"full", "full_and_piecewise"}, {"none"}),
    (["plan", "--layout", ""], set(), {"LBNHC"}),
    (["plan", "--engine", "sglang-0.5.23"], {"sglang-0.5.23"}, set()),
    (["exp"], {"explain"}, {"diff"}),
    (["help", "ex"], {"explain"}, {"diff"}),
    (["completion", ""], {"bash", "zsh", "fish"}, set()),
    (["explain", "--ba"], {"--backend"}, {"--arch"}),
    (["explain", "--platform", ""], {"cuda", "rocm", "xpu", "cpu"}, set()),
    (["explain", "--arch", ""], {"sm90", "gfx942"}, {"h100"}),
    (["explain", "--arch", "h1"], {"h100"}, {"h200"}),
    (["explain", "--arch", "rtx-40"], {"rtx-4090"}, {"rtx-5090"}),
    (["explain", "--backend", "flash"], {"FLASH_ATTN", "FLASHINFER"}, {"FLASH_ATTN/FA3"}),
    (["explain", "--backend", "FLASH_ATTN"], {"FLASH_ATTN", "FLASH_ATTN/FA3"}, {"FLASHINFER"}),
    (["explain", "--deny", "flash_attn/"], {"FLASH_ATTN/FA3", "FLASH_ATTN/FA2"}, {"FLASH_ATTN"}),
    (["explain", "--prefer", "TRIT"], {"TRITON_ATTN"}, set()),
    (["explain", "--registry", "v"], {"vllm-0.20.0", "vllm-0.33.0", "vllm-0.33.0+attnreg"}, {"default"}),
    (["explain", "--kv-dtype", "fp8_e"], {"fp8_e4m3", "fp8_e5m2"}, {"fp8"}),
    (["explain", "--dtype", ""], {"bfloat16", "float16", "float32"}, {"auto"}),
    (["explain", "--feature", "s"], {"sinks", "softcap"}, {"alibi"}),
    (["explain", "--flag", ""], {"aiter", "aiter_mha"}, set()),
    (["explain", "--package", "flash-"], {"flash-attn", "flash-mla"}, {"torch"}),
    (["explain", "--set", ""], {"cache_layout=NHD", "cache_layout=SPLIT"}, {"kv_dtype=fp8"}),
    (["explain", "--set", "cache_layout=S"], {"cache_layout=SPLIT"}, {"cache_layout=NHD"}),
    (["explain", "--registry", "vllm-0.33.0", "--flag", "flash"], {"flashmla_mega_attn"}, {"aiter"}),
    (["explain", "--model", "gpt-oss"], {"gpt-oss-120b", "gpt-oss-20b"}, {"Llama-3.1-8B"}),
    (["lock", "--model", "llama-3.1"], {"Llama-3.1-8B"}, set()),
    (["show", "llama"], {"llama", "llama4"}, {"FLASH_ATTN"}),
    (["show", "FLASHM"], {"FLASHMLA"}, {"FLASHINFER"}),
    (["models", "qwen3_n"], {"qwen3_next"}, set()),
    (["diff", "v"], {"vllm-0.20.0", "vllm-0.33.0"}, set()),
    (["diff", "vllm-0.20.0", "vllm-0.3"], {"vllm-0.33.0"}, {"vllm-0.20.0"}),
    (["diff", "default", "default", "--facet", "role="], {"role=draft"}, {"kv_dtype=fp8"}),
    (["verify", "TRITON_A"], {"TRITON_ATTN"}, set()),
    (["verify", "--size", ""], {"claims", "pairs"}, set()),
]


def completions(arguments: list[str]) -> list[CompletionItem]:
    """What click completes of the last argument."""
    return ShellComplete(cli, {}, "attnreg", "_ATTNREG_COMPLETE").get_completions(arguments[:-1], arguments[-1])


@pytest.mark.parametrize(("line", "some", "none"), COMPLETED, ids=[" ".join(case[0]) for case in COMPLETED])
def test_names_are_completed(
    line: list[str], some: set[str], none: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    found = {item.value for item in completions(line)}
    assert some <= found
    assert not none & found


def test_files_and_directories_are_offered_where_they_may_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vendored").mkdir()
    (item,) = completions(["explain", "--overlay", "mi"])
    assert (item.type, item.value) == ("file", "mi")
    (item,) = completions(["explain", "--model", "./x"])
    assert (item.type, item.value) == ("file", "./x")
    assert {i.value for i in completions(["explain", "--registry", "v"])} == {
        *(name for name in bundled_registries() if name.startswith("v")),
        "vllm-0.33.0+attnreg",
        "vendored/",
    }


def test_a_registry_that_cannot_be_read_completes_nothing() -> None:
    assert completions(["explain", "--registry", "nonsense", "--backend", "F"]) == []


def test_every_option_that_takes_a_name_is_completed() -> None:
    named = {"WORD", "NAME", "FACET=VALUE", "CONFIG", "NAME[==VERSION]", "NAME|DIR|FILE", "FILE", "FILE|DIR"}
    missing = []
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        for param in command.params:
            if isinstance(param, click.Option) and param.metavar in named and param.opts[0] != "--device":
                ctx = click.Context(command, info_name=name, resilient_parsing=True)
                if not param.shell_complete(ctx, ""):
                    missing.append((name, param.opts[0]))
    assert missing == []


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the command attnreg, for the PATH."""
    directory = tmp_path_factory.mktemp("bin")
    file = directory / "attnreg"
    file.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m attnreg "$@"\n')
    file.chmod(0o755)
    return directory


# the words as bash has them, which splits at `=`
BASH = [
    (["attnreg", "explain", "--arch", "gfx94"], ["gfx942"]),
    (["attnreg", "explain", "--backend", "ROCM_AITER_U"], ["ROCM_AITER_UNIFIED_ATTN"]),
    (["attnreg", "explain", "--arch", "=", "gfx94"], ["gfx942"]),
    (["attnreg", "explain", "--set", "cache_layout", "=", "SP"], ["SPLIT"]),
    (["attnreg", "explain", "--set", "cache_layout", "="], ["NHD", "HND", "SPLIT"]),
    (["attnreg", "explain", "--platform", ""], ["cuda", "rocm", "xpu", "cpu"]),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(("words", "replies"), BASH, ids=[" ".join(case[0]) for case in BASH])
def test_bash_completes_with_the_script(command: Path, words: list[str], replies: list[str]) -> None:
    program = (
        'eval "$(attnreg completion bash)"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
        '_attnreg_completion attnreg; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{command}:{os.environ['PATH']}"}
    run = ["bash", "--norc", "-c", program, "bash", *words]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    if "not supported for Bash versions older than 4.4" in done.stderr:
        pytest.skip("click needs bash 4.4")
    assert (done.stdout.split(), done.stderr) == (replies, "")


PROTOCOLS = [
    ("zsh", {"COMP_WORDS": "attnreg explain --arch gfx94", "COMP_CWORD": "3"}, ["plain", "gfx942"]),
    ("fish", {"COMP_WORDS": "attnreg explain --arch gfx94", "COMP_CWORD": "gfx94"}, ["plain,gfx942"]),
]


@pytest.mark.parametrize(("shell", "asked", "lines"), PROTOCOLS, ids=[case[0] for case in PROTOCOLS])
def test_zsh_and_fish_ask_as_their_scripts_do(
    command: Path, shell: str, asked: dict[str, str], lines: list[str], run: Callable[..., Any]
) -> None:
    script = run("completion", shell).out
    assert f"_ATTNREG_COMPLETE={shell}_complete" in script
    assert all(name in script for name in asked)
    environment = {**os.environ, **asked, "_ATTNREG_COMPLETE": f"{shell}_complete"}
    done = subprocess.run([command / "attnreg"], env=environment, capture_output=True, text=True, check=False)
    assert "\n".join(done.stdout.splitlines()).startswith("\n".join(lines))
