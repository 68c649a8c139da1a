"""TURBOQUANT beside attention over a bfloat16 cache and vLLM's TurboQuant, on the same tensors, in microseconds.

python benchmarks/turboquant.py [--record [FILE]] [--case WORD] [--no-peers]
python benchmarks/turboquant.py --dry-run     run every case at small sizes, on a processor with TRITON_INTERPRET=1

Decode has 32 query heads, 8 KV heads of 128, blocks of 16; the query's rotation and the codebook are part of what is
measured. On SM 9.0 that is TURBOQUANT/Hopper, beside TURBOQUANT/Triton. Marks are those that the kernels are to meet on
an H200; of bfloat16 that is attnreg's and FlashAttention's time in this run. vLLM's kernels take their own preset of
the same bits, where this vLLM has them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kernel_case import Case, Place, Trial, function_of, run
from measuring import Peer, Peers
from torch import Tensor

from attnreg.kernels import reference, triton_attn
from attnreg.kernels.turboquant import attention as turboquant_attn
from attnreg.language.packed import packed_formats
from attnreg.loader import default_registry
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCache

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
# preset, requests, context -> the mark in microseconds
DECODES = {
    ("turboquant_4bit_nc", 64, 8192): 210.0,
    ("turboquant_4bit_nc", 16, 8192): 110.0,
    ("turboquant_4bit_nc", 1, 8192): 19.0,
    ("turboquant_k8v4", 64, 8192): 400.0,
    ("turboquant_3bit_nc", 64, 8192): 420.0,
    # no slower than bfloat16's decode, which takes 487, 128 and 22 here
    ("turboquant_k3v4_nc", 64, 8192): 487.0,
    ("turboquant_4bit_ub", 64, 8192): 487.0,
    ("turboquant_3bit_ub", 64, 8192): 487.0,
    ("turboquant_4bit_nc", 64, 32768): 1900.0,
    ("turboquant_3bit_nc", 1, 8192): 22.0,
    ("turboquant_k8v4", 1, 8192): 22.0,
}
STORES = {("turboquant_4bit_nc", 8192): 40.0, ("turboquant_3bit_ub", 8192): 40.0, ("turboquant_4bit_nc", 64): 10.0}
FORMATS = packed_formats(default_registry().vocabulary.words["kv_dtypes"])


def cases(place: Place, word: str = "") -> Iterator[Case]:
    """The cases with a word in their names."""
    for (preset, requests, context), mark in DECODES.items():
        name = f"decode {preset} b{requests} {context // 1024}k"
        yield from _named(name, word, mark, partial(_decode, place, preset, requests, context))
    for (preset, tokens), mark in STORES.items():
        yield from _named(f"store {preset} {tokens} tokens", word, mark, partial(_store, place, preset, tokens))


def _named(name: str, word: str, mark: float, prepare: Callable[[], Trial]) -> Iterator[Case]:
    if word in name:
        yield Case(name=name, mark=mark, prepare=prepare)


def spec_of(place: Place, preset: str | None) -> AttentionSpec:
    return AttentionSpec(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, head_size_v=SIZE, dtype=place.dtype,
        softmax_scale=SIZE**-0.5, kv_dtype=preset or "auto", block_size=BLOCK, features=frozenset({"lse"}),
        packed=FORMATS[preset] if preset else None,
    )  # fmt: skip


def filled(place: Place, spec: AttentionSpec, requests: int, context: int) -> tuple[KVCache, BatchMetadata, KVCache]:
    """A packed cache of random keys and values, the batch that decodes over it, and a plain cache of the same."""
    blocks = context // BLOCK
    shape, plain = turboquant_attn.kv_cache_shape(spec, requests * blocks), (requests * blocks, BLOCK, KV_HEADS, SIZE)
    cache = KVCache(*(torch.empty(x, dtype=torch.uint8, device=place.device) for x in (shape.key, shape.value)))
    keys, values = (torch.randn(plain, device=place.device, dtype=place.dtype) for _ in range(2))
    order = torch.randperm(requests * blocks, device=place.device)
    table = order.int().view(requests, blocks)
    for first in range(0, requests * blocks, 4096):
        part = slice(first, min(first + 4096, requests * blocks))
        slots = torch.arange(part.start * BLOCK, part.stop * BLOCK, device=place.device)
        batch = BatchMetadata.build([0], [1], device=place.device, block_table=table[:1], slot_mapping=slots)
        plan = turboquant_attn.plan(spec, batch)
        turboquant_attn.write_kv(spec, plan, keys[part].flatten(0, 1), values[part].flatten(0, 1), cache)
    batch = BatchMetadata.build([1] * requests, [context] * requests, device=place.device, block_table=table)
    return cache, batch, KVCache(keys, values)


def _module(place: Place) -> Any:
    """The kernel module of TURBOQUANT that attends on this machine."""
    if place.device == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        return importlib.import_module("attnreg.kernels.hopper.packed.attention")
    return turboquant_attn


def _decode(place: Place, preset: str, requests: int, context: int) -> Trial:
    torch.manual_seed(0)
    requests, context = place.few(requests, 2), place.few(context, 48)
    spec = spec_of(place, preset)
    cache, batch, plain = filled(place, spec, requests, context)
    query = torch.randn(requests, HEADS, SIZE, device=place.device, dtype=place.dtype)
    output = torch.full_like(query, math.nan)
    lse = torch.full((HEADS, requests), math.nan, device=place.device)
    module, call = _module(place), Call(query, cache, output, lse=lse)
    plan = module.plan(spec, batch)

    def error(found: Tensor = output) -> float:
        """Of the last request, against what its codes stand for."""
        assert batch.block_table is not None
        one = BatchMetadata.build([1], [context], device=place.device, block_table=batch.block_table[-1:])
        exact = reference.attention(spec, one, query[-1:], cache).output[0]
        return float((found[-1].double() - exact).norm() / exact.norm())

    def peers() -> Peers:
        other = torch.empty_like(query)
        if module is not turboquant_attn:
            portable = turboquant_attn.plan(spec, batch)
            twin = partial(turboquant_attn.forward, spec, portable, call._replace(output=other))
            yield Peer("TURBOQUANT/Triton", twin, lambda _: error(other))
        dense = spec_of(place, None)
        yield Peer(
            "TRITON_ATTN bf16",
            partial(triton_attn.forward, dense, triton_attn.plan(dense, batch), Call(query, plain, other, lse=lse)),
        )
        if flash := function_of("flash_attn_interface", "flash_attn_with_kvcache"):
            lengths = batch.seq_lens
            yield Peer(
                "FlashAttention 3 bf16",
                partial(
                    flash, query[:, None], *plain, cache_seqlens=lengths, page_table=batch.block_table, causal=True
                ),
            )
        yield from _of_vllm(preset, query, batch, context)

    return Trial(
        call=partial(module.forward, spec, plan, call), error=error, peers=peers,
        moved=float(requests * context * KV_HEADS * FORMATS[preset].token_bytes(SIZE)),
        operations=4.0 * requests * context * HEADS * SIZE,
    )  # fmt: skip


def _of_vllm(preset: str, query: Any, batch: BatchMetadata, context: int) -> Peers:
    """vLLM's decode over its own cache of that preset; its bytes are random, which take the same time."""
    attend = function_of(
        "vllm.v1.attention.ops.triton_turboquant_decode", "triton_turboquant_decode_attention"
    )  # fmt: skip
    config_of = function_of("vllm.model_executor.layers.quantization.turboquant.config", "TurboQuantConfig")
    centroids_of = function_of("vllm.model_executor.layers.quantization.turboquant.centroids", "get_centroids")
    if attend is None or config_of is None or centroids_of is None or preset.endswith("_ub"):
        return
    config = config_of.from_cache_dtype(preset, SIZE)
    blocks = batch.num_reqs * context // BLOCK
    cache = torch.zeros(blocks, BLOCK, KV_HEADS, config.slot_size_aligned, dtype=torch.uint8, device=query.device)
    matrix = torch.eye(SIZE, device=query.device)
    call = partial(
        attend, query=query, kv_cache=cache, block_table=batch.block_table, seq_lens=batch.seq_lens, Pi=matrix,
        centroids=centroids_of(SIZE, config.centroid_bits).to(query.device), scale=SIZE**-0.5,
        mse_bits=config.key_mse_bits, key_packed_size=config.key_packed_size,
        value_quant_bits=config.effective_value_quant_bits, key_fp8=config.key_fp8,
        norm_correction=config.norm_correction, PiT=matrix,
    )  # fmt: skip
    yield Peer("vLLM", call)


def _store(place: Place, preset: str, tokens: int) -> Trial:
    torch.manual_seed(0)
    tokens = place.few(tokens, 32)
    spec = spec_of(place, preset)
    shape = turboquant_attn.kv_cache_shape(spec, -(-tokens // BLOCK))
    cache = KVCache(*(torch.zeros(x, dtype=torch.uint8, device=place.device) for x in (shape.key, shape.value)))
    key, value = (torch.randn(tokens, KV_HEADS, SIZE, device=place.device, dtype=place.dtype) for _ in range(2))
    table = torch.arange(-(-tokens // BLOCK), device=place.device, dtype=torch.int32)[None]
    slots = torch.arange(tokens, device=place.device)
    batch = BatchMetadata.build([0], [tokens], device=place.device, block_table=table, slot_mapping=slots)
    plan = turboquant_attn.plan(spec, batch)

    def error() -> float:
        """How much further than the codec's the stored keys of some tokens are from what was given."""
        from attnreg.runtime.turboquant import codec
        from attnreg.runtime.turboquant.cache_bytes import packed_blocks

        page, _ = packed_blocks(FORMATS[preset], SIZE, SIZE, BLOCK)
        found = codec.decode(page, page.rows(cache.key[:1]))[0].transpose(0, 1)
        exact, best = codec.rotated(key[:BLOCK], SIZE), codec.decode(page, codec.encode(page, key[:BLOCK]))
        return float((found - exact).norm() / (best - exact).norm()) - 1.0

    def peers() -> Peers:
        dense = spec_of(place, None)
        plain = KVCache(*(torch.empty(-(-tokens // BLOCK), BLOCK, KV_HEADS, SIZE, device=place.device,
                                      dtype=place.dtype) for _ in range(2)))  # fmt: skip
        dense_plan = triton_attn.plan(dense, batch)
        yield Peer("TRITON_ATTN bf16", partial(triton_attn.write_kv, dense, dense_plan, key, value, plain))

    return Trial(
        call=partial(turboquant_attn.write_kv, spec, plan, key, value, cache), error=error, peers=peers,
        moved=float(key.nbytes + value.nbytes + tokens * KV_HEADS * FORMATS[preset].token_bytes(SIZE)), copies=True,
    )  # fmt: skip


if __name__ == "__main__":
    run("turboquant", __doc__, cases)
