"""A registry small enough to try every configuration of it: two architectures' worth of words, and a way to load it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

import attnreg

VOCABULARY: dict[str, Any] = {
    "facets": {
        "platform": {"of": "platform", "kind": "word", "words": "platforms", "legend": "l"},
        "arch": {"of": "platform", "kind": "arch", "legend": "l"},
        "flags": {"of": "platform", "kind": "words", "words": "flags", "legend": "l"},
        "packages": {"of": "platform", "kind": "packages", "legend": "l"},
        "attention": {"of": "request", "kind": "word", "words": "attention", "legend": "l"},
        "phase": {"of": "request", "kind": "word", "words": "phases", "legend": "l"},
        "role": {"of": "request", "kind": "word", "words": "roles", "legend": "l"},
        "attn_type": {"of": "request", "kind": "word", "words": "attn_types", "legend": "l"},
        "dtype": {"of": "request", "kind": "word", "words": "dtypes", "claim": "dtypes", "legend": "l"},
        "kv_dtype": {"of": "request", "kind": "word", "words": "kv_dtypes", "claim": "kv_dtypes", "legend": "l"},
        "head_size": {"of": "request", "kind": "integer", "claim": "head_sizes", "legend": "l"},
        "head_size_v": {"of": "request", "kind": "integer", "claim": "head_sizes_v", "legend": "l"},
        "block_size": {"of": "request", "kind": "integer", "claim": "block_sizes", "legend": "l"},
        "num_heads": {"of": "request", "kind": "integer", "claim": "num_heads", "legend": "l"},
        "num_kv_heads": {"of": "request", "kind": "integer", "claim": "num_kv_heads", "legend": "l"},
        **{
            name: {"of": "request", "kind": "integer", "legend": "l"}
            for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk")
        },
        "model": {"of": "request", "kind": "text", "legend": "l"},
        "features": {"of": "request", "kind": "words", "words": "features", "legend": "l"},
        # beyond the usual ones
        "eager": {"of": "request", "kind": "boolean", "legend": "l"},
        "ranks": {"of": "request", "kind": "integer", "legend": "l"},
    },
    "features": {"sinks": "l", "alibi": "l"},
    "words": {
        "platforms": {"gpu": "l", "npu": "l"},
        "attention": {"mha": "l"},
        "phases": {"any": "l"},
        "roles": {"target": "l", "draft": "l"},
        "attn_types": {"decoder": "l"},
        "dtypes": {"float16": "l", "bfloat16": "l"},
        "kv_dtypes": {"auto": "l", "fp8": "l"},
    },
    "flags": {"fast": {"legend": "l"}},
    "packages": {"lib": {"legend": "l"}},
    "architectures": {"gpu": {"g1": {"family": "f"}, "g2": {"family": "f"}}, "npu": {"n1": {"family": "f"}}},
    "derived": {
        "quantized": {"legend": "l", "cases": [{"when": {"kv_dtype": [None, "auto"]}, "value": False}, {"value": True}]}
    },
}


def row(**changes: Any) -> dict[str, Any]:
    """A row that accepts everything of a gpu but its features."""
    return {"summary": "s", "platforms": ["gpu"], "attention": "mha", "capabilities": {}, "source": "s:p#q", **changes}


def load(
    backends: Mapping[str, Any],
    priorities: Mapping[str, Any] | None = None,
    *,
    invariants: Iterable[Mapping[str, Any]] = (),
    overlays: Iterable[Mapping[str, Any]] = (),
    vocabulary: Mapping[str, Any] | None = None,
) -> attnreg.Registry:
    """A registry of these rows. Without priorities one order tries all of them, by name."""
    sources = {"s": {"url": "u", "version": "1"}}
    files = {
        "vocabulary": {**VOCABULARY, **(vocabulary or {})},
        "backends": {"sources": sources, "backends": dict(backends)},
        "priorities": priorities or {"gpu": [{"name": "all", "order": sorted(backends)}]},
        "invariants": {"invariants": list(invariants)},
    }
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory, "tiny")
        place.mkdir()
        for name, data in files.items():
            (place / f"{name}.yaml").write_text(yaml.safe_dump(data, sort_keys=False, width=1000))
        return attnreg.load_registry(place, list(overlays))
