"""What the rows of the selection tests are written in."""

from __future__ import annotations

from typing import Any

from support.registries.asking import MLA

SPARSE = {**MLA, "attention": "mla_sparse", "index_topk": 2048, "model": "deepseek_v32"}
PREFILL = {**MLA, "phase": "prefill", "head_size": 192, "head_size_v": 128, "num_kv_heads": 128}
VISION = {"role": "vision", "attn_type": "encoder_only", "head_size": 80, "block_size": None}
WIDE = {"qk_nope_head_dim": 192, "v_head_dim": 256, "head_size": 256, "head_size_v": None}


def features(*words: str) -> dict[str, Any]:
    return {"features": frozenset(words)}


# name, where, change, backend, reasons of candidates that were not chosen (all of a candidate's, joined by "; ")
Row = tuple[str, str, dict[str, Any], str | None, dict[str, str]]
