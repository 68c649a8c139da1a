"""The CUDA-graph mode of a run: what is asked, and how far the weakest layer takes it back."""

from __future__ import annotations

from typing import Any

import pytest

from attnreg.planning.graphs import agree_graphs
from attnreg.planning.run import Agreed, RunGroup

from .test_layout import SPARSE, group, registry


def agreed(*groups: RunGroup, release: str = "0.33.0", **given: Any) -> Agreed:
    return agree_graphs(groups, registry(release).graphs, **given)


LINEAR = RunGroup("linear", "target", (1,), None, None, "linear")
MAMBA = LINEAR._replace(kind="mamba")
WHOLE, DECODE, PIECES = "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE"


@pytest.mark.parametrize(
    ("arch", "backend", "facets", "given", "value"),
    [
        ("sm90", None, {}, {}, WHOLE),
        ("sm90", None, {}, {"asked": "full"}, "FULL"),
        # FlashAttention 2 replays no mixed batches
        ("sm80", None, {}, {"asked": "FULL"}, WHOLE),
        ("sm80", None, {}, {"asked": "FULL_DECODE_ONLY", "speculative_tokens": 3}, DECODE),
        ("sm90", None, {}, {"eager": True}, "NONE"),
        ("sm90", None, {}, {"asked": "NONE", "speculative_tokens": 3}, "NONE"),
        # FlashInfer's own kernels take one token below SM 9.0 and with DCP
        ("sm90", "FLASHINFER", {}, {"speculative_tokens": 3}, WHOLE),
        ("sm90", "FLASHINFER", {"features": {"dcp"}}, {"speculative_tokens": 3}, PIECES),
        ("sm90", "FLASHINFER", {"features": {"dcp"}}, {}, WHOLE),
        ("sm80", "FLASHINFER", {}, {"speculative_tokens": 3}, WHOLE),
        ("sm90", "FLASHINFER", {"extra": {"use_trtllm_attention": False}}, {"speculative_tokens": 3}, PIECES),
        # XQA takes heads in multiples of 16 up to 256
        ("sm120", "FLASHINFER", {"head_size": 512}, {"speculative_tokens": 1}, PIECES),
        ("gfx942", "ROCM_AITER_FA", {}, {"asked": "FULL"}, WHOLE),
        ("sm90", None, {"kind": "chunked"}, {}, PIECES),
        ("sm90", None, {"attn_type": "encoder_decoder"}, {}, DECODE),
        ("sm90", None, {"extra": {"pooling": True}}, {"asked": "FULL"}, PIECES),
        ("x86_64", None, {}, {}, "NONE"),
        # a model whose capture is broken at attention has no pieces to fall back to
        ("sm90", None, {**SPARSE, "model": "deepseek_v32"}, {"asked": "FULL"}, DECODE),
        # on AMD GPUs nothing breaks it either
        ("gfx942", None, {**SPARSE, "model": "deepseek_v32"}, {}, DECODE),
        ("gfx942", None, {"attn_type": "encoder_decoder"}, {}, "NONE"),
    ],
)
def test_a_run_has_one_mode(
    arch: str, backend: str | None, facets: dict[str, Any], given: dict[str, Any], value: str
) -> None:
    found = agreed(group(arch, backend, **facets), **given)
    assert (found.value, found.conflict) == (value, None), found
    assert found.where is not None


@pytest.mark.parametrize(
    ("release", "value"),
    [("0.24.0", PIECES), ("0.28.0", PIECES), ("0.30.0", WHOLE), ("0.32.0", WHOLE), ("0.33.0", WHOLE)],
)
def test_flashinfer_on_hopper_verifies_drafts_in_graphs_since_030(release: str, value: str) -> None:
    layers = group("sm90", "FLASHINFER", release=release)
    assert agreed(layers, release=release, speculative_tokens=3).value == value


def test_each_step_back_is_said() -> None:
    found = agreed(group("sm90", "FLASHINFER", features={"dcp"}), speculative_tokens=3, asked="FULL")
    level = "FLASHINFER has graphs of batches with one query token per request"
    assert found.dropped == (
        f"FULL becomes FULL_AND_PIECEWISE: {level}",
        f"FULL_AND_PIECEWISE becomes PIECEWISE: {level}, and speculation asks for 4",
    )
    assert found.text == f"{level}, and speculation asks for 4"


def test_graphs_of_every_batch_are_refused_where_no_graph_can_be() -> None:
    found = agreed(group("sm90", None, "chunks", kind="chunked"), asked="FULL")
    assert found.value is None
    assert found.conflict is not None
    assert [(fact.group, fact.sentence) for fact in found.conflict.facts] == [
        ("", "the mode is FULL, as asked for"),
        ("chunks", "FLASH_ATTN has graphs of no batch: chunks are cut for each batch"),
    ]


def test_a_draft_counts_and_is_asked_with_the_targets_heads() -> None:
    target = group("sm100", "FLASHINFER", num_heads=28, num_kv_heads=4)
    draft = group("sm100", "FLASHINFER", "draft", role="draft")
    assert agreed(target, speculative_tokens=3).value == WHOLE
    found = agreed(target, draft, speculative_tokens=3)
    assert found.value == PIECES
    assert "28 query heads of the target are no multiple of 8 KV heads" in found.text


def test_images_are_masked_by_another_kernel_than_text() -> None:
    clamped = {"sliding_window", "mm_prefix", "mm_prefix_in_window"}
    sliding = group("sm90", "TRITON_FLASH_ATTN", features=clamped, head_size=256)
    assert agreed(sliding).value == WHOLE
    assert agreed(sliding, speculative_tokens=1).value == PIECES
    full = group("sm90", "TRITON_FLASH_ATTN", features={"mm_prefix"}, head_size=256)
    assert agreed(full).value == WHOLE
    # another layer of the run has a window that images see beyond
    assert agreed(full, group("sm90", "FLASH_ATTN", features={"sliding_window"})).value == PIECES


def test_layers_without_softmax_have_a_level() -> None:
    assert agreed(group("sm90"), MAMBA, speculative_tokens=2).value == WHOLE
    known = group("sm90", model="qwen3_next")
    assert agreed(known, LINEAR, speculative_tokens=2).value == WHOLE
    assert agreed(group("sm90", model="minimax"), LINEAR, speculative_tokens=2).value == PIECES
    assert agreed(group("sm90", model="minimax"), LINEAR).value == WHOLE
    found = agreed(group("sm90", model="xlstm"), LINEAR)
    assert (found.value, found.text) == (None, "the graph level of linear is not known")


def test_a_rule_for_a_model_holds_of_layers_without_a_known_backend() -> None:
    """On AMD GPUs vLLM has no pieces of these models, whichever backend their layers get."""
    layers = group("gfx942", **{**SPARSE, "model": "glm_moe_dsa", "kv_dtype": "fp8_e5m2"})
    assert layers.selection is not None
    assert layers.selection.backend is None
    assert agreed(layers, asked="PIECEWISE").value == "NONE"


def test_what_is_not_known_is_said() -> None:
    assert agree_graphs([group("sm90")], None).text == "this table has no rules for CUDA graphs"
    assert agreed(group("sm90", "ROCM_ATTN", "target", head_size=129)).text == "no backend is known for target"
    assert agreed(group("xe2")).value is None
    # whether the class was imported before the version was known decides
    assert agreed(group("sm90", "FLASH_ATTN", extra={"flash_attn_version": 2})).value is None
    batch = group("sm90", features={"batch_invariant"})
    assert agreed(batch).value == WHOLE
    assert agreed(group("sm90", "FLASHINFER", features={"dcp", "batch_invariant"}), speculative_tokens=1).value is None
    with pytest.raises(ValueError, match="HALF is no mode of CUDA graphs; known: NONE, PIECEWISE, FULL,"):
        agreed(group("sm90"), asked="HALF")
