"""Stand-ins for the operators of FlashAttention and PyTorch over sequences, on a processor, with the real schemas.

They compute in float64, sequence by sequence, what the libraries document.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# as the library of the vllm 0.33.0 wheel registers it
FA3_VLLM = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
# as hopper/flash_api.cpp of Dao-AILab/flash-attention registers it
FA3_OWN = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new = None, Tensor? v_new = None, Tensor? q_v = None, "
    "Tensor!? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None, "
    "Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, Tensor? k_descale = None, "
    "Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, "
    "Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) -> Tensor[]"
)


def attend(
    q: Tensor,
    keys: list[tuple[Tensor, Tensor]],
    starts: list[int],
    *,
    scale: float,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    to_last: bool = True,
) -> tuple[Tensor, Tensor]:
    """Output [rows, heads, size] and LSE [heads, rows] of sequences; to_last: queries align to the last keys."""
    heads = q.shape[1]
    out = torch.full((q.shape[0], heads, keys[0][1].shape[-1]), math.nan, dtype=torch.float64)
    lse = torch.full((heads, q.shape[0]), math.nan, dtype=torch.float64)
    for i, (k, v) in enumerate(keys):
        rows = slice(starts[i], starts[i + 1])
        n, m = rows.stop - rows.start, k.shape[0]
        # one KV head, as MLA has, takes no memory for each query head
        k, v = (
            x.double().expand(-1, heads, -1)
            if x.shape[1] == 1
            else x.double().repeat_interleave(heads // x.shape[1], 1)
            for x in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        at = torch.arange(n)[:, None] + (m - n if to_last else 0)
        distance = at - torch.arange(m)
        if slopes is not None:
            scores -= slopes.double()[:, None, None] * distance.abs()
        left, right = window[0], 0 if causal else window[1]
        hidden = torch.zeros(n, m, dtype=torch.bool)
        hidden |= (distance > left) if left >= 0 else False
        hidden |= (-distance > right) if right >= 0 else False
        scores = scores.masked_fill(hidden, -math.inf)
        more = [] if sinks is None else [sinks.double()[:, None, None].expand(heads, n, 1)]
        # of a row without a key no kernel has the sink
        total = torch.cat([scores, *more], -1).logsumexp(-1) if m else torch.full((heads, n), -math.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", (scores - total[..., None]).exp().nan_to_num(0), v)
        lse[:, rows] = total
    return out, lse


def _packed(k: Tensor, v: Tensor, starts: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(k[a:b], v[a:b]) for a, b in pairwise(starts.tolist())]


def paged(k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
    size, found = k.shape[1], []
    for row, n in zip(table, lengths.tolist(), strict=True):
        blocks = row[: -(-n // size)].long()
        found.append((k[blocks].flatten(0, 1)[:n], v[blocks].flatten(0, 1)[:n]))
    return found


def fa3_tile(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> tuple[int, str]:
    """The keys of a tile of FlashAttention 3 on SM 9.0, in 16 bits, and the mask that its kernel is compiled for.

    Source: hopper/flash_api.cpp#mha_fwd, tile_size.h#tile_size_fwd_sm90, flash_fwd_launch_template.h#get_pagedkv_tma.
    """
    size, size_v, table = query.shape[-1], value.shape[-1], given["page_table"]
    queries, rows = given["max_seqlen_q"], given["max_seqlen_q"] * (query.shape[-2] // key.shape[-2])
    left, right, causal = given["window_size_left"], given["window_size_right"], given["is_causal"]
    left = -1 if left >= given["max_seqlen_k"] - 1 else left
    right = -1 if right >= queries - 1 else right
    if queries == 1 and left == right == -1 and not (64 < size <= 128 and table is not None):
        causal = False
    right = 0 if causal else right
    causal, local = left < 0 and right == 0, left >= 0 or right > 0
    mask = "causal" if causal else "local" if local else "full"
    few = size in (64, 128) and not local and rows <= 64

    def tile(copied: bool) -> tuple[int, int]:
        """Its rows and keys; copied: pages by the kernel's own loads."""
        if size <= 64:
            return (64, 192) if few else (192, 128 if causal else 160 if local or copied else 192)
        if size <= 96:
            return 192, 128 if local or copied else 144
        if size <= 128:
            return 64 if few else 128, 128 if causal or local or copied else 176
        if size <= 192:
            return 128, 96 if local or copied else 128 if size_v <= 128 else 112
        return 128, 64 if local else 80

    most, keys = tile(False)
    whole = table is not None and not local and key.shape[1] % keys == 0 and rows > most
    return tile(table is not None and not whole)[1], mask


def fa3(
    q: Tensor, k: Tensor, v: Tensor, k_new: Any = None, v_new: Any = None, q_v: Any = None, out: Any = None,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, cu_seqlens_k_new: Any = None, seqused_q: Any = None,
    seqused_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None, page_table: Any = None,
    kv_batch_idx: Any = None, leftpad_k: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    seqlens_rotary: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    softmax_scale: Any = None, is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, is_rotary_interleaved: bool = False, scheduler_metadata: Any = None, num_splits: int = 0,
    pack_gqa: Any = None, sm_margin: int = 0, s_aux: Any = None, cp_world_size: int = 1, cp_rank: int = 0,
    cp_tot_seqused_k: Any = None,
) -> list[Tensor]:  # fmt: skip
    """FlashAttention 3 as vLLM builds it; of packed keys each sequence may use fewer than it has."""
    assert (cu_seqlens_k is None) != (page_table is None)
    assert page_table is None or seqused_k is not None
    assert cp_world_size == 1
    assert s_aux is None or s_aux.dtype == torch.bfloat16
    if q_v is not None:
        # the latents are values, and keys beside the rotary part
        assert q.shape[-1] == k.shape[-1] == 64
        assert q_v.shape[-1] == v.shape[-1] in (256, 512)
        assert page_table is None or v.shape[-1] < 512 or k.shape[1] % 64, "a page of a whole tile is loaded whole"
        q, k = torch.cat([q_v, q], -1), torch.cat([v, k], -1)
    if q_descale is not None:
        assert q_descale.shape == k_descale.shape == (cu_seqlens_q.shape[0] - 1, k.shape[-2])
        group = q.shape[1] // k.shape[-2]
        q, k, v = q.float() * q_descale[0].repeat_interleave(group)[:, None], k.float(), v.float()
        k, v = k * k_descale[0][:, None], v * v_descale[0][:, None]
    if page_table is not None:
        keys = paged(k, v, page_table, seqused_k)
    else:
        used = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        keys = [(x[:n], y[:n]) for (x, y), n in zip(_packed(k, v, cu_seqlens_k), used.tolist(), strict=True)]
    found, lse = attend(
        q, keys, cu_seqlens_q.tolist(), scale=softmax_scale, causal=is_causal, softcap=softcap, sinks=s_aux,
        window=(window_size_left, window_size_right),
    )  # fmt: skip
    rows = cu_seqlens_q[-1]
    out[:rows] = found[:rows].to(out.dtype)
    return [out, lse.float(), torch.empty(0), torch.empty(0)]


def fa3_own(*arguments: Any) -> list[Tensor]:
    """FlashAttention 3 of its own package: with attention_chunk, and without what vLLM added."""
    # PyTorch leaves out the last ones where they are the defaults
    chunk = slice(27, 28)
    assert arguments[chunk] in ((), (0,))
    return fa3(*arguments[: chunk.start], *arguments[chunk.stop :])


def flash(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: Any = None, window_size_left: Any = None,
    window_size_right: Any = None, **defaults: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """aten::_flash_attention_forward: of a row without a key the LSE is +inf."""
    assert dropout_p == 0.0
    out, lse = attend(
        query, _packed(key, value, cum_seq_k), cum_seq_q.tolist(), scale=scale, causal=is_causal,
        window=(window_size_left, window_size_right),
    )  # fmt: skip
    empty = torch.empty(0)
    return out.to(query.dtype), lse.masked_fill(lse == -torch.inf, torch.inf).float(), empty, empty, empty


def cudnn(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """aten::_scaled_dot_product_cudnn_attention: its causal mask aligns queries to the first keys."""
    requests, heads, queries, _ = query.shape
    assert key.shape[2]
    keys = [(k.transpose(0, 1), v.transpose(0, 1)) for k, v in zip(key, value, strict=True)]
    starts, rows = [i * queries for i in range(requests + 1)], query.transpose(1, 2).flatten(0, 1)
    out, _ = attend(rows, keys, starts, scale=scale, causal=is_causal, to_last=False)
    out, empty = out.to(query.dtype).view(requests, queries, heads, -1).transpose(1, 2), torch.empty(0)
    return out, empty, empty, empty, queries, key.shape[2], empty, empty, empty


def efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any,
    max_seqlen_k: Any, dropout_p: float, custom_mask_type: int, compute_log_sumexp: bool = False, *, scale: Any = None,
    seqlen_k: Any = None, window_size: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """aten::_efficient_attention_forward: mask 2 aligns queries to the last keys; every head has keys of its own."""
    assert query.shape[2] == key.shape[2]
    assert custom_mask_type in (0, 2)
    keys = _packed(key[0], value[0], cu_seqlens_k)
    out, _ = attend(query[0], keys, cu_seqlens_q.tolist(), scale=scale, causal=custom_mask_type == 2)
    empty = torch.empty(0)
    return out.to(query.dtype)[None], empty, empty, empty, max_seqlen_q, max_seqlen_k


@contextmanager
def registered(namespace: str, schema: str | None, name: str, function: Any, key: str = "CPU") -> Iterator[None]:
    """Registers a function as an operator's kernel on processors, and with a schema the operator itself."""
    library = torch.library.Library(namespace, "FRAGMENT" if schema else "IMPL")
    if schema:
        library.define(schema)
    library.impl(name, function, key)
    try:
        yield
    finally:
        library._destroy()


# as the library of the vllm 0.33.0 wheel registers it
FLASH_MLA = (
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, "
    "float softmax_scale, bool is_causal, Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, "
    "Tensor(c!)? out_) -> (Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)"
)


def flash_mla(
    q: Tensor, kcache: Tensor, head_size_v: int, seqlens_k: Tensor, block_table: Tensor, softmax_scale: float,
    is_causal: bool, tile_scheduler_metadata: Any, num_splits: Any, out_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """FlashMLA's dense decode: queries [requests, queries, heads, 576]; what a row without a key gets is undefined."""
    requests, queries, heads, _ = q.shape
    assert kcache.shape[1:] == (64, 1, 576)
    assert seqlens_k.dtype == block_table.dtype == torch.int32
    keys = paged(kcache, kcache[..., :head_size_v], block_table, seqlens_k)
    starts = [i * queries for i in range(requests + 1)]
    out, lse = attend(q.flatten(0, 1), keys, starts, scale=softmax_scale, causal=is_causal)
    out_.copy_(out.view(requests, queries, heads, -1))
    lse = lse.view(heads, requests, queries).transpose(0, 1).float()
    schedule = torch.zeros(1, dtype=torch.int32) if num_splits is None else num_splits
    return out_, lse.masked_fill(lse == -math.inf, math.inf), schedule, schedule.clone()


# as the library of the vllm 0.33.0 wheel registers it
FLASH_MLA_SPARSE = (
    "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink, "
    "Tensor? topk_length, Tensor(a!)? out_) -> Tensor[]"
)


def flash_mla_sparse(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int, attn_sink: Any, topk_length: Any, out_: Any
) -> list[Tensor]:
    """FlashMLA over chosen tokens: places below 0 or past the last are none; of a row without any, what it gets is not
    defined.
    """
    rows, heads, width = q.shape
    assert heads in (64, 128)
    assert q.is_contiguous()
    assert kv.shape[1:] == (1, width) == (1, 576)
    assert indices.shape[:2] == (rows, 1)
    assert indices.dtype == torch.int32
    assert indices.shape[2]
    assert indices.shape[2] % 128 == 0
    assert d_v == 512
    assert topk_length is None
    there = (indices[:, 0] >= 0) & (indices[:, 0] < len(kv))
    keys = [
        (kv[row[some].long()], kv[row[some].long(), :, :d_v]) for row, some in zip(indices[:, 0], there, strict=True)
    ]
    out, lse = attend(q, keys, list(range(rows + 1)), scale=sm_scale, causal=False)
    empty = ~there.any(-1)
    logarithms = lse.mT.float()
    largest = logarithms - 1
    return [
        out.masked_fill(empty[:, None, None], 7.0).to(q.dtype),
        largest,
        logarithms.masked_fill(empty[:, None], math.inf),
    ]


# as the library of the vllm 0.33.0 wheel registers it
FA2_VLLM = (
    "varlen_fwd(Tensor! q, Tensor k, Tensor v, Tensor!? out, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor? seqused_k, Tensor? leftpad_k, Tensor? block_table, Tensor? alibi_slopes, int max_seqlen_q, "
    "int max_seqlen_k, float p_dropout, float softmax_scale, bool zero_tensors, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool return_softmax, int num_splits, Tensor? gen) -> Tensor[]"
)


def fa2(
    q: Tensor, k: Tensor, v: Tensor, out: Any, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Any,
    leftpad_k: Any, block_table: Any, alibi_slopes: Any, max_seqlen_q: int, max_seqlen_k: int, p_dropout: float,
    softmax_scale: float, zero_tensors: bool, is_causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, return_softmax: bool, num_splits: int, gen: Any,
) -> list[Tensor]:  # fmt: skip
    """FlashAttention 2 as vLLM builds it: of a row without a key the LSE is +inf."""
    assert (seqused_k is None) == (block_table is None)
    assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
    folded = max_seqlen_q == 1 and q.shape[1] > k.shape[-2] and max(window_size_left, window_size_right) < 0
    if folded and alibi_slopes is None:
        # it makes a tensor of the shape [requests, KV heads, group, size] of the queries
        assert len(q) == len(cu_seqlens_q) - 1
    keys = _packed(k, v, cu_seqlens_k) if block_table is None else paged(k, v, block_table, seqused_k)
    found, lse = attend(
        q, keys, cu_seqlens_q.tolist(), scale=softmax_scale, causal=is_causal, softcap=softcap, slopes=alibi_slopes,
        window=(window_size_left, window_size_right),
    )  # fmt: skip
    rows = cu_seqlens_q[-1]
    out[:rows] = found[:rows].to(out.dtype)
    return [out, lse.masked_fill(lse == -math.inf, math.inf).float()]


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:  # fmt: skip
    """The function of the package flash-attn 2.8."""
    assert block_table is None or k.shape[1] % 256 == 0
    lengths = None if block_table is None else cu_seqlens_k.diff()
    out = torch.full_like(q, math.nan)
    out, lse = fa2(
        q, k, v, out, cu_seqlens_q, cu_seqlens_k, lengths, None, block_table, alibi_slopes, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, False, causal, *window_size, softcap, False, 0, None,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def fa4(
    q: Tensor, k: Tensor, v: Tensor, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    seqused_q: Any = None, seqused_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    min_seqlen_k: Any = None, page_table: Any = None, softmax_scale: Any = None, causal: bool = False,
    softcap: Any = None, window_size_left: Any = None, window_size_right: Any = None, learnable_sink: Any = None,
    tile_mn: Any = None, mma_pv_is_rs: Any = None, intra_wg_overlap: Any = None, num_threads: int = 384,
    num_splits: int = 1, pack_gqa: Any = None, _arch: Any = None, score_mod: Any = None, mask_mod: Any = None,
    block_sparse_tensors: Any = None, return_lse: bool = False, out: Any = None, lse: Any = None,
    aux_tensors: Any = None, aux_scalars: Any = None, q_descale: Any = None, k_descale: Any = None,
    v_descale: Any = None, gather_kv_indices: Any = None, scheduler_metadata: Any = None,
    seqlen_k_per_split: Any = None, disable_scheduler_metadata: bool = False, gather_bwd_recompute_p: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """flash-attn-4 4.0.0b36 with what it asserts; of a row without a key the LSE is the sink or -inf."""
    assert q.dtype == k.dtype == v.dtype == out.dtype
    assert page_table is None or q.shape[-1] % 16 == 0, "Paged KV does not support irregular head dim"
    assert out.shape == (*q.shape[:2], v.shape[-1])
    for x in (q, k, v, out):
        assert x.stride(-1) == 1
        assert not any(x.data_ptr() % 16 for x in (q, k, v, out))
    for starts in (cu_seqlens_q, cu_seqlens_k, seqused_k):
        assert starts is None or starts.dtype == torch.int32
    if page_table is None:
        assert seqused_k is None
        keys = _packed(k, v, cu_seqlens_k)
    else:
        # a page of a whole tile is loaded whole
        assert cu_seqlens_k is None
        assert page_table.dtype == torch.int32
        assert page_table.shape[0] == len(cu_seqlens_q) - 1
        assert k.shape[1] not in (
            (80, 64) if q.shape[-1] > 192 and window_size_left is not None else (80, 96, 112, 128)
        )
        keys = paged(k, v, page_table, seqused_k)
    assert learnable_sink is None or learnable_sink.shape == (q.shape[1],)
    left, right = (-1 if side is None else side for side in (window_size_left, window_size_right))
    # a side below 0 is no window only where both are
    assert all(side is None or side >= 0 for side in (window_size_left, window_size_right))
    found, total = attend(
        q, keys, cu_seqlens_q.tolist(), scale=softmax_scale, causal=causal, softcap=softcap or 0.0,
        sinks=learnable_sink, window=(left, right),
    )  # fmt: skip
    if learnable_sink is not None:
        total = torch.maximum(total, learnable_sink.double()[:, None])
    rows = cu_seqlens_q[-1]
    out[:rows] = found[:rows].to(out.dtype)
    return out, total.float() if return_lse else None, None, None, None


# as the library of the vllm 0.33.0 wheel registers them
CUTLASS_MLA = (
    "sm100_cutlass_mla_decode(Tensor! out, Tensor! lse, Tensor q_nope, Tensor q_pe, Tensor kv_c_and_k_pe_cache, "
    "Tensor seq_lens, Tensor page_table, Tensor workspace, float scale, int num_kv_splits) -> ()"
)
CUTLASS_WORKSPACE = (
    "sm100_cutlass_mla_get_workspace_size(int max_seq_len, int num_batches, int sm_count, int num_kv_splits) -> int"
)


def cutlass_mla(
    out: Tensor, lse: Tensor, q_nope: Tensor, q_pe: Tensor, kv_c_and_k_pe_cache: Tensor, seq_lens: Tensor,
    page_table: Tensor, workspace: Tensor, scale: float, num_kv_splits: int,
) -> None:  # fmt: skip
    """One query of each request and 128 heads; what a row without a key gets is undefined."""
    requests, heads, _ = q_nope.shape
    cache = kv_c_and_k_pe_cache
    assert out.shape == (requests, 128, 512)
    assert heads == 128
    assert cache.shape[1:] == (128, 576)
    assert q_nope.dtype == q_pe.dtype == cache.dtype == out.dtype
    assert seq_lens.dtype == page_table.dtype == torch.int32
    assert len(seq_lens) == len(page_table) == requests
    assert workspace.dtype == torch.uint8
    pages = cache[:, :, None]
    keys = paged(pages, pages[..., :512], page_table, seq_lens)
    found, total = attend(
        torch.cat([q_nope, q_pe], -1), keys, list(range(requests + 1)), scale=scale, causal=False
    )  # fmt: skip
    out.copy_(found.nan_to_num(7.0))
    if lse.numel():
        lse.copy_(total.mT)
