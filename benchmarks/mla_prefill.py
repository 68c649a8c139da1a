"""Expanded prompts and sparse decoding of MLA for benchmarks/mla.py, beside cuDNN's attention through PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mla_case import Case, Trial
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnreg.kernels import triton_attn
from attnreg.kernels.mla import triton_sparse
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call
from attnreg.runtime.mla.interface import as_kv_cache, latent_cache_shape

HEADS, TOPK = 128, 2048


def cases() -> Iterator[Case]:
    for causal, mark in ((True, 5200.0), (False, 10400.0)):
        name = f"prefill 4k b4 h{HEADS} d192/128{' causal' if causal else ''}"
        yield Case(name=name, mark=mark, prepare=partial(_prompts, 4, 4096, causal))
    # no peer runs here; the marks are twice the time of the products at 787 TFLOP/s, or of the bytes and two launches
    for tokens, heads, mark in ((64, 128, 93.0), (1, 128, 20.0), (128, 16, 150.0)):
        name = f"sparse decode b{tokens} h{heads}, {TOPK} of 32k"
        yield Case(name=name, mark=mark, prepare=partial(_sparse, tokens, heads, 32768))


def _prompts(requests: int, tokens: int, causal: bool) -> Trial:
    torch.manual_seed(0)
    rows = requests * tokens
    query, key = (torch.randn(rows, HEADS, 192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    value = torch.randn(rows, HEADS, 128, device="cuda", dtype=torch.bfloat16)
    output = torch.full((rows, HEADS, 128), math.nan, device="cuda", dtype=torch.bfloat16)
    lse = torch.full((HEADS, rows), math.nan, device="cuda")
    spec = AttentionSpec(
        num_heads=HEADS, num_kv_heads=HEADS, head_size=192, head_size_v=128, dtype=torch.bfloat16,
        softmax_scale=192**-0.5, features=frozenset({"lse"}),
    )  # fmt: skip
    batch = BatchMetadata.build([tokens] * requests, device="cuda", causal=causal)
    plan, call = triton_attn.plan(spec, batch), Call(query, None, output, key, value, lse)

    def error() -> float:
        """On some rows of a request and a head."""
        chosen = torch.randint(tokens, (64,), device="cuda")
        own = slice((requests - 1) * tokens, None)
        scores = query[own, 5][chosen].double() @ key[own, 5].double().T * spec.softmax_scale
        if causal:
            scores.masked_fill_(torch.arange(tokens, device="cuda") > chosen[:, None], -math.inf)
        exact = scores.softmax(-1) @ value[own, 5].double()
        return float((output[own, 5][chosen].double() - exact).norm() / exact.norm())

    def peers() -> Iterator[tuple[str, Callable[[], Any]]]:
        q, k, v = (x.view(requests, tokens, HEADS, -1).transpose(1, 2) for x in (query, key, value))

        def cudnn() -> None:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                scaled_dot_product_attention(q, k, v, is_causal=causal)

        yield "cuDNN", cudnn

    return Trial(
        call=partial(triton_attn.forward, spec, plan, call),
        error=error,
        peers=peers,
        moved=query.nbytes + key.nbytes + value.nbytes + output.nbytes,
        operations=2.0 * rows * tokens * HEADS * 320 / (2 if causal else 1),
    )


def _sparse(tokens: int, heads: int, context: int) -> Trial:
    torch.manual_seed(0)
    latent = AttentionSpec(
        num_heads=heads, num_kv_heads=1, head_size=576, head_size_v=512, dtype=torch.bfloat16,
        softmax_scale=192**-0.5, block_size=64, features=frozenset({"lse"}), latent=True,
    )  # fmt: skip
    spec = replace(latent, sparse=True)
    blocks = context // 64
    cache = torch.randn(latent_cache_shape(spec, tokens * blocks)[0], device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(tokens * blocks, device="cuda").int().view(tokens, blocks)
    batch = BatchMetadata.build([1] * tokens, [context] * tokens, device="cuda", block_table=table)
    indices = torch.stack([torch.randperm(context, device="cuda")[:TOPK] for _ in range(tokens)]).int()
    query = torch.randn(tokens, heads, 576, device="cuda", dtype=torch.bfloat16)
    output = torch.full((tokens, heads, 512), math.nan, device="cuda", dtype=torch.bfloat16)
    lse = torch.full((heads, tokens), math.nan, device="cuda")
    plan = triton_sparse.plan(spec, batch)
    call = Call(query, as_kv_cache(spec, cache), output, lse=lse, indices=indices)

    def error() -> float:
        places = indices[-1].long()
        keys = cache[table[-1][places // 64].long(), places % 64].double()
        exact = (query[-1].double() @ keys.T * spec.softmax_scale).softmax(-1) @ keys[:, :512]
        return float((output[-1].double() - exact).norm() / exact.norm())

    return Trial(
        call=partial(triton_sparse.forward, spec, plan, call),
        error=error,
        peers=lambda: iter(()),
        moved=tokens * TOPK * 1152 + query.nbytes + output.nbytes,
        operations=2.0 * tokens * TOPK * heads * (576 + 512),
    )
