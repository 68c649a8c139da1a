"""The table at the top of docs/attention_backends.md: which backend well-known layers get on each architecture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnreg.platforms import Platform
from attnreg.registry import Registry
from attnreg.request import AttentionRequest
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import Selected
from docs.markdown import table

_LLAMA: dict[str, Any] = {"head_size": 128, "dtype": "bfloat16", "num_heads": 32, "num_kv_heads": 8}
_LATENT: dict[str, Any] = {
    "head_size": 576, "head_size_v": 512, "dtype": "bfloat16", "num_heads": 128, "num_kv_heads": 1, "attention": "mla",
}  # fmt: skip
# the title of a column -> the request of its layer
_LAYERS: dict[str, dict[str, Any]] = {
    "Llama (heads of 128)": _LLAMA,
    "Llama, fp8 cache": {**_LLAMA, "kv_dtype": "fp8"},
    "gpt-oss (sinks)": {**_LLAMA, "head_size": 64, "num_heads": 64, "features": {"sinks"}},
    "Gemma 2 (softcap)": {**_LLAMA, "head_size": 256, "num_heads": 16, "features": {"softcap"}},
    "DeepSeek V3 (MLA), decode": {**_LATENT, "phase": "decode"},
    "vision tower (heads of 72)": {
        "head_size": 72, "dtype": "bfloat16", "num_heads": 16, "role": "vision", "attn_type": "encoder_only",
    },
}  # fmt: skip


def glance(registry: Registry) -> str:
    """A row for all architectures that get the same backends, with every package installed and no flag set."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for arch, chosen in _chosen(registry):
        rows.setdefault(chosen, []).append(arch)
    body = [[", ".join(archs), *chosen] for chosen, archs in rows.items()]
    return table([("architectures", 13), *((title, len(title)) for title in _LAYERS)], body)


def _chosen(registry: Registry) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each architecture, and the backend that each layer gets there."""
    for arch in registry.vocabulary.architectures.values():
        platform = Platform(arch.platform, arch.name)
        found = [evaluate(AttentionRequest(**layer), platform, registry).backend for layer in _LAYERS.values()]
        yield f"`{arch.name}`", tuple(map(_linked, found))


def _linked(backend: Selected | None) -> str:
    """``[FLASH_ATTN]/FA3``: a chosen backend, with a link to its row."""
    return backend.title.replace(backend.name, f"[{backend.name}]", 1) if backend else "none"
