"""Causal attention over the paged cache through aiter's unified Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnreg.kernels.aiter import common, record
from attnreg.runtime.interface import AttentionSpec, KVCache, LayerParams, by_token

_unified = record.UNIFIED_ATTENTION.load()


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """The requests of a call; a request's last query is at the position of its last key."""

    query_starts: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_query_len: int
    max_seq_len: int


def attend(
    spec: AttentionSpec,
    paged: Paged,
    query: Tensor,
    kv_cache: KVCache,
    output: Tensor,
    params: LayerParams,
    *,
    packed: bool = False,
) -> None:
    """Writes the causal attention of packed queries to the cache into ``output``.

    packed: the cache is a copy of packed keys and values, NHD and in the layer's dtype, whatever the spec says.

    Source of the arguments' meanings: aiter/ops/triton/attention/unified_attention.py and its kernels.
    """
    key, value = kv_cache if packed else by_token(kv_cache, spec.kv_layout)
    left, _ = spec.sides(causal=True)
    shape = (paged.seq_lens.shape[0], spec.num_kv_heads)
    # the kernel ignores one scale that comes without the other
    scales = [common.one_scale(s, query).expand(shape) for s in (params.k_scale, params.v_scale)]
    k_descale, v_descale = scales if spec.quantised and not packed else (None, None)
    common.into(
        output,
        lambda out: _unified(
            q=query,
            k=key,
            v=value,
            out=out,
            cu_seqlens_q=paged.query_starts,
            max_seqlen_q=paged.max_query_len,
            seqused_k=paged.seq_lens,
            max_seqlen_k=paged.max_seq_len,
            softmax_scale=spec.softmax_scale,
            causal=True,
            # how many keys before the query's own; (-1, -1) is no window
            window_size=(left, min(left, 0)),
            block_table=paged.block_table,
            softcap=spec.softcap or 0.0,
            q_descale=None,
            k_descale=k_descale,
            v_descale=v_descale,
            alibi_slopes=common.float32(params.alibi_slopes),
            sinks=None if params.sinks is None else params.sinks.contiguous(),
        ),
    )
