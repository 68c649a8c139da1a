"""The title, the labels and the command of `attnreg explain` say what was asked."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from attnreg import Platform
from attnreg.machine import detect as detection

GPT_OSS = str(ROOT / "examples/configs/gpt-oss-120b")
HERE = Platform(platform="rocm", arch="gfx942", flags=frozenset({"aiter"}), packages={"triton": "3.7", "torch": ""})  # type: ignore[arg-type]
LLAMA = str(ROOT / "examples/configs/Llama-3.1-8B")
DIFFERENT = [
    (),
    ("--head-size-v", "64"),
    ("--set", "cache_layout=SPLIT"),
    ("--index-topk", "2048"),
    ("--block-size", "17"),
    ("--package", "torch"),
    ("--package", "torch==2.9"),
    ("--package", "none"),
    ("--flag", "aiter"),
    ("--feature", "lse"),
    ("--role", "draft"),
    ("--role", "encoder"),
    ("--attn-type", "encoder"),
    ("--dtype", "float16"),
    ("--kv-dtype", "none"),
    ("--num-heads", "8"),
    ("--num-kv-heads", "8"),
    ("--num-heads", "8", "--num-kv-heads", "8"),
    ("--phase", "decode"),
    ("--backend", "FLASHINFER"),
    ("--prefer", "FLASHINFER"),
    ("--deny", "FLASHINFER"),
    ("--arch", "sm80"),
]
ONLY_OF_MODELS = [("--tp", "2"), ("--layer", "1"), ("--draft", LLAMA), ("--attention", "mla")]
ONLY_OF_MODELS += [
    ("--draft", LLAMA, *more) for more in (("--draft-kv-dtype", "fp8"), ("--draft-backend", "TRITON_ATTN"))
]


def answered(run: Callable[..., Any], *arguments: str) -> Any:
    return json.loads(run("explain", *arguments, "--json").out)


@pytest.mark.parametrize("subject", [("--head-size", "128"), ("--model", GPT_OSS)], ids=["request", "model"])
def test_questions_that_differ_have_different_titles(run: Callable[..., Any], subject: tuple[str, str]) -> None:
    changes = DIFFERENT + (ONLY_OF_MODELS if subject[0] == "--model" else [])
    titles = {answered(run, "--arch", "sm90", *subject, *change)["title"]: change for change in changes}
    assert sorted(titles.values()) == sorted(changes)


def test_a_changed_model_is_labelled_by_its_changed_request(run: Callable[..., Any]) -> None:
    changed = ("--attention", "mla", "--head-size", "128", "--num-kv-heads", "4")
    data = answered(run, "--arch", "sm90", "--model", GPT_OSS, *changed)
    assert [a["label"] for a in data["answers"]] == [
        "64/4 heads of 128 · KV cache auto · attention mla · sliding window 128 · sinks",
        "64/4 heads of 128 · KV cache auto · attention mla · sinks",
    ]
    assert data["title"].startswith(
        "gpt-oss-120b · 36 layers · bfloat16 · attention mla · head_size 128 · num_kv_heads 4 · CUDA sm90 (H100, …) · "
    )
    # the cache is counted for the changed request too: one latent of 128 elements of two bytes in 36 layers
    assert data["kv_cache"]["bytes_per_token"] == 36 * 128 * 2
    same = answered(run, "--arch", "sm90", "--model", GPT_OSS, "--head-size", "64")
    assert same["answers"][1]["label"] == "64/8 heads of 64 · sinks"


def test_without_an_architecture_it_says_that_it_is_this_machine(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "detect", lambda vocabulary: HERE)
    data = answered(run, "--head-size", "64")
    assert (
        " · this machine, ROCm gfx942 (MI300X, …) · flag aiter · packages as installed here: torch, triton==3.7 · "
        in (data["title"])
    )
    assert data["notes"][0] == "no --arch: this machine, gfx942"
    assert "note: no --arch: this machine, gfx942" in run("explain", "--head-size", "64").out.splitlines()
    assert " · only packages triton · " in answered(run, "--head-size", "64", "--package", "triton")["title"]
    assert "this machine" not in answered(run, "--arch", "gfx942")["title"]


COMMANDS: list[tuple[str, ...]] = [
    ("--head-size", "64", "--flag", "aiter_mha"),
    ("--arch", "sm90", "--arch", "gfx942", "--head-size", "64", "--set", "cache_layout=SPLIT", "--feature", "sinks"),
    (
        "--platform",
        "rocm",
        "--model",
        GPT_OSS,
        "--tp",
        "2",
        "--kv-dtype",
        "none",
        "--deny",
        "TRITON_ATTN",
        "--length",
        "9",
    ),
    ("--arch", "sm90", "--package", "none", "--backend", "FLASH_ATTN"),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=[c[0] + c[-1] for c in COMMANDS])
def test_the_command_asks_the_same_again(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(detection, "detect", lambda vocabulary: HERE)
    first = answered(run, *arguments)
    command = shlex.split(first["command"])
    assert command[:2] == ["attnreg", "explain"]
    # another machine
    elsewhere = Platform(platform="cpu", arch="aarch64", packages=())
    monkeypatch.setattr(detection, "detect", lambda vocabulary: elsewhere)
    second = answered(run, *command[2:])
    assert second["answers"] == first["answers"]
    assert second["command"] == first["command"]


def test_the_command_has_the_registry_of_the_environment(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text("choices: [{deny: FLASH_ATTN}]\n")
    monkeypatch.setenv("ATTNREG_REGISTRY", str(overlay))
    assert answered(run, "--arch", "sm90")["command"] == f"attnreg explain --arch sm90 --registry {overlay}"


def test_brief_is_for_people(run: Callable[..., Any]) -> None:
    result = run("explain", "--arch", "sm90", "--model", GPT_OSS, "--brief")
    assert result.status == 0
    assert "HOPPER_ATTN for all 36 layers" in result.out.splitlines()[:3]
    status, out, err = run("explain", "--arch", "sm90", "--brief", "--json")
    assert (status, out) == (2, "")
    assert "--brief is for people, and --json prints everything" in err
