"""SGLang's KV pools as caches of attnreg's runtime."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from attnreg.integrations.sglang.forms import LatentSizes
from attnreg.runtime.interface import KVCache


def pool_problems(pool: Any, translator: Any, *, latents: bool) -> Iterator[str]:
    """Every reason against a KV pool. Its classes are compared exactly: subclasses keep other layouts.

    latents: whether the model has MLA, whose pool holds latents.
    """
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    parts = []
    if latents:
        if type(pool) is not MLATokenToKVPool:
            yield f"the KV pool is {type(pool).__name__}; served with MLA: MLATokenToKVPool"
        elif pool.use_dsa or pool.kv_cache_dim != pool.kv_lora_rank + pool.qk_rope_head_dim:
            yield "the KV pool holds latents of sparse attention (DSA)"
    elif type(pool) is SWAKVPool:
        parts = [pool.full_kv_pool, pool.swa_kv_pool]
        if pool.swa_req_ring_size is not None or pool.request_window is not None or pool.swa_uses_full_indices:
            yield "the KV pool addresses keys of layers with windows by request"
        if pool.swa_layer_nums and pool.full_to_swa_index_mapping is None:
            yield "the KV pool does not say yet where the keys of layers with windows are"
    else:
        parts = [pool.full_kv_pool if type(pool) is HybridLinearKVPool else pool]
    for part in parts:
        if type(part) is not MHATokenToKVPool:
            yield f"the KV pool is {type(part).__name__}; served: MHATokenToKVPool"
        elif part.is_quantized_kv_cache:
            yield "the KV pool holds codes with scales of their own (FP4)"
        elif part.use_hnd or part.kv_cache_layout != "nhd":
            yield f"the KV pool has the layout {part.kv_cache_layout}; served: nhd"
    if translator.is_translating:
        yield "the KV pool is unified: its slots are virtual"


def latents_of(pool: Any) -> LatentSizes:
    """The sizes of the latents of a pool for MLA."""
    return LatentSizes(pool.kv_lora_rank, pool.qk_rope_head_dim)


def window_slots_of(pool: Any) -> Tensor | None:
    """For each slot of full layers, the slot of layers with windows; None if all layers share one pool."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    if type(pool) is not SWAKVPool or not pool.swa_layer_nums:
        return None
    slots: Tensor = pool.full_to_swa_index_mapping
    return slots


def in_window_pool(pool: Any, layer_id: int) -> bool:
    """Whether a layer of a pool with `window_slots_of` has its keys in the part for windows."""
    inside: bool = pool.layers_mapping[layer_id][1]
    return inside


def cache_of(pool: Any, layer: Any, page_size: int) -> KVCache:
    """The cache of a layer, as views [num_pages, page_size, num_kv_heads, size]; values of latents begin their keys.

    The pool waits for keys that are still on their way from the host, so ask it when the layer runs.
    """
    key, value = pool.get_kv_buffer(layer.layer_id)
    return KVCache(_paged(key, page_size), _paged(value, page_size))


def _paged(rows: Tensor, page_size: int) -> Tensor:
    """Rows [slots, heads, size] as whole pages, by the rows' own strides."""
    step = rows.stride(0)
    shape = (rows.shape[0] // page_size, page_size, *rows.shape[1:])
    return rows.as_strided(shape, (step * page_size, step, *rows.stride()[1:]))
