"""The kernels in Gluon that a plan would launch, without a GPU.

It is imported by a process that compiles alone (compiler.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from support.compilers.compiled import Kernel


@dataclass(frozen=True)
class LatentCase:
    """A layer of MLA and a batch whose launches are compiled."""

    name: str
    heads: int = 128
    queries: int = 1
    requests: int = 64
    keys: int = 8192
    block_size: int = 64
    dtype: str = "bfloat16"
    causal: bool = True
    lse: bool = True
    kv_dtype: str = "auto"
    # whether the launches are those that a graph captures, for any lengths
    in_graph: bool = False


LATENT_CASES = (
    LatentCase("64 requests"),
    LatentCase("split", requests=1),
    LatentCase("16 heads, 4 queries, blocks of 16", heads=16, queries=4, block_size=16),
    LatentCase("20 heads, prompts, blocks of 48", heads=20, queries=30, requests=2, keys=100, block_size=48),
    LatentCase("float16, not causal, no lse", heads=40, dtype="float16", causal=False, lse=False, block_size=128),
    LatentCase("fp8", kv_dtype="fp8"),
    LatentCase("fp8, split, 16 heads", kv_dtype="fp8", heads=16, requests=1, block_size=16),
    LatentCase("fp8_e5m2, float16, prompts", kv_dtype="fp8_e5m2", dtype="float16", queries=30, requests=2, keys=100),
    LatentCase("fp8_ds_mla", kv_dtype="fp8_ds_mla"),
    LatentCase("64 requests in a graph", in_graph=True),
    LatentCase("16 heads, 4 queries in a graph", heads=16, queries=4, requests=8, block_size=16, in_graph=True),
    LatentCase("fp8 in a graph", kv_dtype="fp8", in_graph=True),
    LatentCase("fp8_ds_mla in a graph", kv_dtype="fp8_ds_mla", in_graph=True),
    LatentCase("600 requests in a graph", requests=600, keys=100, in_graph=True),
    LatentCase("tokens", block_size=1, keys=2048, causal=False),
    LatentCase("tokens, split, 16 heads", block_size=1, keys=2048, causal=False, requests=1, heads=16),
)


def latent_kernels(cases: tuple[LatentCase, ...]) -> list[tuple[str, Kernel]]:
    """The name of the case and the decode kernel of MLA for each launch of some cases."""
    found = []
    for case in cases:
        with observed() as launches:
            _run_latents(case)
        found += [(case.name, kernel(*launch)) for launch in launches if launch[0].function.is_gluon()]
    return found


def latent_comparisons(cases: tuple[LatentCase, ...]) -> list[tuple[str, set[str]]]:
    """The name of the case and how its kernel compares floats, as MLIR names it, for each launch of some cases."""
    texts = [(name, kernel.compiled.asm["ttgir"]) for name, kernel in latent_kernels(cases)]
    return [(name, set(re.findall(r"arith\.cmpf (\w+)", text))) for name, text in texts]


@contextmanager
def observed() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """The variant and the arguments by name of each launch meanwhile, none of which runs."""
    from attnreg.kernels.triton import launch

    launches: list[tuple[Any, dict[str, Any]]] = []

    def record(bound: Any, tensors: tuple[Any, ...], scratch: Any = None, numbers: Any = None) -> None:
        values = (*tensors, *(() if scratch is None else scratch.tensors), *(numbers or bound.numbers))
        arguments = dict(zip(bound.variant.function.arg_names, values, strict=False))
        launches.append((bound.variant, arguments | bound.variant.code.constants(bound.key)))

    launching: Callable[..., None] = launch.Bound.launch
    launch.Bound.launch = record  # type: ignore[method-assign, assignment]
    try:
        yield launches
    finally:
        launch.Bound.launch = launching  # type: ignore[method-assign]


def kernel(variant: Any, arguments: dict[str, Any]) -> Kernel:
    """The kernel of a launch, for SM 9.0."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, attrs, constexprs = {}, {}, {}
    for i, (param, value) in enumerate(zip(variant.function.params, arguments.values(), strict=True)):
        if param.is_constexpr or value is None:
            signature[param.name], constexprs[(i,)] = "constexpr", value
            continue
        signature[param.name] = _type(value)
        if param.name.endswith("_ptr") and not param.do_not_specialize_on_alignment:
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(variant.function, signature, constexprs, attrs)
    return Kernel(source, GPUTarget("cuda", 90, 32), variant.options)


def _type(value: Any) -> str:
    """The type of an argument as the compiler writes it."""
    if isinstance(value, int | float):
        return "fp32" if isinstance(value, float) else "i32"
    dtype = {
        "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32", "torch.int32": "i32",
        "torch.float8_e4m3fn": "fp8e4nv", "torch.float8_e5m2": "fp8e5",
    }  # fmt: skip
    if hasattr(value, "block_shape"):
        return f"tensordesc<{dtype[str(value.base.dtype)]}{value.block_shape},{value.layout!r}>"
    return "*" + dtype[str(value.dtype)]


def _run_latents(case: LatentCase) -> None:
    """Plans and runs a case on the CPU, as if it were an H200; what runs it is `recorded`."""
    import torch

    from attnreg.kernels.hopper.latents import plans as latent_plans
    from attnreg.kernels.triton.target import target_for
    from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call
    from attnreg.runtime.mla.interface import as_kv_cache, latent_cache_shape

    dtype, rows = getattr(torch, case.dtype), case.queries * case.requests
    spec = AttentionSpec(
        num_heads=case.heads, num_kv_heads=1, head_size=576, head_size_v=512, dtype=dtype, softmax_scale=0.1,
        block_size=case.block_size, kv_dtype=case.kv_dtype, features=frozenset({"lse"}) if case.lse else frozenset(),
        latent=True,
    )  # fmt: skip
    table = torch.zeros(case.requests, -(-case.keys // case.block_size), dtype=torch.int32)
    batch = BatchMetadata.build(
        [case.queries] * case.requests, [case.keys] * case.requests, block_table=table, causal=case.causal
    )
    shape, cache_dtype = latent_cache_shape(spec, 2)
    call = Call(
        torch.zeros(rows, case.heads, 576, dtype=dtype), as_kv_cache(spec, torch.zeros(shape, dtype=cache_dtype)),
        torch.zeros(rows, case.heads, 512, dtype=dtype), lse=torch.zeros(case.heads, rows) if case.lse else None,
    )  # fmt: skip
    require = latent_plans.require
    latent_plans.require = lambda device: target_for("cuda", 90, 132)
    try:
        plan = latent_plans.HopperLatentPlan(spec, batch)
        (plan.for_graphs() if case.in_graph else plan).run(call)
    finally:
        latent_plans.require = require
        # what was planned is of a GPU that is not here
        latent_plans._launches.cache_clear()
