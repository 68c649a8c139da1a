"""Environment variables that were meant for attnreg, or for an engine, are reported where nothing reads them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import attnreg
from attnreg.environment import VARIABLES, environment_problems

KNOWN = "ATTNREG_DEBUG, ATTNREG_FLAGS, ATTNREG_PLUGINS, ATTNREG_REGISTRY, ATTNREG_SGLANG, ATTNREG_VLLM"


def meant(name: str) -> str:
    others = ", ".join(v for v in KNOWN.split(", ") if v != name)
    return f"did you mean `{name}`? (also: {others})"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ATTNREG_REGISTY", meant("ATTNREG_REGISTRY")),
        ("ATTNREG_REGISTRIES", meant("ATTNREG_REGISTRY")),
        ("ATTN_REGISTRY", meant("ATTNREG_REGISTRY")),
        ("ATTNREGISTRY", meant("ATTNREG_REGISTRY")),
        ("ATNREG_REGISTRY", meant("ATTNREG_REGISTRY")),
        ("_ATTNREG_REGISTRY", meant("ATTNREG_REGISTRY")),
        ("attnreg_registry", meant("ATTNREG_REGISTRY")),
        ("ATTNREG_FLAG", meant("ATTNREG_FLAGS")),
        ("ATTNREG_BACKEND", f"known: {KNOWN}"),
    ],
)
def test_near_misses_are_reported(name: str, hint: str, default: attnreg.Registry) -> None:
    assert environment_problems({name: "x"}, default.vocabulary) == [
        f"{name} is set, but attnreg reads no such variable; {hint}"
    ]


def test_every_retired_name_is_reported_with_what_to_use_instead(default: attnreg.Registry) -> None:
    retired = default.vocabulary.retired_environment
    (problem,) = environment_problems({"VLLM_ATTENTION_BACKEND": "FLASHINFER"}, default.vocabulary)
    assert problem == (
        "VLLM_ATTENTION_BACKEND is set; vLLM has retired it and attnreg does not read it. "
        "Use --backend NAME, or an overlay with `require`."
    )
    assert len(environment_problems(dict.fromkeys(retired, "1"), default.vocabulary)) == len(retired) >= 5


def test_what_is_read_and_what_is_unrelated_is_not_reported(default: attnreg.Registry) -> None:
    unrelated = ["PATH", "VLLM_LOGGING_LEVEL", "ATTN", "REGISTRY", "_ATTNREG_COMPLETE", "_", "ATTENTION_BACKEND"]
    assert environment_problems(dict.fromkeys([*VARIABLES, *unrelated], "x"), default.vocabulary) == []


def test_reports_come_sorted(default: attnreg.Registry) -> None:
    names = ["VLLM_ATTENTION_BACKEND", "ATTNREG_X", "ATTNREG_B"]
    problems = environment_problems(dict.fromkeys(names, ""), default.vocabulary)
    assert [p.split(" ", 1)[0] for p in problems] == sorted(names)


# the default registry, which is loaded once in a process ------------------------------------------------------------

SELECT_TWICE = """
from attnreg import AttentionRequest, Platform, select
for _ in range(2):
    select(AttentionRequest(head_size=128), Platform(platform="cuda", arch="sm90"))
    print("selected")
"""


def run(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ATTNREG", "VLLM", "PYTHONWARN"))}
    command = [sys.executable, *options, "-c", SELECT_TWICE]
    return subprocess.run(command, env=clean | environ, capture_output=True, text=True, check=False)


def test_the_first_select_warns_once() -> None:
    result = run(VLLM_ATTENTION_BACKEND="FLASHINFER")
    assert result.stdout == "selected\nselected\n"
    assert result.stderr.count("RegistryWarning: VLLM_ATTENTION_BACKEND is set; vLLM has retired it") == 1
    # the warning points at the caller's line, not into attnreg
    assert result.stderr.startswith("<string>:4: RegistryWarning")


def test_a_clean_environment_is_silent() -> None:
    result = run(ATTNREG_FLAGS="aiter")
    assert (result.stdout, result.stderr) == ("selected\nselected\n", "")


def test_the_registry_of_the_environment_is_the_default_one() -> None:
    result = run(ATTNREG_REGISTRY="nowhere")
    assert "RegistryError" in result.stderr
    assert (
        "`nowhere` is neither a bundled registry nor a directory nor a file; $ATTNREG_REGISTRY names it"
        in result.stderr
    )
