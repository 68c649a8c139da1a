"""The command as a whole: exit statuses, problems on stderr, a pipe, and the completion of its words."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support import ROOT

STATUS = [
    ("something was selected", ["--arch", "sm90", "--head-size", "128"], 0),
    ("nothing is valid", ["--arch", "sm75", "--head-size", "128", "--kv-dtype", "nvfp4"], 1),
    ("a request that is refused", ["--arch", "sm90", "--head-size", "128", "--backend", "ROCM_ATTN"], 1),
    ("an unknown word", ["--arch", "sm90", "--kv-dtype", "fp8_e4m4"], 2),
    ("an unknown option", ["--ach", "sm90"], 2),
]


@pytest.mark.parametrize(("arguments", "status"), [case[1:] for case in STATUS], ids=[case[0] for case in STATUS])
def test_exit_status(run: Callable[..., Any], arguments: list[str], status: int) -> None:
    assert run("explain", *arguments).status == status


BAD_INPUT = [
    (["--arch", "sm91"], "unknown architecture 'sm91'\n  help: did you mean `sm90`"),
    (["--arch", "blackwell"], "unknown architecture 'blackwell'\n  help: blackwell is `sm100` or"),
    (["--platform", "nvidia"], "unknown platform 'nvidia'\n  help: nvidia is `cuda` here"),
    (["--arch", "h100", "--dtype", "bf16"], "does not know\n  help: bf16 is `bfloat16` here"),
    (
        ["--arch", "mi300x", "--flag", "VLLM_ROCM_USE_AITER"],
        "does not know\n  help: VLLM_ROCM_USE_AITER is `aiter` here",
    ),
    (["--arch", "sm90", "--backend", "flash_attn"], "unknown backend 'flash_attn'\n  help: did you mean `FLASH_ATTN`"),
    (["--arch", "sm90", "--backend", "sdpa"], "unknown backend 'sdpa'\n  help: did you mean `TORCH_SDPA`?"),
    (["--arch", "sm90", "--backend", "flash_attention_2"], "\n  help: did you mean `FLASH_ATTN`"),
    (["--platform", "rcom"], "unknown platform 'rcom'\n  help: did you mean `rocm`?"),
    (["--platform", "rocm", "--arch", "sm90"], "arch is sm90, which belongs to platform cuda, not rocm"),
    (["--arch", "sm90", "--kv-dtype", "fp8_e4m4"], "kv_dtype names 'fp8_e4m4'"),
    (["--arch", "sm90", "--feature", "sink"], "features names 'sink'"),
    (["--arch", "gfx942", "--flag", "aitr"], "flags names 'aitr'"),
    (["--arch", "sm90", "--head-size", "0"], "head_size is 0; expected at least 1"),
    (["--arch", "sm90", "--head-size", "wide"], "--head-size is 'wide'; expected an integer\n"),
    (["--arch", "sm90", "--num-heads", "6", "--num-kv-heads", "4"], "the second must divide the first"),
    (["--arch", "sm90", "--backend", "FLASH_ATN"], "unknown backend 'FLASH_ATN'\n  help: did you mean `FLASH_ATTN`"),
    (
        ["--arch", "sm90", "--backend", "FLASH_ATTN/FA5"],
        "unknown variant 'FA5' of FLASH_ATTN\n  help: did you",
    ),
    (
        ["--arch", "sm90", "--backend", "FA3"],
        "unknown backend 'FA3'\n  help: it is a variant: FLASHINFER/fa3, FLASH_ATTN/FA3, ",
    ),
    (
        ["--arch", "sm90", "--deny", "FLASH_ATN"],
        "--deny: unknown backend `FLASH_ATN`\n  help: did you mean",
    ),
    (
        ["--arch", "sm90", "--prefer", "FLASH_ATTN/FA5"],
        "--prefer: unknown variant of FLASH_ATTN `FA5`\n",
    ),
    (["--arch", "sm90", "--package", "flash-atn"], "unknown package 'flash-atn'\n  help: did you mean `flash-attn`?"),
    (["--arch", "sm90", "--set", "run_kv_dtype"], "--set run_kv_dtype: expected FACET=VALUE"),
    (["--arch", "sm90", "--set", "run_kv_dtyp=fp8"], "run_kv_dtyp is no facet of default@"),
    (
        ["--arch", "sm90", "--registry", "vlm-0.33.0"],
        "`vlm-0.33.0` is neither a bundled registry nor a directory nor a file",
    ),
    (["--arch", "sm90", "--model", "nowhere.json"], "nowhere.json"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=[" ".join(case[0][-2:]) for case in BAD_INPUT])
def test_bad_input_is_said_on_stderr_without_a_traceback(
    run: Callable[..., Any], arguments: list[str], message: str
) -> None:
    result = run("explain", *arguments)
    assert result.status == 2
    assert message in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_retired_and_mistyped_variables_are_reported(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    monkeypatch.setenv("ATTNREG_REGISTY", "x")
    result = run("explain", "--arch", "sm90", "--head-size", "128")
    assert result.status == 0
    assert "VLLM_ATTENTION_BACKEND is set; vLLM has retired it and attnreg does not read it." in result.err
    assert "did you mean `ATTNREG_REGISTRY`?" in result.err


def test_a_pipe_gets_plain_text() -> None:
    command = [sys.executable, "-m", "attnreg", "explain", "--arch", "sm90", "--head-size", "128"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "\x1b" not in done.stdout


def test_a_run_leaves_the_garbage_collector_as_it_was(run: Callable[..., Any]) -> None:
    before = gc.get_threshold()
    assert run("list").status == 0
    assert gc.get_threshold() == before


@pytest.mark.parametrize("option", ["--registry", "--prefer", "--trust", "--overlay", "--arch", "--model"])
def test_an_empty_value_is_no_default(run: Callable[..., Any], option: str) -> None:
    for arguments in ([option, ""], [f"{option}="]):
        result = run("explain", *arguments)
        assert result.status == 2
        assert result.err == f"attnreg: {option} is empty\n  help: give it a value, or leave it out\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("FLASH_ATTN/FA9", "FLASH_ATTN has no variant 'FA9'\n  help: `attnreg show FLASH_ATTN` prints all: FA4, "),
        ("CPU_ATTN/x", "CPU_ATTN has no variant 'x'\n  help: `attnreg show CPU_ATTN` prints it\n"),
    ],
)
def test_a_variant_is_shown_with_its_backend(run: Callable[..., Any], name: str, said: str) -> None:
    result = run("show", name)
    assert result.status == 2
    assert result.err.startswith(f"attnreg: {said}")
    assert "llama" not in result.err
