"""The commands that say what the data says, as a person meets them: what they print, and where."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

GPT_OSS = str(ROOT / "examples/configs/gpt-oss-120b")


def test_explain_puts_the_answer_first_and_cites_every_verdict(run: Callable[..., Any]) -> None:
    result = run("explain", "--platform", "rocm", "--arch", "gfx942", "--model", GPT_OSS)
    lines = result.out.splitlines()
    assert result.status == 0
    model, where = "gpt-oss-120b · 36 layers · bfloat16", r"ROCm gfx942 \(MI300X, …\) · every package assumed"
    assert re.match(rf"{model} · {where} · attnreg's own kernels", lines[0])
    # the title takes two lines here
    del lines[1]
    assert lines[2:4] == [
        "18 layers (0, 2, … 34)   64/8 heads of 64 · sliding window 128 · sinks",
        "18 layers (1, 3, … 35)   64/8 heads of 64 · sinks",
    ]
    assert re.match(r"▸ TRITON_ATTN   4th choice of 5 \(order rocm/mha, priorities\.yaml:\d+\)", lines[4])
    assert re.search(
        r"3 ROCM_ATTN +emulates sinks \(slow\); TRITON_ATTN serves them natively +backends\.yaml:\d+", result.out
    )
    assert "↳ would win with --flag aiter --flag aiter_mha" in result.out


def test_the_suggested_change_makes_the_candidate_win(run: Callable[..., Any]) -> None:
    flags = ("--flag", "aiter", "--flag", "aiter_mha")
    result = run("explain", "--platform", "rocm", "--arch", "gfx942", "--model", GPT_OSS, *flags)
    assert "▸ ROCM_AITER_FA" in result.out


def test_without_an_architecture_every_one_answers_and_those_that_agree_share_a_verdict(
    run: Callable[..., Any],
) -> None:
    result = run("explain", "--platform", "rocm", "--head-size", "128")
    groups = [line for line in result.out.splitlines() if line.startswith("gfx")]
    assert groups == [
        "gfx90a (MI210, …), gfx1100 (RX 7900, …)",
        "gfx942 (MI300X, …), gfx950 (MI350X, …), gfx1250 (MI450)",
        "gfx1200 (RX 9060), gfx1201 (RX 9070, …)",
    ]


def test_json_is_the_whole_trace(run: Callable[..., Any]) -> None:
    result = run("explain", "--arch", "sm90", "--model", GPT_OSS, "--json")
    data = json.loads(result.out)
    selection = data["answers"][0]["selections"][0]
    assert selection["backend"] == {"name": "HOPPER_ATTN", "variant": None}
    assert selection["candidates"][2]["variant"] == "FA3"
    assert {"rank", "name", "variant", "accepted", "reasons", "would_win"} <= set(selection["candidates"][0])


def test_prefer_and_deny_are_choices_like_an_overlays(run: Callable[..., Any]) -> None:
    preferred = run("explain", "--arch", "sm90", "--head-size", "128", "--prefer", "TRITON_ATTN")
    assert "▸ TRITON_ATTN   preferred" in preferred.out
    denied = run("explain", "--arch", "sm90", "--head-size", "128", "--deny", "HOPPER_ATTN")
    assert "▸ FLASH_ATTN/FA3" in denied.out
    assert "denied" in denied.out


def test_one_variant_of_a_backend_is_asked_for_preferred_and_denied(run: Callable[..., Any]) -> None:
    hopper = ("explain", "--arch", "h100", "--head-size", "128", "--dtype", "float16")
    assert "▸ FLASH_ATTN/FA3   requested" in run(*hopper, "--backend", "FLASH_ATTN/FA3").out
    assert "▸ FLASH_ATTN/FA2   requested" in run(*hopper, "--backend", "FLASH_ATTN/FA2").out
    assert "▸ FLASH_ATTN/FA2   preferred" in run(*hopper, "--prefer", "FLASH_ATTN/FA2").out
    assert "▸ FLASH_ATTN/FA3-engine   1st choice of 6" in run(*hopper, "--deny", "FLASH_ATTN/FA3").out
    all_of_3 = [word for name in ("FA3", "FA3-engine", "FA3-hub") for word in ("--deny", f"FLASH_ATTN/{name}")]
    assert "▸ FLASH_ATTN/FA4-Hopper   1st choice of 6" in run(*hopper, *all_of_3).out
    refused = run("explain", "--arch", "a100", "--head-size", "128", "--backend", "FLASH_ATTN/FA3")
    assert refused.status == 1
    assert "would accept it if asked for by name: FLASH_ATTN/FA2, FLASHINFER" in refused.out
    assert re.search(r"1 FLASH_ATTN/FA3 +arch is sm80; needs ", refused.out)


def test_an_overlay_file_re_ranks(run: Callable[..., Any], tmp_path: Path) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text("extends: default\norders:\n  cuda:\n    - {name: mine, order: [TRITON_ATTN, FLASH_ATTN]}\n")
    by_option = run("explain", "--arch", "sm90", "--head-size", "128", "--overlay", str(overlay))
    as_registry = run("explain", "--arch", "sm90", "--head-size", "128", "--registry", str(overlay))
    for result in (by_option, as_registry):
        assert re.search(r"▸ TRITON_ATTN   1st choice of 2 \(order cuda/mine, mine\.yaml:4\)", result.out)


def test_mla_is_explained_for_decoding_and_for_prompts(run: Callable[..., Any]) -> None:
    result = run("explain", "--arch", "sm90", "--model", str(ROOT / "examples/configs/DeepSeek-V3"))
    assert "▸ HOPPER_MLA" in result.out
    assert "· prefill" in result.out
    assert "▸ FLASH_ATTN_PREFILL/FA3" in result.out


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = run("explain", "--platform", "rocm", "--model", GPT_OSS)
    assert max(len(line) for line in result.out.splitlines()) <= columns


def test_list_names_the_orders_that_apply(run: Callable[..., Any]) -> None:
    result = run("list", "--platform", "rocm")
    assert "1 ROCM_AITER_FA → 2 ROCM_AITER_UNIFIED_ATTN → 3 ROCM_ATTN → 4 TRITON_ATTN → 5 TURBOQUANT" in result.out
    assert "FLASHINFER " not in result.out
    assert "–: knowledge only; 4 of 18 rows have no kernel module: they can be explained, not run" in result.out
    # the kernel modules of FLASH_ATTN are for NVIDIA's variants alone
    assert re.search(r"^FLASH_ATTN +mha +cuda, rocm, xpu +– ", result.out, re.MULTILINE)
    assert re.search(
        r"^FLASH_ATTN +mha +cuda, rocm, xpu +attnreg ", run("list", "--platform", "cuda").out, re.MULTILINE
    )
    names = [row["name"] for row in json.loads(run("list", "--json").out)["backends"]]
    assert names == sorted(names)
    assert len(names) == 36


def test_show_prints_every_variant_with_its_lines(run: Callable[..., Any]) -> None:
    result = run("show", "FLASH_ATTN")
    for variant in ("FA4", "FA3", "FA2"):
        assert f"▸ {variant}" in result.out
    assert re.search(r"backends\.yaml:\d+", result.out)
    # resolved, and every claim of it, those too that refuse nothing
    wide = result.out.partition("▸ FA4-wide")[2].partition("▸")[0]
    stated = dict(re.findall(r"^  ([a-z_]+)  +(.+?)  +backends\.yaml:\d+$", wide, re.MULTILINE))
    assert stated["kv_dtypes"] == "auto, float16, bfloat16, fp8, fp8_e4m3"
    assert (stated["head_sizes"], stated["head_sizes_v"]) == ("multiples of 8 from 257 to 512", "the same as head_size")
    assert (stated["num_heads"], stated["num_kv_heads"], stated["cache_layouts"]) == ("any", "any", "NHD, HND")
    alone = run("show", "FLASH_ATTN/FA3").out
    assert "▸ FA3" in alone
    assert "▸ FA2" not in alone
    assert "did you mean `FLASHMLA`?" in run("show", "FLASMLA").err
    (variant,) = json.loads(run("show", "ROCM_ATTN", "--json").out)["variants"]
    assert variant["emulated"]["sinks"]
    assert {key: variant["claims"][key] for key in ("head_sizes_v", "num_heads")} == {
        "head_sizes_v": "the same as head_size",
        "num_heads": "any",
    }


def test_doctor_names_this_machine_and_what_is_missing(run: Callable[..., Any]) -> None:
    result = run("doctor")
    assert result.status == 0
    assert re.search(r"^(cpu|cuda|rocm|xpu) \w+", result.out, re.MULTILINE)
    data = json.loads(run("doctor", "--json").out)
    assert data["devices"][-1]["platform"] == "cpu"


def test_an_empty_word_lists_no_families(run: Callable[..., Any]) -> None:
    message = "attnreg: an empty WORD is in every name\n  help: without a WORD all families are listed\n"
    assert run("models", "llama", "") == (2, "", message)


def test_values_as_wide_as_keys_are_those_of_a_request_that_says_nothing_of_them(run: Callable[..., Any]) -> None:
    out = run("explain", "--arch", "sm90", "--attention", "mla", "--head-size", "576", "--head-size-v", "576").out
    assert "note: --head-size-v 576 is --head-size, as it is without that option\n" in out


@pytest.mark.parametrize("option", ["--registry", "--overlay", "--trust"])
def test_a_model_family_is_of_no_registry(run: Callable[..., Any], option: str) -> None:
    message = "attnreg: llama is a model family, which is read alike with every registry\n  help: give its name alone\n"
    assert run("show", "llama", option, "vllm-0.33.0") == (2, "", message)
