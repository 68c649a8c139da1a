"""`attnreg diff` over more than two registries: one table of what the layers of models get."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.registries.silent import silent_release

from attnreg import Platform
from attnreg.analysis.history import OutcomeRow
from attnreg.analysis.moves import AskedGroup
from attnreg.explain.changes import outcome_spans

GEMMA, LLAMA = (str(ROOT / "examples" / "configs" / name) for name in ("gemma-3-27b-it", "Llama-3.1-8B"))
RELEASES = ("vllm-0.20.0", "vllm-0.24.0", "vllm-0.33.0")


def test_a_move_there_and_back_is_a_change(run: Callable[..., Any]) -> None:
    """The first and the last release agree, and the one between them does not."""
    there, back = "vllm-0.32.0", "vllm-0.33.0"
    found = run("diff", there, "vllm-0.24.0", back, "--arch", "sm120", "--model", GEMMA)
    assert found.status == 1
    assert "2 of 3 pairs of layers and architectures change" in found.out
    for line in (f"TRITON_ATTN/paged: {there}", "FLASH_ATTN/FA2: vllm-0.24.0", f"TRITON_ATTN/paged: {back}"):
        assert line in found.out
    between = run("diff", there, back, "--arch", "sm120", "--model", GEMMA, "--json")
    assert [move for move in json.loads(between.out)["moves"] if move["changes"] == []] == []


def test_another_name_of_the_same_kernel_is_no_change(run: Callable[..., Any]) -> None:
    found = run("diff", *RELEASES, "--arch", "sm90", "--model", LLAMA, "--json")
    assert found.status == 0
    (row,) = json.loads(found.out)["rows"]
    assert row["outcomes"] == ["FLASH_ATTN/FA3", "FLASH_ATTN/FA3", "FLASH_ATTN/FA3-4"]
    assert not row["changes"]


def test_a_release_without_an_answer_is_passed_over(run: Callable[..., Any]) -> None:
    """The kernels before and after it are compared, and the exit status says that a part is not known."""
    arguments = ("--arch", "sm120", "--model", str(ROOT / "examples" / "configs" / "ModernBERT-base"), "--json")
    found = run("diff", "vllm-0.20.0", "vllm-0.24.0", "vllm-0.28.0", *arguments)
    rows = json.loads(found.out)["rows"]
    assert {tuple(row["outcomes"]) for row in rows} == {("not known", "FLASH_ATTN/FA2", "FLASH_ATTN/FA2")}
    assert not any(row["changes"] for row in rows)
    assert found.status == 3


def test_registries_of_several_engines(run: Callable[..., Any]) -> None:
    found = run("diff", "sglang-0.5.14", "sglang-0.5.23", "vllm-0.33.0", "--arch", "sm90", "--model", LLAMA, "--json")
    rows = json.loads(found.out)["rows"]
    # SGLang chooses for prompts apart from tokens, and vLLM for both at once: its backend runs both
    assert [row["outcomes"] for row in rows] == [["fa3", "fa3", "FLASH_ATTN/FA3-4"]] * 2


@pytest.mark.parametrize("option", [("--boxes",), ("--limit", "3"), ("--any-packages",)])
def test_boxes_compare_two(run: Callable[..., Any], option: tuple[str, ...]) -> None:
    refused = run("diff", *RELEASES, *option)
    assert refused.status == 2
    assert "compare two registries" in refused.err


def test_a_word_that_no_registry_knows_is_refused(run: Callable[..., Any]) -> None:
    refused = run("diff", *RELEASES, "--arch", "sm90", "--model", LLAMA, "--kv-dtype", "nonsense")
    assert refused.status == 2
    assert "kv_dtype names 'nonsense'" in refused.err


def test_what_a_registry_does_not_know_is_told(run: Callable[..., Any], tmp_path: Path) -> None:
    found = run("diff", RELEASES[0], silent_release(tmp_path), RELEASES[2], "--arch", "xe2", "--model", LLAMA)
    assert found.status == 3
    assert "note: not known of Llama-3.1-8B in vllm-0.32.0: vllm-0.32.0 says nothing of xpu" in found.out


def test_another_claim_of_the_same_backend_is_a_change(run: Callable[..., Any], tmp_path: Path) -> None:
    """As where two registries are compared: here by the block sizes that a backend takes."""
    overlay = tmp_path / "blocks.yaml"
    overlay.write_text(
        "extends: default\nbackends: {TRITON_ATTN: {capabilities: {block_sizes: [{multiple_of: 32}]}}}\n"
    )
    asked = ("--arch", "sm75", "--model", LLAMA, "--dtype", "float16")
    two = run("diff", "default", str(overlay), *asked, "--json")
    three = run("diff", "default", "default", str(overlay), *asked, "--json")
    (move,), (row,) = json.loads(two.out)["moves"], json.loads(three.out)["rows"]
    assert (two.status, three.status) == (1, 1)
    assert row["differs"] == ["", "", "; ".join(move["changes"])]


def test_names_that_begin_alike_are_two_outcomes() -> None:
    asked = AskedGroup("", "", "", (None, None))
    row = OutcomeRow(asked, Platform("cpu"), ("A/one", "A", "A"), ("", "", "block_size 16 → 32"), True)
    assert outcome_spans(row, "xyz") == ["A/one: x", "A: y", "A (block_size 16 → 32): z"]


@pytest.mark.parametrize("sources", [("vllm-0.34", "vllm-0.33"), ("vllm-0.33", "0.32", "vLLM 0.34")])
def test_a_release_without_a_table_is_refused_in_one_sentence(
    run: Callable[..., Any], sources: tuple[str, ...]
) -> None:
    result = run("diff", *sources, "--model", LLAMA)
    assert (result.status, result.out) == (2, "")
    named = next(name for name in sources if "0.34" in name)
    assert result.err.splitlines()[0] == f"attnreg: {named}: there is no table of vLLM 0.34"
    assert result.err.endswith("the nearest is `vllm-0.33.0`\n")
    assert "there is no table of vLLM 0.34" in run("explain", "--registry", "vllm-0.34", "--arch", "sm90").err


def test_what_no_registry_knows_is_said_once(run: Callable[..., Any]) -> None:
    asked = ("--arch", "xe2", "--arch", "xe_hpc", "--model", LLAMA, "--model", GEMMA)
    names = ("sglang-0.5.21", "sglang-0.5.22", "sglang-0.5.23")
    for sources, said in ((names[1:], "in {1} and {2}: "), (names, "in {0}, {1} and {2}: ")):
        lines = " ".join(run("diff", *sources, *asked).out.split())
        assert lines.count("SGLang has steps of its own for Intel GPUs") == 1
        assert said.format(*names) in lines
