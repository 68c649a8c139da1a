"""TRITON_ATTN: the Triton kernels behind the runtime's contract."""

from __future__ import annotations

from torch import Tensor

from attnreg.kernels.triton.launchers import AttentionPlan, Batch, Layer
from attnreg.kernels.triton.launchers import write_kv as _write_kv
from attnreg.runtime.interface import (
    NO_PARAMS,
    AttentionSpec,
    BatchMetadata,
    Call,
    KVCache,
    KVCacheShape,
    LayerParams,
    paged_cache_shape,
)


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache: keys and values as the spec's layout has them."""
    return paged_cache_shape(spec, num_blocks)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> TritonPlan:
    """The launches for a batch, which all layers of this spec share, and where their keys are written."""
    starts = batch.query_start_loc_cpu
    layer = Layer(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        cache_dtype=spec.cache_dtype if batch.paged else spec.dtype,
        softmax_scale=spec.softmax_scale,
        block_size=(spec.block_size or 0) if batch.paged else 0,
        layout=spec.kv_layout,
        window=spec.sliding_window or 0,
        softcap=spec.softcap or 0.0,
        alibi="alibi" in spec.features,
        batch_invariant="batch_invariant" in spec.features,
    )
    lengths = Batch(
        query_lens=(starts[1:] - starts[:-1]).tolist(),
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        key_start_loc=batch.key_start_loc,
        ranges=batch.mm_prefix if "mm_prefix" in spec.features else None,
        causal=batch.causal,
    )
    return TritonPlan(layer, lengths, batch.slot_mapping, batch.num_tokens)


class TritonPlan(AttentionPlan):
    """An attention plan that also knows the slots of the batch's new keys, and the rows that are no padding."""

    def __init__(self, layer: Layer, batch: Batch, slot_mapping: Tensor | None, num_tokens: int) -> None:
        super().__init__(layer, batch)
        self.slot_mapping, self.num_tokens = slot_mapping, num_tokens


def write_kv(
    spec: AttentionSpec,
    plan: TritonPlan,
    key: Tensor,
    value: Tensor,
    kv_cache: KVCache,
    *,
    params: LayerParams = NO_PARAMS,
) -> None:
    """Stores the batch's new keys and values in the cache."""
    if plan.slot_mapping is not None:
        _write_kv(
            key,
            value,
            kv_cache.key,
            kv_cache.value,
            plan.slot_mapping,
            layout=spec.kv_layout,
            k_scale=params.k_scale,
            v_scale=params.v_scale,
        )


def forward(spec: AttentionSpec, plan: TritonPlan, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``, and into ``lse``."""
    query, kv_cache, output, key, value, lse, params = call
    if kv_cache is not None:
        key, value = kv_cache
    # one or the other is given: the layer has checked
    assert key is not None
    assert value is not None
    plan.run(
        query,
        key,
        value,
        output,
        lse=lse,
        sinks=params.sinks,
        alibi_slopes=params.alibi_slopes,
        k_scale=params.k_scale,
        v_scale=params.v_scale,
    )
