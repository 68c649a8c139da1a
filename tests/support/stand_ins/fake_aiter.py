"""A stand-in for AMD's aiter. Its functions have the parameters of the record, and compute.

Each function asserts the preconditions of the real one, repeats the faults that adapters work around, and computes the
rest with the float64 reference. The preconditions were read in aiter's sources, at the commits of the record.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnreg.kernels import reference
from attnreg.kernels.aiter import record
from attnreg.kernels.upstream import Function
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, KVCache, LayerParams

FP8 = torch.float8_e4m3fn
HALVES = (torch.float16, torch.bfloat16)


def signature_of(recorded: Function) -> inspect.Signature:
    """The signature of a function. Arguments that adapters pass have no default, so that a missing one fails."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = [inspect.Parameter(name, kind) for name in recorded.passes]
    return inspect.Signature(
        [*required, *(inspect.Parameter(n, kind, default=d) for n, d in recorded.defaults.items())]
    )


class Fake:
    """The fake package: its ``modules`` by name, and its ``calls`` as (function, arguments passed)."""

    def __init__(self, fp8: torch.dtype = FP8) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.modules: dict[str, ModuleType] = {}
        for recorded in record.FUNCTIONS:
            self.set(recorded.modules[0], recorded.name, self.function(recorded))
        self.set(record.FP8.modules[0], "fp8", fp8)

    def set(self, module: str, name: str, value: Any) -> None:
        """Set an attribute of a module. The module and its parents are made if they are missing."""
        parts = module.split(".")
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            if path not in self.modules:
                made = self.modules[path] = ModuleType(path)
                made.__path__ = []
                if i > 1:
                    setattr(self.modules[".".join(parts[: i - 1])], parts[i - 1], made)
        setattr(self.modules[module], name, value)

    def function(self, recorded: Function, signature: inspect.Signature | None = None) -> Callable[..., Any]:
        """A function of the record, with its own signature or the given one."""
        accepted = signature or signature_of(recorded)

        def call(*args: Any, **kwargs: Any) -> Any:
            assert not args, "adapters pass by keyword"
            bound = accepted.bind(**kwargs)
            self.calls.append((recorded.name, dict(bound.arguments)))
            bound.apply_defaults()
            return globals()[f"_{recorded.name}"](**bound.arguments)

        call.__signature__ = accepted  # type: ignore[attr-defined]
        return call

    def install(self, monkeypatch: Any) -> None:
        for name in [m for m in sys.modules if m == "aiter" or m.startswith("aiter.")]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, name, module)


def write(code: Any, tensors: Any, alike: object = None) -> None:
    """The cache write of attnreg's Triton kernel in torch: Triton needs a GPU, and its interpreter has no bfloat16."""
    key, value, key_cache, value_cache, slots, k_scale, v_scale = tensors
    num_tokens = min(len(key), len(slots))
    layout, slot_mapping = code.kv_layout, slots[:num_tokens]
    key, value = key[:num_tokens], value[:num_tokens]
    for x, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        tokens = cache if layout == "NHD" else cache.transpose(1, 2)
        stored = x
        if cache.dtype.itemsize == 1:
            largest = torch.finfo(cache.dtype).max
            stored = x.float() / (1.0 if scale is None else scale[:, None])
            stored = stored.clamp(-largest, largest)
        rows = (slot_mapping >= 0).nonzero().flatten()
        slots = slot_mapping[rows]
        bits = torch.uint8 if cache.dtype.itemsize == 1 else cache.dtype
        tokens.view(bits)[slots // tokens.shape[1], slots % tokens.shape[1]] = stored[rows].to(cache.dtype).view(bits)


def _computed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> reference.Reference:
    """Attention over packed keys, exactly."""
    given = {"sinks": sinks, "alibi": slopes, "sliding_window": window, "softcap": softcap}
    spec = AttentionSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_size=query.shape[2],
        head_size_v=value.shape[2],
        dtype=torch.float32,
        softmax_scale=scale,
        sliding_window=window,
        softcap=softcap,
        features=frozenset(name for name, x in given.items() if x is not None),
    )
    for starts in (query_starts, key_starts):
        assert starts.dtype == torch.int32
        assert starts[0] == 0
    batch = BatchMetadata.build(query_starts.diff().tolist(), key_starts.diff().tolist(), causal=causal)
    params = LayerParams(sinks=sinks, alibi_slopes=slopes)
    return reference.attention(spec, batch, query, key=key, value=value, params=params)


def _window(window_size: tuple[int, ...], causal: bool) -> int | None:
    left, right = window_size[:2]
    if (left, right) == (-1, -1):
        return None
    assert right == (0 if causal else left)
    return left + 1


def _flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    min_seqlen_q: int, softmax_scale: float, logits_soft_cap: float, causal: bool, window_size: tuple[int, ...],
    alibi_slopes: Tensor | None, out: Tensor, **_: Any,
) -> Tensor:  # fmt: skip
    assert q.dtype in HALVES
    assert q.dtype == k.dtype == v.dtype == out.dtype
    assert out.is_contiguous()
    assert q.shape[2] % 8 == 0
    assert q.shape[2] <= 256
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    assert max_seqlen_k >= cu_seqlens_k.diff().max()
    assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
    # the real test for a window is `left > 0 or right > 0`
    window_size = (-1, -1) if max(window_size[:2]) <= 0 else window_size
    found = _computed(
        q, k, v, cu_seqlens_q, cu_seqlens_k,
        scale=softmax_scale, causal=causal, window=_window(window_size, causal), softcap=logits_soft_cap or None,
        slopes=alibi_slopes,
    )  # fmt: skip
    for start, stop in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        if not min_seqlen_q or stop - start > min_seqlen_q:
            out[start:stop] = found.output[start:stop]
    # some paths of the real function return a new tensor
    return out.clone() if alibi_slopes is None else out


def _mha_batch_prefill_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, kv_indptr: Tensor, kv_page_indices: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, logits_soft_cap: float, causal: bool,
    window_size: tuple[int, ...], alibi_slopes: Tensor | None, out: Tensor, sink_ptr: Tensor | None, **_: Any,
) -> Tensor:  # fmt: skip
    assert q.dtype in HALVES
    assert q.dtype == k.dtype == v.dtype == out.dtype
    # pages of one token
    assert k.ndim == v.ndim == 3
    assert k.shape[2] == q.shape[2]
    assert (q.shape[2] * q.element_size()) % 16 == 0
    _check_spare(kv_page_indices)
    assert sink_ptr is None or sink_ptr.dtype == torch.float32
    pages = kv_page_indices[: int(kv_indptr[-1])]
    found = _computed(
        q, k[pages], v[pages], cu_seqlens_q, kv_indptr,
        scale=softmax_scale, causal=causal, window=_window(window_size, causal), softcap=logits_soft_cap or None,
        sinks=sink_ptr, slopes=alibi_slopes,
    )  # fmt: skip
    out.copy_(found.output)
    return out


def _unified_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, seqused_k: Tensor,
    max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], block_table: Tensor,
    softcap: float, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None,
    alibi_slopes: Tensor | None, sinks: Tensor | None, **_: Any,
) -> Tensor:  # fmt: skip
    assert causal, "Only causal attention is supported"
    assert q_descale is None
    assert k.dtype == v.dtype
    assert k.dtype in (*HALVES, FP8)
    assert k.shape[1] == v.shape[1]
    # its ALiBi is slope * (key - first query): off by a number per row, which a sink does not share
    assert alibi_slopes is None or sinks is None or max_seqlen_q == 1
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    assert max_seqlen_k >= seqused_k.max()
    queries = cu_seqlens_q.diff().tolist()
    spec = AttentionSpec(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[2],
        head_size=q.shape[2],
        head_size_v=v.shape[3],
        dtype=torch.float32,
        softmax_scale=softmax_scale,
        block_size=k.shape[1],
        sliding_window=1 + window_size[0] or None,
        softcap=softcap or None,
        features=frozenset(name for name, x in (("sliding_window", 1 + window_size[0]), ("softcap", softcap)) if x),
    )
    assert window_size[1] == (0 if window_size[0] >= 0 else -1)
    batch = BatchMetadata.build(queries, seqused_k.tolist(), block_table=block_table)
    # a scale without the other one is ignored; the kernel reads only the first number
    scaled = k_descale is not None and v_descale is not None
    scales = [x[0, :1].expand(k.shape[2]) if scaled and x is not None else None for x in (k_descale, v_descale)]
    params = LayerParams(sinks=sinks, alibi_slopes=alibi_slopes, k_scale=scales[0], v_scale=scales[1])
    found = reference.attention(spec, batch, q, KVCache(k, v), params=params)
    out.copy_(found.output)
    # the real result for a request without keys is not known
    out[(seqused_k == 0).repeat_interleave(cu_seqlens_q.diff())] = torch.nan
    return out


def _paged_attention_v1(
    out: Tensor, workspace_buffer: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float,
    block_tables: Tensor, cu_query_lens: Tensor | None, context_lens: Tensor, max_context_len: int,
    alibi_slopes: Tensor | None, kv_cache_dtype: str, kv_cache_layout: str, logits_soft_cap: float, k_scale: Tensor,
    v_scale: Tensor, partition_size: int, **_: Any,
) -> Tensor:  # fmt: skip
    requests, heads, size = query.shape
    partitions = -(-max_context_len // partition_size)
    assert workspace_buffer.numel() >= requests * heads * partitions * (size * query.element_size() + 8)
    # the kernel gets pointers and the stride of the query's rows, no other strides
    assert query.is_contiguous()
    assert out.is_contiguous()
    assert block_tables.is_contiguous()
    assert query.dtype in HALVES
    assert key_cache.dtype == value_cache.dtype == (query.dtype if kv_cache_dtype == "auto" else FP8)
    assert kv_cache_dtype in ("auto", "fp8", "fp8_e4m3")
    assert size >= 64
    assert k_scale.numel() == v_scale.numel() == 1
    assert k_scale.dtype == v_scale.dtype == torch.float32
    assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
    assert cu_query_lens is None
    assert max_context_len >= context_lens.max()
    axis = 2 if kv_cache_layout == "NHD" else 1
    assert heads // key_cache.shape[axis] <= 16
    keys, values = (x if axis == 2 else x.transpose(1, 2) for x in (key_cache, value_cache))
    starts = torch.arange(requests + 1, dtype=torch.int32)
    k_descale, v_descale = (torch.ones(requests, keys.shape[2]) * x for x in (k_scale, v_scale))
    _unified_attention(
        query, keys, values, out, starts, 1, context_lens, max_context_len, scale, True, (-1, -1), block_tables,
        logits_soft_cap, None, k_descale, v_descale, alibi_slopes, None,
    )  # fmt: skip
    return out


def _mla(
    q: Tensor, kv_buffer: Tensor, o: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor,
    kv_last_page_lens: Tensor, max_seqlen_q: int, sm_scale: float, scale: float = 1.0, kv_scale: float = 1.0,
) -> reference.Reference:  # fmt: skip
    assert kv_buffer.ndim == 4
    assert kv_buffer.shape[1:3] == (1, 1)
    assert kv_buffer.is_contiguous()
    assert q.is_contiguous()
    assert o.is_contiguous()
    assert kv_indices.dtype == torch.int32
    _check_spare(kv_indices)
    assert kv_last_page_lens.tolist() == [1] * (len(qo_indptr) - 1)
    assert max_seqlen_q == qo_indptr.diff().max()
    assert qo_indptr[-1] == q.shape[0] == o.shape[0]
    # the real behaviour for a request without queries is not known
    assert (qo_indptr.diff() > 0).all()
    assert kv_indptr[-1] <= kv_indices.shape[0]
    key = kv_buffer.float()[kv_indices.long(), 0] * kv_scale
    value = key[..., : o.shape[2]]
    found = _computed(q.float() * scale, key, value, qo_indptr, kv_indptr, scale=sm_scale, causal=True)
    o.copy_(found.output)
    return found


def _mla_decode_fwd(
    q: Tensor, kv_buffer: Tensor, o: Tensor, qo_indptr: Tensor, max_seqlen_q: int, q_scale: Tensor | None,
    kv_scale: Tensor | None, return_lse: bool, causal: bool, logit_cap: float, page_size: int, nhead_kv: int,
    kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_lens: Tensor, sm_scale: float, **_: Any,
) -> tuple[None, Tensor | None]:  # fmt: skip
    assert (causal, logit_cap, page_size, nhead_kv) == (True, 0.0, 1, 1)
    # a request's stride is max_seqlen_q rows
    assert (qo_indptr.diff() == max_seqlen_q).all()
    assert max_seqlen_q <= 4
    kinds = (q.dtype, kv_buffer.dtype)
    assert kinds in ((torch.bfloat16, torch.bfloat16), (FP8, FP8))
    assert q.shape[1] in ((16, 128) if q.dtype == FP8 else (16, 32, 64, 128))
    assert (q.dtype == FP8) == (q_scale is not None) == (kv_scale is not None)
    scales = [1.0 if x is None else x.item() for x in (q_scale, kv_scale)]
    found = _mla(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, sm_scale, *scales)
    return None, found.lse.T.float().contiguous() if return_lse else None


def _mla_prefill_fwd(
    q: Tensor, kv_buffer: Tensor, o: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor,
    kv_last_page_lens: Tensor, max_seqlen_q: int, sm_scale: float, logit_cap: float, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    assert q.dtype == kv_buffer.dtype == torch.bfloat16
    assert q.shape[1] in (16, 128)
    assert logit_cap == 0.0
    _mla(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, sm_scale)
    return o, None


def _check_spare(indices: Tensor) -> None:
    """Assert that the storage goes 128 indices past the last one, because kernels read them in vectors."""
    held = indices.untyped_storage().nbytes() // indices.element_size() - indices.storage_offset()
    assert held >= indices.shape[0] + 128
