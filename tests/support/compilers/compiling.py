"""Compiles exactly the kernels that a plan would launch, without a GPU, and reads the resources that they use.

Run as a program it compiles cases for targets and prints a JSON line for each: it needs a process of its own, because
a kernel module that was imported for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from support.compilers.compiled import Facts, Kernel
from support.compilers.packed import PACKED, PACKED_FULL, run_packed

TARGETS = ("sm75", "sm80", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "gfx950", "gfx1100")
# for which the path of causal batches is compiled alone too
CAUSAL_TARGETS = ("sm90", "gfx942", "gfx1100")


@dataclass(frozen=True)
class Case:
    """A layer and a batch whose launches are compiled."""

    name: str
    queries: int = 1
    requests: int = 1
    keys: int = 8192
    heads: tuple[int, int] = (32, 8)
    head_size: int = 128
    head_size_v: int | None = None
    dtype: str = "bfloat16"
    cache: str = "same"
    block_size: int = 16
    layout: str = "NHD"
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    causal: bool = True
    features: tuple[str, ...] = ()
    # whether the launches are those that a graph captures, for any lengths
    in_graph: bool = False
    # partial states to merge, of as many tokens as there are queries; no attention is launched then
    states: int = 0
    output: str = "same"
    # MLA in its latent form, of this kv_dtype
    latent: str = ""
    # a packed cache, of this kv_dtype
    packed: str = ""


_KV_DTYPES = {
    "same": "auto",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e4m3fnuz": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
FEATURES = ("sinks", "alibi", "lse", "ranges")
# compiled on every run of the suite; all others with --full
DEFAULT = (
    Case("decode"),
    Case("decode fp8", cache="float8_e4m3fn", features=("sinks", "lse")),
    Case("decode in a graph", requests=64, in_graph=True),
    Case("decode fp8 in a graph", requests=8, cache="float8_e4m3fn", features=("sinks", "lse"), in_graph=True),
    Case("decode of heads of 64 in a graph", requests=64, head_size=64, layout="HND", in_graph=True),
    Case(
        "decode fp8 of heads of 64 in a graph",
        requests=64,
        heads=(64, 8),
        head_size=64,
        cache="float8_e4m3fn",
        in_graph=True,
    ),
    Case("decode of heads of 256 in a graph", requests=8, heads=(16, 4), head_size=256, softcap=30.0, in_graph=True),
    Case("4 queries in a graph", queries=4, requests=16, features=("lse",), in_graph=True),
    Case("split decode in a graph", requests=8, layout="SPLIT", in_graph=True),
    *(
        Case(
            f"latents of {size_v} {kv_dtype}, {heads} heads",
            heads=(heads, 1),
            requests=requests,
            queries=queries,
            head_size=size,
            head_size_v=size_v,
            block_size=64,
            features=("lse",),
            latent=kv_dtype,
        )
        for kv_dtype in ("auto", "fp8", "fp8_ds_mla")
        for heads, queries, requests, size, size_v in (
            (128, 1, 64, 576, 512),
            (16, 1, 8, 576, 512),
            (16, 4, 8, 576, 512),
            (40, 1, 1, 288, 256),
        )
        if kv_dtype != "fp8_ds_mla" or size_v == 512
    ),
    *(
        Case(
            f"latents of 512 {kv_dtype}, {heads} heads, in a graph",
            heads=(heads, 1),
            requests=64,
            queries=queries,
            head_size=576,
            head_size_v=512,
            block_size=64,
            latent=kv_dtype,
            in_graph=True,
        )
        for kv_dtype, heads, queries in (("auto", 128, 1), ("fp8_ds_mla", 16, 4))
    ),
    Case("queries 16", queries=16, requests=64, causal=False),
    Case("prefill", queries=2048),
    Case("prefill packed", queries=4096, keys=4096, block_size=0, features=("sinks", "lse")),
    Case(
        "prompts of MLA",
        queries=4096,
        keys=4096,
        heads=(128, 128),
        head_size=192,
        head_size_v=128,
        block_size=0,
        features=("lse",),
    ),
    Case("split decode fp8", layout="SPLIT", cache="float8_e4m3fn"),
    Case("split prefill", queries=2048, layout="SPLIT", causal=False),
    Case("split 16 queries, fp8 of gfx942", queries=16, layout="SPLIT", cache="float8_e4m3fnuz", causal=False),
    Case(
        "tree of 16, fp8 in and out",
        queries=16,
        requests=8,
        cache="float8_e4m3fn",
        features=("tree_mask", "fp8_query", "fp8_output"),
    ),
    *(Case(**case) for case in PACKED),
    Case("merge of 2 states", queries=4096, heads=(128, 128), states=2),
    Case("merge of 8 states to fp8", queries=16, head_size=512, states=8, output="float8_e4m3fn"),
    Case("merge of 2 states to fp8 of gfx942", queries=512, head_size=80, states=2, output="float8_e4m3fnuz"),
    Case("merge of 2 states of head 2048", queries=512, head_size=2048, dtype="float32", states=2),
    Case("chunks by request", queries=300, chunk=256, causal=False, features=("causal_by_request",)),
    Case("narrow values", queries=300, head_size_v=32),
    Case("narrow values fp8", queries=300, head_size_v=32, cache="float8_e4m3fn"),
    Case("prefill softcap", queries=2048, softcap=30.0, features=("lse",)),
    Case("prefill softcap head 256, window", queries=2048, heads=(16, 8), head_size=256, softcap=50.0, window=4096),
    Case("16 queries, ALiBi head 64", queries=16, requests=8, head_size=64, features=("alibi",)),
    Case("decode softcap head 256", requests=64, heads=(16, 8), head_size=256, softcap=50.0),
    Case(
        "head 256 all features", queries=300, heads=(8, 2), head_size=256, window=2048, softcap=30.0, features=FEATURES
    ),
)
FULL = (
    *(Case(**case) for case in PACKED_FULL),
    *(
        Case(
            f"{name} head {size} {dtype} {cache}{' all features' if extras else ''}", queries=queries,
            requests=1 if queries > 16 else 8, heads=heads, head_size=size, dtype=dtype, cache=cache,
            block_size=block_size, layout=layout, features=FEATURES if extras else (),
            softcap=30.0 if extras else 0.0, window=1024 if extras else 0,
        )
        for size in (64, 80, 128, 192, 256, 512)
        for dtype, cache in (("bfloat16", "same"), ("float32", "same"), ("bfloat16", "float8_e4m3fn"))
        for name, queries, heads, block_size, layout in (
            ("decode", 1, (16, 4), 16, "NHD"), ("16 queries", 16, (16, 4), 16, "NHD"),
            ("16 queries, group 8", 16, (16, 2), 16, "NHD"), ("prefill", 2048, (16, 4), 16, "NHD"),
            ("packed", 2048, (16, 4), 0, "NHD"), ("prefill in parts", 300, (16, 16), 16, "NHD"),
            ("split decode", 1, (16, 4), 16, "SPLIT"),
            ("split prefill", 2048, (16, 4), 16, "SPLIT"),
        )
        for extras in (False, True)
        # without a cache nothing is quantised; AMD's paged layout ends at 256
        if (block_size or cache == "same") and (layout == "NHD" or size < 512)
    ),
    Case("decode float16", dtype="float16", requests=64),
    Case("decode float32", dtype="float32"),
    Case("decode e5m2", cache="float8_e5m2", requests=64),
    Case("decode head 64 window", heads=(64, 8), head_size=64, window=128, features=("sinks",), requests=64),
    Case("decode head 256", head_size=256, heads=(16, 8)),
    Case("decode head 512", head_size=512, heads=(8, 4)),
    Case("decode multi-query", heads=(71, 1), head_size=64),
    Case("queries 8", queries=8, causal=False),
    Case("queries 8 fp8", queries=8, cache="float8_e4m3fn", causal=False),
    Case("prefill float32", queries=512, dtype="float32"),
    Case("prefill fp8", queries=2048, cache="float8_e4m3fn"),
    Case("prefill pages of 128", queries=2048, block_size=128),
    Case("prefill head 32", queries=512, head_size=32, heads=(12, 12), causal=False, block_size=0),
    Case("prefill head 64", queries=4096, head_size=64, heads=(64, 8), block_size=0),
    Case("prefill head 64 window", queries=4096, head_size=64, heads=(64, 8), window=128, features=("sinks",)),
    Case("prefill head 80", queries=512, head_size=80, heads=(16, 16)),
    Case("prefill head 96 window", queries=2048, head_size=96, window=1024),
    *(
        Case(
            f"{queries} queries head {size}/{size_v} {cache}", queries=queries, requests=1 if queries > 16 else 8,
            head_size=size, head_size_v=size_v, cache=cache,
        )
        for size, size_v in ((64, 32), (512, 32), (32, 128), (128, 64), (64, 512))
        for queries in (16, 300)
        for cache in ("same", "float8_e4m3fn")
    ),
    Case("prefill head 192/128", queries=2048, head_size=192, head_size_v=128, heads=(16, 16), block_size=0),
    Case("prefill head 256", queries=2048, head_size=256, heads=(16, 4)),
    Case("prefill head 256 packed", queries=2048, head_size=256, heads=(16, 4), block_size=0),
    Case("prefill head 512", queries=512, head_size=512, heads=(8, 4)),
    Case("prefill all features", queries=512, window=1024, softcap=30.0, features=FEATURES),
    Case("prefill all features fp8", queries=512, window=1024, softcap=30.0, features=FEATURES, cache="float8_e4m3fn"),
)  # fmt: skip


@dataclass(frozen=True)
class Usage:
    """What one kernel of a case uses, compiled for a target, and the shared memory that the target has."""

    case: str
    target: str
    kernel: str
    facts: Facts
    limit: int
    config: str


def compile_case(case: Case, target_name: str) -> list[Usage]:
    """The resources of each kernel of a case, cache write included, compiled for a target."""
    found = []
    for launched in kernels_of(case, target_name):
        tile = launched.constants.get("TILE")
        found.append(
            Usage(
                case=case.name,
                target=target_name,
                kernel=launched.variant.function.__name__.strip("_").removesuffix("_kernel"),
                facts=launched.kernel.facts,
                limit=launched.target.shared_memory,
                config=f"{tile} {launched.variant.code.options}" if tile else "",
            )
        )
    return found


class Launched(NamedTuple):
    """A kernel as it would be launched."""

    target: Any
    variant: Any
    constants: dict[str, Any]
    kernel: Kernel


def cases_of(target_name: str, *, full: bool = False) -> tuple[Case, ...]:
    """The cases that are compiled for a target: the layout SPLIT is AMD's."""
    cases = DEFAULT + FULL if full else DEFAULT
    return tuple(case for case in cases if case.layout != "SPLIT" or target_name.startswith("gfx"))


def kernels_of(case: Case, target_name: str) -> Iterator[Launched]:
    """The kernels that a case launches, in order, for a target."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from attnreg.kernels.triton.target import target_for

    backend, arch, warp = _gpu(target_name)
    target = target_for(backend, arch, 132)
    for variant, arguments, constants in _launches(case, target):
        values = arguments | constants
        assert list(values) == variant.function.arg_names
        signature, attrs, constexprs = {}, {}, {}
        for i, (param, value) in enumerate(zip(variant.function.params, values.values(), strict=True)):
            if param.is_constexpr or value is None:
                # a launch reads the address of every pointer for whose alignment code is compiled
                assert param.is_constexpr or param.do_not_specialize_on_alignment, param.name
                signature[param.name], constexprs[(i,)] = "constexpr", value
            elif isinstance(value, bool | int | float):
                signature[param.name] = "fp32" if isinstance(value, float) else "i32"
            else:
                signature[param.name] = _pointer(value.dtype)
                if not param.do_not_specialize_on_alignment:
                    attrs[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=variant.function, signature=signature, constexprs=constexprs, attrs=attrs)
        kernel = Kernel(source, GPUTarget(backend, arch, warp), variant.options)
        yield Launched(target, variant, constants, kernel)


def every_kernel(target_name: str) -> Iterator[Kernel]:
    """Each kernel that the suite compiles for a target."""
    from support.compilers import gluon

    for case in cases_of(target_name):
        yield from (launched.kernel for launched in kernels_of(case, target_name))
    if target_name == "sm90":
        yield from (kernel for _, kernel in gluon.latent_kernels(gluon.LATENT_CASES))


def _launches(case: Case, target: Any) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """The variant, the arguments and the constants of each launch of a case."""
    from attnreg.kernels.mla import cache as mla_cache
    from attnreg.kernels.mla import plans as mla_plans
    from attnreg.kernels.states import triton_merge
    from attnreg.kernels.triton import cache, launch, plans
    from attnreg.kernels.turboquant import store

    launched: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []

    def record(bound: Any, tensors: tuple[Any, ...], scratch: Any = None, numbers: Any = None) -> None:
        variant = bound.variant
        values = (*tensors, *(() if scratch is None else scratch.tensors), *(numbers or bound.numbers))
        arguments = zip(variant.function.arg_names, values, strict=False)
        launched.append((variant, dict(arguments), variant.code.constants(bound.key)))

    users = (plans, cache, triton_merge, mla_plans, mla_cache, store)
    launching, target_of = launch.Bound.launch, cache.target_of
    launch.Bound.launch = record
    # what is kept of the device is of another target
    cache._writes.clear()
    for module in users:
        module.target_of = lambda device: target
    try:
        if case.packed:
            run_packed(case, _tensor)
        else:
            (_run_merge if case.states else _run_latent if case.latent else _run)(case)
    finally:
        launch.Bound.launch = launching
        cache._writes.clear()
        for module in users:
            module.target_of = target_of
    return launched


def _tensor(*shape: int, dtype: Any = None) -> Any:
    """A tensor without memory, which seems aligned; int32 unless a type is given."""
    import torch

    class Aligned(torch.Tensor):
        def data_ptr(self) -> int:
            return 0

    return torch.empty(shape, dtype=dtype or torch.int32, device="meta").as_subclass(Aligned)


def _run_merge(case: Case) -> None:
    """Merges partial states of a case, on tensors without memory."""
    import torch

    from attnreg.kernels.states.triton_merge import TritonMerge

    dtype = getattr(torch, case.dtype)
    eight = case.output != "same"
    size = case.queries, case.heads[0], case.head_size
    states = _tensor(case.states, *size, dtype=dtype)
    lses = _tensor(case.states, case.heads[0], case.queries, dtype=torch.float32)
    tensors = (
        _tensor(*size, dtype=getattr(torch, case.output) if eight else dtype),
        _tensor(case.heads[0], case.queries, dtype=torch.float32),
        states[:-1], lses[:-1], states[-1], lses[-1], _tensor(1, dtype=torch.float32) if eight else None,
    )  # fmt: skip
    TritonMerge(*tensors).run(*tensors, case.queries)


def _run_latent(case: Case) -> None:
    """Writes latents and attends to them, on tensors without memory."""
    import torch

    from attnreg.kernels import triton_mla
    from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, LayerParams
    from attnreg.runtime.mla.interface import as_kv_cache, latent_cache_shape

    dtype, heads, tokens = getattr(torch, case.dtype), case.heads[0], case.queries * case.requests
    assert case.head_size_v is not None
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=1, head_size=case.head_size, head_size_v=case.head_size_v, dtype=dtype,
        kv_dtype=case.latent, softmax_scale=0.1, block_size=case.block_size, features=frozenset(case.features),
        latent=True,
    )  # fmt: skip
    batch = BatchMetadata(
        query_start_loc=_tensor(case.requests + 1), seq_lens=_tensor(case.requests), max_query_len=case.queries,
        max_seq_len=case.keys, query_start_loc_cpu=torch.arange(case.requests + 1, dtype=torch.int32) * case.queries,
        seq_lens_cpu=torch.full((case.requests,), case.keys, dtype=torch.int32), causal=case.causal,
        slot_mapping=_tensor(tokens, dtype=torch.int64),
        block_table=_tensor(case.requests, case.keys // case.block_size),
    )  # fmt: skip
    shape, cache_dtype = latent_cache_shape(spec, 64)
    cache = as_kv_cache(spec, _tensor(*shape, dtype=cache_dtype))
    scale = _tensor(1, dtype=torch.float32) if case.latent == "fp8" else None
    params = LayerParams(k_scale=scale, v_scale=scale)
    plan = triton_mla.plan(spec, batch)
    latent, rope = (_tensor(tokens, 1, n, dtype=dtype) for n in (case.head_size_v, case.head_size - case.head_size_v))
    triton_mla.write_kv(spec, plan, latent, rope, cache, params=params)
    query = _tensor(tokens, heads, case.head_size, dtype=dtype)
    output = _tensor(tokens, heads, case.head_size_v, dtype=dtype)
    lse = _tensor(heads, tokens, dtype=torch.float32) if "lse" in case.features else None
    plan = plan.for_graphs() if case.in_graph else plan
    triton_mla.forward(spec, plan, Call(query, cache, output, None, None, lse, params))


def _run(case: Case) -> None:
    """Plan and run a case on tensors without memory."""
    import torch

    from attnreg.kernels.triton.cache import write_kv
    from attnreg.kernels.triton.plans import AttentionPlan
    from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCache, LayerParams

    dtype = getattr(torch, case.dtype)
    cache_dtype = dtype if case.cache == "same" else getattr(torch, case.cache)
    heads, kv_heads = case.heads
    size_v = case.head_size_v or case.head_size
    tokens, tensor = case.queries * case.requests, _tensor

    features = {*case.features} - {"ranges"}
    features |= {"mm_prefix"} if "ranges" in case.features else set()
    features |= {"sliding_window"} if case.window else set()
    features |= {"softcap"} if case.softcap else set()
    features |= {"chunk"} if case.chunk else set()
    fnuz = case.cache.endswith("fnuz")
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_size=case.head_size, head_size_v=size_v, dtype=dtype,
        kv_dtype=_KV_DTYPES[case.cache], fnuz=fnuz, softmax_scale=0.1, block_size=case.block_size or None,
        sliding_window=case.window or None, chunk=case.chunk or None, softcap=case.softcap or None,
        features=frozenset(features), kv_layout=case.layout,
    )  # fmt: skip
    paged = case.block_size > 0
    starts = torch.arange(case.requests + 1, dtype=torch.int32) * case.queries
    batch = BatchMetadata(
        query_start_loc=tensor(case.requests + 1), seq_lens=tensor(case.requests), max_query_len=case.queries,
        max_seq_len=case.keys, query_start_loc_cpu=starts,
        seq_lens_cpu=torch.full((case.requests,), case.keys, dtype=torch.int32),
        block_table=tensor(case.requests, case.keys // case.block_size) if paged else None,
        mm_prefix=tensor(case.requests, 2, 2) if "ranges" in case.features else None,
        causal=tensor(case.requests, dtype=torch.bool) if "causal_by_request" in features else case.causal,
        tree_mask=tensor(tokens, case.queries, dtype=torch.bool) if "tree_mask" in features else None,
    )  # fmt: skip
    rows = (64, case.block_size) if paged else (tokens,)
    key = tensor(*rows, kv_heads, case.head_size, dtype=cache_dtype)
    value = tensor(*rows, kv_heads, size_v, dtype=cache_dtype)
    if case.layout == "SPLIT":
        x = 16 // cache_dtype.itemsize
        key = tensor(64, kv_heads, case.head_size // x, case.block_size, x, dtype=cache_dtype)
        value = tensor(64, kv_heads, size_v, case.block_size, dtype=cache_dtype)
    scale = tensor(kv_heads, dtype=torch.float32) if case.cache != "same" else None
    if paged:
        new_key, new_value = (
            tensor(tokens, kv_heads, case.head_size, dtype=dtype),
            tensor(tokens, kv_heads, size_v, dtype=dtype),
        )
        slots = tensor(tokens, dtype=torch.int64)
        write_kv(new_key, new_value, key, value, slots, layout=case.layout, k_scale=scale, v_scale=scale)
    per_head = tensor(heads, dtype=torch.float32)
    params = LayerParams(
        sinks=per_head if "sinks" in features else None, alibi_slopes=per_head if "alibi" in features else None,
        k_scale=scale, v_scale=scale, q_scale=scale if "fp8_query" in features else None,
        out_scale=tensor(1, dtype=torch.float32) if "fp8_output" in features else None,
    )  # fmt: skip
    call = Call(
        query=tensor(tokens, heads, case.head_size, dtype=spec.query_dtype),
        kv_cache=KVCache(key, value) if paged else None,
        key=None if paged else key, value=None if paged else value,
        output=tensor(tokens, heads, size_v, dtype=spec.output_dtype),
        lse=tensor(heads, tokens, dtype=torch.float32) if "lse" in features else None, params=params,
    )  # fmt: skip
    plan = AttentionPlan(spec, batch)
    (plan.for_graphs() if case.in_graph else plan).run(call)


def _gpu(name: str) -> tuple[str, Any, int]:
    if name.startswith("sm"):
        return "cuda", int(name[2:]), 32
    return "hip", name, 64 if name.startswith("gfx9") else 32


def _pointer(dtype: Any) -> str:
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8e4nv",
             "float8_e5m2": "fp8e5", "uint8": "u8", "int32": "i32", "int64": "i64"}  # fmt: skip
    return "*" + names[str(dtype).removeprefix("torch.")]


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    target_name, names = sys.argv[1], sys.argv[2:]
    for chosen in cases_of(target_name, full=True):
        if chosen.name in names or names == ["--full"] or (names == [] and chosen in DEFAULT):
            for usage in compile_case(chosen, target_name):
                sys.stdout.write(json.dumps(asdict(usage)) + "\n")
