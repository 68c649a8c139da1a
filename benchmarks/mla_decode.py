"""Decoding over cached latents for benchmarks/mla.py, beside FlashMLA, FA3, FlashInfer's and vLLM's Triton kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from kernel_case import Case, Place, Trial, function_of
from measuring import Peer, Peers
from torch import Tensor

from attnreg.kernels import triton_mla
from attnreg.kernels.flash_mla import record
from attnreg.kernels.mla import triton_sparse
from attnreg.kernels.mla.sparse import by_token
from attnreg.runtime import latents
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, LayerParams
from attnreg.runtime.mla.interface import as_kv_cache, latent_cache_shape

RANK, ROPE, BLOCK = 512, 64, 64
# requests, heads, context, format, mark: half of the bytes and as many products, so the marks of bfloat16
_OF_8_BITS = ((64, 128, 8192, "fp8", 400.0), (64, 128, 8192, "fp8_ds_mla", 400.0), (128, 16, 32768, "fp8", 1150.0))
# tokens, heads, mark: twice the time of the products at 787 TFLOP/s, or of the bytes and two launches
_SPARSE = ((64, 128, 93.0), (1, 128, 20.0), (128, 16, 150.0))


def cases(place: Place) -> Iterator[Case]:
    # requests, heads, context, format of the cache, mark
    for requests, heads, context, kv_dtype, mark in (
        (64, 128, 8192, "auto", 400.0), (1, 128, 8192, "auto", 30.0), (128, 16, 32768, "auto", 1150.0),
        *_OF_8_BITS,
    ):  # fmt: skip
        words = "" if kv_dtype == "auto" else f" {kv_dtype}"
        name = f"decode{words} b{requests} h{heads} at {context // 1024}k"
        sizes = place.few(requests, 2), place.few(heads, 16), place.few(context, 200)
        yield Case(name=name, mark=mark, prepare=partial(_dense, place, triton_mla, *sizes, kv_dtype))
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        # Gluon compiles for the GPU alone
        from attnreg.kernels.hopper.latents import attention as hopper_mla
        from attnreg.kernels.hopper.latents import sparse as hopper_sparse

        for block in (BLOCK, 16):
            for requests, heads, context, mark in (
                (64, 128, 8192, 255.0),
                (1, 128, 8192, 23.0),
                (128, 16, 32768, 1150.0),
            ):
                name = f"HOPPER_MLA decode b{requests} h{heads} at {context // 1024}k"
                words = "" if block == BLOCK else f", pages of {block}"
                sizes = place.few(requests, 2), place.few(heads, 16), place.few(context, 200)
                prepare = partial(_dense, place, hopper_mla, *sizes, "auto", block)
                yield Case(name=name + words, mark=mark, prepare=prepare)
        for requests, heads, context, kv_dtype, mark in _OF_8_BITS:
            name = f"HOPPER_MLA decode {kv_dtype} b{requests} h{heads} at {context // 1024}k"
            yield Case(
                name=name, mark=mark, prepare=partial(_dense, place, hopper_mla, requests, heads, context, kv_dtype)
            )
        for kv_dtype, sparse in (("auto", _SPARSE), ("fp8_ds_mla", _SPARSE[:2])):
            words = "" if kv_dtype == "auto" else f" {kv_dtype}"
            for tokens, heads, mark in sparse:
                name = f"HOPPER_MLA_SPARSE decode{words} b{tokens} h{heads}, 2048 of 32k"
                prepare = partial(_chosen, place, hopper_sparse, tokens, heads, 32768, 2048, kv_dtype)
                yield Case(name=name, mark=mark, prepare=prepare)
    for tokens, heads, mark in _SPARSE:
        name = f"sparse decode b{tokens} h{heads}, 2048 of 32k"
        topk = place.few(2048, 40)
        sizes = place.few(tokens, 2), place.few(heads, 16), place.few(32768, 128)
        yield Case(name=name, mark=mark, prepare=partial(_chosen, place, triton_sparse, *sizes, topk))


class Tensors:
    """The tensors of a step of one query a request, with the blocks of a cache in random order."""

    def __init__(
        self, place: Place, requests: int, heads: int, context: int, kv_dtype: str, block: int = BLOCK
    ) -> None:
        torch.manual_seed(0)
        self.block = block
        scaled = kv_dtype == "fp8_ds_mla"
        # the format's rotary part is of bfloat16, and so is its layer
        dtype = torch.bfloat16 if scaled else place.dtype
        self.spec = AttentionSpec(
            num_heads=heads, num_kv_heads=1, head_size=RANK + ROPE, head_size_v=RANK, dtype=dtype,
            softmax_scale=192**-0.5, block_size=block, features=frozenset({"lse"}), latent=True, kv_dtype=kv_dtype,
        )  # fmt: skip
        blocks = -(-context // block)
        shape, stored = latent_cache_shape(self.spec, requests * blocks)
        tokens = torch.randn(*shape[:2], RANK + ROPE, device=place.device, dtype=dtype)
        self.cache = latents.packed(tokens[..., :RANK], tokens[..., RANK:]) if scaled else tokens.to(stored)
        del tokens
        self.scale = torch.ones(1, device=place.device) if kv_dtype == "fp8" else None
        self.table = torch.randperm(requests * blocks, device=place.device).int().view(requests, blocks)
        self.lengths = torch.full((requests,), context, dtype=torch.int32, device=place.device)
        self.batch = BatchMetadata.build(
            [1] * requests, [context] * requests, device=place.device, block_table=self.table
        )
        self.query = torch.randn(requests, heads, RANK + ROPE, device=place.device, dtype=dtype)
        self.output = torch.full((requests, heads, RANK), math.nan, device=place.device, dtype=dtype)
        self.lse = torch.full((heads, requests), math.nan, device=place.device)

    def call(self, **more: Any) -> Call:
        params = LayerParams(k_scale=self.scale, v_scale=self.scale)
        return Call(self.query, as_kv_cache(self.spec, self.cache), self.output, lse=self.lse, params=params, **more)

    def error(self, positions: Tensor, output: Tensor | None = None, request: int = -1) -> float:
        """The relative error of a request's output, or of another's, against float64 over these positions."""
        rows = self.table[request][positions // self.block].long()
        # 8-bit floats cannot be indexed on every device
        stored = self.cache.view(torch.uint8) if self.cache.itemsize == 1 else self.cache
        some = stored[rows, positions % self.block].view(self.cache.dtype)
        keys = (latents.unpacked(some) if self.spec.kv_dtype == "fp8_ds_mla" else some.float()).double()
        exact = (self.query[request].double() @ keys.T * self.spec.softmax_scale).softmax(-1) @ keys[:, :RANK]
        found = (self.output if output is None else output)[request]
        return float((found.double() - exact).norm() / exact.norm())


def _dense(
    place: Place, module: ModuleType, requests: int, heads: int, context: int, kv_dtype: str, block: int = BLOCK
) -> Trial:
    made = Tensors(place, requests, heads, context, kv_dtype, block)
    plan = module.plan(made.spec, made.batch)
    width = latents.BYTES if kv_dtype == "fp8_ds_mla" else (RANK + ROPE) * made.cache.itemsize
    return Trial(
        call=partial(module.forward, made.spec, plan, made.call()),
        error=lambda: made.error(torch.arange(context, device=place.device)),
        peers=partial(_peers, made, context),
        moved=requests * context * width + made.query.nbytes + made.output.nbytes,
        operations=2.0 * requests * context * heads * (RANK + ROPE + RANK),
    )


def _chosen(
    place: Place, module: ModuleType, tokens: int, heads: int, context: int, topk: int, kv_dtype: str = "auto"
) -> Trial:
    made = Tensors(place, tokens, heads, context, kv_dtype)
    spec = replace(made.spec, sparse=True)
    order = [torch.randperm(context, device=place.device)[:topk] for _ in range(tokens)]
    indices = torch.stack(order).int()
    plan = module.plan(spec, made.batch)
    width = latents.BYTES if kv_dtype == "fp8_ds_mla" else (RANK + ROPE) * made.cache.itemsize
    return Trial(
        call=partial(module.forward, spec, plan, made.call(indices=indices)),
        error=lambda: made.error(order[-1]),
        peers=partial(_sparse_peers, made, spec, indices, order[-1]),
        moved=tokens * topk * width + made.query.nbytes + made.output.nbytes,
        operations=2.0 * tokens * topk * heads * (RANK + ROPE + RANK),
    )


def _sparse_peers(made: Tensors, spec: AttentionSpec, indices: Tensor, last: Tensor) -> Peers:
    """FlashMLA as vLLM builds it, where installed, with the places of the chosen tokens made by the same kernel."""
    plan = function_of("attnreg.kernels.flash_mla.sparse", "plan")
    if plan is not None and spec.kv_dtype == "auto":
        attend = record.SPARSE_PREFILL.load()

        def attend_chosen() -> Tensor:
            places = by_token(spec, made.batch, made.call(indices=indices))[1].block_table
            assert places is not None
            output: Tensor = attend(
                q=made.query, kv=made.cache.view(-1, 1, RANK + ROPE), indices=places[:, None],
                sm_scale=spec.softmax_scale, d_v=RANK, attn_sink=None, topk_length=None, out_=None,
            )[0]  # fmt: skip
            return output

        yield Peer("FlashMLA", attend_chosen, lambda output: made.error(last, output))
    if plan is not None and spec.kv_dtype == "fp8_ds_mla":
        # loads the library whose other operator is called
        record.SPARSE_PREFILL.load()
        decode = torch.ops._flashmla_C.sparse_decode_fwd.default
        query, cache = made.query[:, None], made.cache.view(torch.uint8).view(-1, made.block, 1, latents.BYTES)
        schedule: list[Any] = [None, None]

        def forward() -> Tensor:
            # it reads places by 16 bytes
            places = by_token(spec, made.batch, made.call(indices=indices))[1].block_table
            assert places is not None
            output, _, *schedule[:] = decode(
                query, cache, places[:, None].clone(), None, None, *schedule, None, None, None, RANK,
                spec.softmax_scale,
            )  # fmt: skip
            found: Tensor = output[:, 0]
            return found

        # the first call makes the schedule of the others
        forward()
        yield Peer("FlashMLA", forward, lambda output: made.error(last, output))


def _peers(made: Tensors, context: int) -> Peers:
    """FlashMLA and FlashAttention 3 as vLLM builds them, FlashInfer's MLA and vLLM's Triton kernel, where installed.

    All read the same cache.
    """
    spec, scale = made.spec, made.spec.softmax_scale
    requests, heads, _ = made.query.shape
    if spec.kv_dtype != "auto":
        return
    everything = torch.arange(context, device=made.query.device)

    def peer(name: str, call: Callable[[Tensor], Any]) -> Peer:
        """A peer whose call is given an output to write."""
        out = torch.full_like(made.output, math.nan)
        return Peer(name, partial(call, out), lambda _: made.error(everything, out))

    flash_plan = function_of("attnreg.kernels.flash_mla.dense", "plan")
    # FlashMLA has pages of 64 alone
    if flash_plan is not None and made.block == BLOCK:
        # the operator itself: attnreg's adapter copies the LSE too. The first call makes the schedule of the others
        decode_dense, made_schedule = record.DENSE_DECODE.load(), [None, None]

        def attend_dense(out: Tensor) -> None:
            _, _, *made_schedule[:] = decode_dense(
                q=made.query[:, None], kcache=made.cache[:, :, None], head_size_v=RANK, seqlens_k=made.lengths,
                block_table=made.table, softmax_scale=scale, is_causal=False,
                tile_scheduler_metadata=made_schedule[0], num_splits=made_schedule[1], out_=out[:, None],
            )  # fmt: skip

        yield peer("FlashMLA", attend_dense)
    fa3 = function_of("attnreg.kernels.flash_attn.mla", "build")
    if fa3 is not None:
        # the operator itself: it loads pages of 64 fastest, which attnreg does not claim, and this cache has no NaN
        cache, arguments = as_kv_cache(spec, made.cache).key, fa3.arguments(spec, fa3.plan(spec, made.batch))
        arguments |= {"q_v": made.query[..., :RANK], "k": cache[..., RANK:], "v": cache[..., :RANK]}
        yield peer("FA3", lambda out: fa3.fwd(q=made.query[..., RANK:], out=out, **arguments))
    wrapper = function_of("flashinfer.mla", "BatchMLAPagedAttentionWrapper")
    if wrapper is not None:
        device = made.query.device
        decode = wrapper(torch.empty(128 * 2**20, dtype=torch.uint8, device=device), backend="auto")
        starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
        decode.plan(
            starts, starts * made.table.shape[1], made.table.flatten(), made.lengths, heads, RANK, ROPE, made.block,
            True, scale, spec.dtype, spec.dtype,
        )  # fmt: skip
        query, latent = (x.split([RANK, ROPE], -1) for x in (made.query, made.cache))  # type: ignore[no-untyped-call]
        by_token = torch.empty(requests, heads, device=device)
        yield peer("FlashInfer", lambda out: decode.run(*query, *latent, out=out, lse=by_token, return_lse=True))
    triton_decode = function_of("vllm.v1.attention.ops.triton_decode_attention", "decode_attention_fwd")
    if triton_decode is not None:
        splits = 4 if requests > 1 else 64
        parts = torch.empty(requests, heads, splits, RANK + 1, device=made.query.device)
        lse = torch.empty(requests, heads, device=made.query.device)
        # a scale that is not given is copied to the GPU in each call
        cache, one = made.cache[:, :, None], torch.ones((), device=made.query.device)
        yield peer(
            "vLLM Triton",
            lambda out: triton_decode(
                made.query, cache, cache[..., :RANK], out, lse, made.table, made.lengths, parts, splits, scale,
                made.block, k_scale=one, v_scale=one, is_mla=True,
            ),
        )  # fmt: skip
