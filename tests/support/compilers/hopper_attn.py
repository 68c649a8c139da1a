"""The kernels of HOPPER_ATTN, compiled as its plans would launch them, on a machine without a GPU.

It is imported by a process that compiles alone (compiler.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from attnreg.conformance.proof import attend
from attnreg.conformance.trial import Draw
from attnreg.kernels.hopper import attention as hopper_attn
from attnreg.kernels.hopper import decode_plans
from attnreg.kernels.hopper.prompts import choices, widened
from attnreg.kernels.hopper.prompts import plans as prefill_plans
from attnreg.kernels.triton import plans
from attnreg.kernels.triton.launch import Bound, Kernel, KernelVariant
from attnreg.kernels.triton.planned.arguments import AttentionTensors
from attnreg.kernels.triton.splits.beside import Beside
from attnreg.kernels.triton.splits.merge import _MERGE, _MERGE_SHARES
from attnreg.kernels.triton.target import target_for
from support.compilers.compiled import disassembled, report
from support.compilers.fake_driver import faked
from support.layers.kernel_trials import Case, in_graphs, trial_of

LENGTHS = {"queries": [300, 40, 1], "keys": [700, 40, 9]}
BF16 = {"heads": (8, 2), "head_size": 128, "dtype": torch.bfloat16}
PACKED = {"queries": [300, 40], "keys": [300, 40], "block_size": None}
CASES = {
    "paged": Case(**LENGTHS, **BF16),
    "pages of 128": Case(**LENGTHS, **BF16, block_size=128),
    "packed": Case(**PACKED, **BF16),
    "full": Case(**PACKED, **BF16, causal=False),
    "window of 64": Case(
        **LENGTHS, heads=(64, 8), head_size=64, dtype=torch.float16, window=100, features=frozenset({"sinks"})
    ),
    "64": Case(**PACKED, **{**BF16, "head_size": 64}),
    "paged, 64": Case(**LENGTHS, **{**BF16, "head_size": 64}, features=frozenset({"sinks"})),
    "80": Case(**PACKED, **{**BF16, "head_size": 80}),
    "192": Case(**LENGTHS, **{**BF16, "head_size": 192}),
    "256, softcap": Case(**LENGTHS, **{**BF16, "head_size": 256}, softcap=20.0, layout="HND", block_size=48),
    "96": Case(**LENGTHS, **{**BF16, "head_size": 96}),
    "fp8": Case(**LENGTHS, **BF16, kv_dtype="fp8"),
    "mixed": Case(**LENGTHS, **BF16),
    "mixed in a graph": Case(**LENGTHS, **BF16),
    "split": Case(**LENGTHS, **BF16),
    **{f"split, {size}": Case(**LENGTHS, **{**BF16, "head_size": size}) for size in (64, 96, 192, 256)},
    "192, values of 128": Case(**PACKED, **{**BF16, "head_size": 192}, head_size_v=128),
}


class Compiled(NamedTuple):
    """What one compiled kernel uses, and how many instructions of some kinds it has."""

    registers: int
    spills: int
    serialised: bool
    shared: int
    products: int
    loads: int
    stores: int


# where plans ask for the GPU
PLACES = [(hopper_attn, "require"), (prefill_plans, "target_of"), (decode_plans, "target_of")]


@contextmanager
def on_hopper(places: list[tuple[Any, str]] = PLACES) -> Iterator[None]:
    """Plans are made as for an H200, and nothing is launched: random numbers, which take seconds, are zeros."""
    target = target_for("cuda", 90, 132)
    before = [getattr(*place) for place in places]
    drawn = Draw.normal
    Draw.normal = _zeros  # type: ignore[method-assign]
    for place in places:
        setattr(*place, lambda device: target)
    try:
        with faked():
            yield
    finally:
        Draw.normal = drawn  # type: ignore[method-assign]
        for place, known in zip(places, before, strict=True):
            setattr(*place, known)


def _zeros(draw: Draw, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=draw.device)


def _launch(case: Case) -> None:
    """Launches what a case does. Its keys are not split, and its tiles are taken however few they are."""
    several, choices.SEVERAL = choices.SEVERAL, 0
    with on_hopper():
        trial = trial_of(case, "cpu", module=hopper_attn, splits=1)
        attend(trial, trial.batch, trial.query)
    choices.SEVERAL = several


def launched_for(
    queries: list[int], keys: list[int], facts: dict[str, Any] | None = None, graph: bool = False
) -> list[str]:
    """The attention kernels that a batch of such lengths launches, in order; facts: of the layer.

    graph: those that a graph captures.
    """
    names: list[str] = []

    def record(bound: Any, *_: Any) -> None:
        names.append(bound.variant.function.__name__ if isinstance(bound, Bound) else "prefill_kernel")
        if not isinstance(bound, Bound) and bound.code.split:
            names.append("_merge_splits_kernel")

    launching, running = Bound.launch, prefill_plans.PromptLaunch.run
    Bound.launch, prefill_plans.PromptLaunch.run = record, record  # type: ignore[assignment, method-assign]
    try:
        with on_hopper():
            module = in_graphs(hopper_attn) if graph else hopper_attn
            trial = trial_of(Case(queries, keys, **BF16 | (facts or {})), "cpu", module=module)
            attend(trial, trial.batch, trial.query)
    finally:
        Bound.launch, prefill_plans.PromptLaunch.run = launching, running  # type: ignore[method-assign]
    return [name for name in names if name != "_write_kv_kernel"]


def compiled_in_graph(
    queries: list[int], keys: list[int], facts: dict[str, Any] | None = None
) -> list[tuple[str, int, int]]:
    """For each kernel that a graph captures for a mixed batch: its name, registers and spilled bytes."""
    for known in (plans._ATTENTION, _MERGE_SHARES, prefill_plans._PROMPTS, widened._WIDEN, widened._PLACE):
        known._variants.clear()
    plans._launches.cache_clear()
    kernels: list[tuple[str, int, int]] = []
    compile_one = KernelVariant.compile

    def compile_and_read(variant: KernelVariant, *arguments: Any) -> None:
        compile_one(variant, *arguments)
        kernel, _ = list(variant._compiled.values())[-1]
        kernels.append((variant.function.__name__, *report(kernel)[:2]))

    KernelVariant.compile = compile_and_read  # type: ignore[method-assign]
    try:
        with on_hopper():
            trial = trial_of(Case(queries, keys, **BF16 | (facts or {})), "cpu", module=in_graphs(hopper_attn))
            attend(trial, trial.batch, trial.query)
    finally:
        KernelVariant.compile = compile_one  # type: ignore[method-assign]
    return [kernel for kernel in kernels if kernel[0] != "_write_kv_kernel"]


def _compile(name: str) -> Any:
    """The kernel that a case of `CASES` launches for its prompts."""
    prefill_plans._PROMPTS._variants.clear()
    # batches alike share what runs them
    plans._launches.cache_clear()
    beside = Beside(32, 2, 132, True) if name == "mixed in a graph" else None
    hopper_attn.HopperPlan.changes = {"mixed": name.startswith("mixed"), "beside": beside}
    hopper_attn.HopperPlan.splits = 2 if name.startswith("split") else 1
    try:
        _launch(CASES[name])
    finally:
        hopper_attn.HopperPlan.changes, hopper_attn.HopperPlan.splits = {}, None
    ((kernel, _),) = [one for v in prefill_plans._PROMPTS._variants.values() for one in v._compiled.values()]
    return kernel


def compiled(name: str) -> Compiled:
    """What the kernel uses that a case of `CASES` launches for its prompts."""
    kernel = _compile(name)
    registers, spills, serialised = report(kernel)
    text = disassembled(kernel)
    products, loads, stores = (len(re.findall(rf"\b{word}", text)) for word in ("HGMMA", "UTMALDG", "UTMASTG"))
    return Compiled(registers, spills, serialised, kernel.metadata.shared, products, loads, stores)


def handed_back(name: str) -> list[list[str]]:
    """For each warpgroup what it does from its last access to the queries' memory, through which outputs went, until it
    hands it back to the copy engine."""
    access, freed = r"(?:ld|st)\.shared|(?:ld|st)matrix", "mbarrier.arrive.shared"
    steps = re.findall(
        rf"{access}|fence\.proxy\.async|bulk\.wait_group\.read|bar\.sync|{re.escape(freed)}", _compile(name).asm["ptx"]
    )
    found = []
    for i, step in enumerate(steps):
        if step == "bulk.wait_group.read" and steps[i + 1 : i + 3] == ["bar.sync", freed]:
            last = max(j for j in range(i) if re.fullmatch(access, steps[j]))
            found.append(steps[last + 1 : i + 3])
    return found


def waits_of_merge(name: str) -> list[int]:
    """How often each merge of the rows' parts of a case of `CASES` waits for the kernel that makes them."""
    _MERGE._variants.clear()
    _compile(name)
    merges = [variant for variant in _MERGE._variants.values() if variant.code.by_row]
    kernels = [kernel for variant in merges for kernel, _ in variant._compiled.values()]
    return [kernel.asm["ptx"].count("griddepcontrol.wait") for kernel in kernels]


class CompiledDecode(NamedTuple):
    """What one compiled kernel for few queries uses, and how many instructions of some kinds its loop has."""

    registers: int
    spills: int
    products: int
    loads: int
    barriers: int


TOKENS = Case([1] * 8, [3000] * 8, heads=(32, 8), head_size=128, dtype=torch.bfloat16, kv_dtype="fp8")
DECODES = {
    "8 rows": TOKENS,
    "16 rows, e5m2, HND": replace(TOKENS, queries=[4] * 8, kv_dtype="fp8_e5m2", layout="HND", block_size=64),
    "heads of 64, window, sinks": replace(
        TOKENS, heads=(64, 8), head_size=64, window=100, features=frozenset({"sinks"})
    ),
    "heads of 64, 16 rows, softcap": replace(TOKENS, queries=[4] * 8, head_size=64, softcap=20.0),
    "many requests": replace(TOKENS, queries=[1] * 300, keys=[90] * 300),
}


def compiled_decode(name: str, in_graph: bool = False) -> CompiledDecode:
    """What the kernel uses that a case of `DECODES` launches, in a graph for any lengths."""
    kernels = decode_plans._DECODE
    kernels._variants.clear()
    plans._launches.cache_clear()
    with on_hopper():
        trial = trial_of(DECODES[name], "cpu", module=in_graphs(hopper_attn) if in_graph else hopper_attn)
        attend(trial, trial.batch, trial.query)
    return used_by(kernels)


def used_by(kernels: Kernel) -> CompiledDecode:
    """What the one compiled variant of a kernel for few queries uses."""
    (variant,) = kernels._variants.values()
    ((kernel, _),) = variant._compiled.values()
    registers, spills, _ = report(kernel)
    # from a label to the branch back to it
    text = disassembled(kernel)
    loop = max(
        (text[at.start() :].partition(f"BRA `({at[1]})")[0] for at in re.finditer(r"(\.L_x_\d+):", text)
         if f"BRA `({at[1]})" in text[at.start() :]), key=lambda body: body.count("HMMA"),
    )  # fmt: skip
    counts = (len(re.findall(rf"\b{word}\b", loop)) for word in ("HMMA", r"LDG\.E\.128", "BAR"))
    return CompiledDecode(registers, spills, *counts)


def rows_of_decode(queries: list[int], keys: list[int], facts: dict[str, Any]) -> list[tuple[int, int]]:
    """The rows and splits of each launch of the kernel for few queries in a batch of such lengths."""
    seen: list[tuple[int, int]] = []
    planned = decode_plans.planned

    def recorded(*arguments: Any) -> Any:
        launch = planned(*arguments)
        if launch is not None:
            seen.append((launch.variant.code.rows, launch.chosen.splits))
        return launch

    plans._launches.cache_clear()
    decode_plans.planned = recorded
    try:
        with on_hopper():
            trial = trial_of(replace(TOKENS, queries=queries, keys=keys, **facts), "cpu", module=hopper_attn)
            trial.layer.plan(trial.batch)._bind(AttentionTensors(trial.query, *trial.cache, trial.query))
    finally:
        decode_plans.planned = planned
    return seen
