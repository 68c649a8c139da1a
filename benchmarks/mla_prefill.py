"""Expanded prompts of MLA for benchmarks/mla.py, beside FlashAttention 3 and PyTorch's attention by cuDNN and flash."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from kernel_case import Case, Place, Trial, function_of
from measuring import Peer, Peers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnreg.kernels import triton_attn
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call
from attnreg.runtime.mla.interface import MLASpec, latent_cache_shape, projections
from attnreg.runtime.mla.prompts import ExpandedPrompts

HEADS = 128
NOPE, ROPE, WIDTH, RANK, BLOCK = 128, 64, 128, 512, 64


def cases(place: Place) -> Iterator[Case]:
    for causal, mark in ((True, 5200.0), (False, 10400.0)):
        yield _case(place, triton_attn, "", causal, mark)
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        # Gluon compiles for the GPU alone
        from attnreg.kernels.hopper import attention

        # 0.95 of cuDNN's time on an H200
        for causal, mark in ((True, 4430.0), (False, 8420.0)):
            yield _case(place, attention, "HOPPER_PREFILL ", causal, mark)
    # twice the time of the products at 787 TFLOP/s, those of kv_b_proj included: no peer expands and merges too
    name = f"prefill 2k on 32k b1 h{HEADS}, context in chunks"
    sizes, workspace = (place.few(2048, 20), place.few(32768, 100), place.few(HEADS, 4)), place.few(8192, 64)
    yield Case(name=name, mark=17500.0, prepare=partial(_on_context, place, *sizes, workspace))


def _case(place: Place, module: ModuleType, backend: str, causal: bool, mark: float) -> Case:
    name = f"{backend}prefill 4k b4 h{HEADS} d192/128{' causal' if causal else ''}"
    sizes = place.few(4, 2), place.few(4096, 40), place.few(HEADS, 4)
    return Case(name=name, mark=mark, prepare=partial(_prompts, place, module, *sizes, causal))


def _prompts(place: Place, module: ModuleType, requests: int, tokens: int, heads: int, causal: bool) -> Trial:
    torch.manual_seed(0)
    rows = requests * tokens
    query, key = (torch.randn(rows, heads, 192, device=place.device, dtype=place.dtype) for _ in range(2))
    value = torch.randn(rows, heads, 128, device=place.device, dtype=place.dtype)
    output = torch.full((rows, heads, 128), math.nan, device=place.device, dtype=place.dtype)
    lse = torch.full((heads, rows), math.nan, device=place.device)
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_size=192, head_size_v=128, dtype=place.dtype,
        softmax_scale=192**-0.5, features=frozenset({"lse"}),
    )  # fmt: skip
    batch = BatchMetadata.build([tokens] * requests, device=place.device, causal=causal)
    plan, call = module.plan(spec, batch), Call(query, None, output, key, value, lse)

    def error(found: Tensor = output) -> float:
        """On some rows of a request and a head."""
        chosen = torch.randint(tokens, (64,), device=place.device)
        own = slice((requests - 1) * tokens, None)
        scores = query[own, -1][chosen].double() @ key[own, -1].double().T * spec.softmax_scale
        if causal:
            scores.masked_fill_(torch.arange(tokens, device=place.device) > chosen[:, None], -math.inf)
        exact = scores.softmax(-1) @ value[own, -1].double()
        return float((found[own, -1][chosen].double() - exact).norm() / exact.norm())

    def peers() -> Peers:
        q, k, v = (x.view(requests, tokens, heads, -1).transpose(1, 2) for x in (query, key, value))

        def sdpa(backend: SDPBackend) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)

        for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("sdpa flash", SDPBackend.FLASH_ATTENTION)):
            yield Peer(name, partial(sdpa, backend), lambda x: error(x.transpose(1, 2).flatten(0, 1)))
        fa3 = function_of("attnreg.kernels.flash_attn.fa3", "build")
        if fa3 is not None:
            # the operator itself: the adapter cuts the padding off by the host's lengths, which no graph may hold
            arguments = fa3.arguments(spec, fa3.plan(spec, batch)) | {"k": key, "v": value}
            other = torch.full_like(output, math.nan)
            yield Peer("FA3", partial(fa3.fwd, q=query, out=other, **arguments), lambda _: error(other))

    return Trial(
        call=partial(module.forward, spec, plan, call),
        error=error,
        peers=peers,
        moved=query.nbytes + key.nbytes + value.nbytes + output.nbytes,
        operations=2.0 * rows * tokens * heads * 320 / (2 if causal else 1),
    )


def _on_context(place: Place, tokens: int, context: int, heads: int, workspace: int) -> Trial:
    """A prompt after a cached context, which is read, expanded and attended to in chunks of the workspace."""
    torch.manual_seed(0)
    spec = MLASpec(
        latent=AttentionSpec(
            num_heads=heads, num_kv_heads=1, head_size=RANK + ROPE, head_size_v=RANK, dtype=place.dtype,
            softmax_scale=192**-0.5, block_size=BLOCK, features=frozenset({"lse"}), latent=True,
        ),
        qk_nope_head_dim=NOPE, v_head_dim=WIDTH,
    )  # fmt: skip
    new: dict[str, Any] = {"device": place.device, "dtype": place.dtype}
    weight = torch.randn(heads * (NOPE + WIDTH), RANK, **new) * RANK**-0.5
    keys = context + tokens
    blocks = -(-keys // BLOCK)
    cache = torch.randn(latent_cache_shape(spec.latent, blocks)[0], **new)
    table = torch.randperm(blocks, device=place.device).int()[None]
    batch = BatchMetadata.build([tokens], [keys], device=place.device, block_table=table)
    query = torch.randn(tokens, heads, NOPE + ROPE, **new)
    latent, rope = torch.randn(tokens, RANK, **new), torch.randn(tokens, ROPE, **new)
    output = torch.full((tokens, heads, WIDTH), math.nan, **new)
    prompts = ExpandedPrompts(spec, triton_attn, weight, workspace_tokens=workspace)

    def error() -> float:
        """On some rows of the last head."""
        chosen = torch.randint(tokens, (64,), device=place.device)
        stored = cache[table[0].long()].flatten(0, 1)[:context]
        whole = torch.cat([stored, torch.cat([latent, rope], -1)]).double()
        w_uk, w_uv = (w[-1].double() for w in projections(spec, weight))
        key = torch.cat([whole[:, :RANK] @ w_uk.T, whole[:, RANK:]], -1)
        scores = query[chosen, -1].double() @ key.T * spec.latent.softmax_scale
        scores.masked_fill_(torch.arange(keys, device=place.device) > context + chosen[:, None], -math.inf)
        exact = scores.softmax(-1) @ (whole[:, :RANK] @ w_uv.T)
        return float((output[chosen, -1].double() - exact).norm() / exact.norm())

    return Trial(
        call=partial(prompts, query, latent, rope, cache, batch, output),
        error=error,
        peers=lambda: iter(()),
        moved=keys * 2.0 * (RANK + ROPE) + query.nbytes + output.nbytes,
        operations=2.0 * heads * (keys * RANK * (NOPE + WIDTH) + tokens * (context + tokens / 2) * (192 + WIDTH)),
        max_error=2e-2,
        # chunks are made of the host's lengths
        captured=False,
    )
