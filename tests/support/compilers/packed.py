"""Packed caches: launches of TURBOQUANT on tensors without memory, to be compiled."""

from __future__ import annotations

from typing import Any

# the fields of a `support.compilers.compiling.Case`: of every run of the suite, and of all others
PACKED: tuple[dict[str, Any], ...] = (
    *(
        {"name": f"{name} {packed}", "queries": queries, "requests": requests, "packed": packed,
         "features": ("lse", "sinks")}
        for name, queries, requests, packed in (
            ("decode", 1, 64, "turboquant_4bit_nc"),
            ("16 queries", 16, 8, "turboquant_k8v4"),
            ("prefill", 2048, 1, "turboquant_3bit_ub"),
            ("one token", 1, 1, "turboquant_4bit_ls"),
        )
    ),
    {"name": "decode turboquant_k3v4_nc head 256, window, softcap", "requests": 8, "head_size": 256, "heads": (16, 4),
     "window": 1024, "softcap": 30.0, "packed": "turboquant_k3v4_nc"},
)  # fmt: skip
NAMES = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc", "4bit_ub", "3bit_ub", "4bit_ls", "3bit_ls")
PACKED_FULL: tuple[dict[str, Any], ...] = tuple(
    {"name": f"{name} {packed} head {size}", "queries": queries, "heads": (16, 4), "head_size": size, "packed": packed,
     "requests": 1 if queries > 16 else 8, "features": ("lse",)}
    for packed in (f"turboquant_{name}" for name in NAMES)
    for size in (64, 80, 128, 192, 256)
    for name, queries in (("decode", 1), ("16 queries", 16), ("prefill", 300))
)  # fmt: skip


def run_packed(case: Any, tensor: Any) -> None:
    """Writes new keys and values of a case of `compiling`, and attends; tensor makes one without memory."""
    import torch

    from attnreg.kernels.turboquant import attention as turboquant_attn
    from attnreg.language.packed import packed_formats
    from attnreg.loader import default_registry
    from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCache, LayerParams

    dtype, (heads, kv_heads) = getattr(torch, case.dtype), case.heads
    size_v, tokens = case.head_size_v or case.head_size, case.queries * case.requests
    features = {*case.features} | ({"sliding_window"} if case.window else set())
    features |= {"softcap"} if case.softcap else set()
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_size=case.head_size, head_size_v=size_v, dtype=dtype,
        kv_dtype=case.packed, softmax_scale=0.1, block_size=case.block_size, sliding_window=case.window or None,
        softcap=case.softcap or None, features=frozenset(features),
        packed=packed_formats(default_registry().vocabulary.words["kv_dtypes"])[case.packed],
    )  # fmt: skip
    starts = torch.arange(case.requests + 1, dtype=torch.int32) * case.queries
    batch = BatchMetadata(
        query_start_loc=tensor(case.requests + 1), seq_lens=tensor(case.requests), max_query_len=case.queries,
        max_seq_len=case.keys, query_start_loc_cpu=starts,
        seq_lens_cpu=torch.full((case.requests,), case.keys, dtype=torch.int32),
        block_table=tensor(case.requests, case.keys // case.block_size), causal=case.causal,
        slot_mapping=tensor(tokens, dtype=torch.int64),
    )  # fmt: skip
    shape = turboquant_attn.kv_cache_shape(spec, 64)
    cache = KVCache(tensor(*shape.key, dtype=shape.dtype), tensor(*shape.value, dtype=shape.dtype))
    plan = turboquant_attn.plan(spec, batch)
    key, value = (tensor(tokens, kv_heads, n, dtype=dtype) for n in (case.head_size, size_v))
    turboquant_attn.write_kv(spec, plan, key, value, cache)
    params = LayerParams(sinks=tensor(heads, dtype=torch.float32) if "sinks" in features else None)
    query, output = (tensor(tokens, heads, n, dtype=dtype) for n in (case.head_size, size_v))
    lse = tensor(heads, tokens, dtype=torch.float32) if "lse" in features else None
    turboquant_attn.forward(spec, plan, Call(query, cache, output, lse=lse, params=params))
