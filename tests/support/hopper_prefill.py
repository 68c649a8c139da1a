"""The kernel for prompts of HOPPER_ATTN, compiled as its plans would launch it, on a machine without a GPU.

It is imported by a process that compiles alone (compiler.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from attnreg.conformance.proof import attend
from attnreg.kernels.hopper import attention as hopper_attn
from attnreg.kernels.hopper import prefill_plans
from attnreg.kernels.triton.launch import Bound
from attnreg.kernels.triton.target import target_for
from support.compiled import disassembled, report
from support.fake_driver import faked
from support.kernel_trials import Case, trial_of

LENGTHS = {"queries": [300, 40, 1], "keys": [700, 40, 9]}
BF16 = {"heads": (8, 2), "head_size": 128, "dtype": torch.bfloat16}
PACKED = {"queries": [300, 40], "keys": [300, 40], "block_size": None}
CASES = {
    "paged": Case(**LENGTHS, **BF16),
    "packed": Case(**PACKED, **BF16),
    "full": Case(**PACKED, **BF16, causal=False),
    "window of 64": Case(
        **LENGTHS, heads=(64, 8), head_size=64, dtype=torch.float16, window=100, features=frozenset({"sinks"})
    ),
    "256, softcap": Case(**LENGTHS, **{**BF16, "head_size": 256}, softcap=20.0, layout="HND", block_size=48),
    "96": Case(**LENGTHS, **{**BF16, "head_size": 96}),
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


@contextmanager
def on_hopper() -> Iterator[None]:
    """Plans are made as for an H200, and nothing is launched."""
    target = target_for("cuda", 90, 132)
    target_of, require = prefill_plans.target_of, prefill_plans.require
    prefill_plans.target_of = prefill_plans.require = lambda device: target
    try:
        with faked():
            yield
    finally:
        prefill_plans.target_of, prefill_plans.require = target_of, require


def _launch(case: Case) -> None:
    """Launches what a case does. Its keys are not split."""
    with on_hopper():
        trial = trial_of(case, "cpu", module=hopper_attn, splits=1)
        attend(trial, trial.batch, trial.query)


def launched_for(queries: list[int], keys: list[int], **splits: int) -> list[str]:
    """The attention kernels that a batch of such lengths launches, in order."""
    names: list[str] = []

    def record(bound: Any, *_: Any) -> None:
        names.append(bound.variant.function.__name__ if isinstance(bound, Bound) else "prefill_kernel")

    launching, running = Bound.launch, prefill_plans.Prompts.run
    Bound.launch, prefill_plans.Prompts.run = record, record  # type: ignore[assignment, method-assign]
    try:
        with on_hopper():
            trial = trial_of(Case(queries, keys, **BF16), "cpu", module=hopper_attn, **splits)
            attend(trial, trial.batch, trial.query)
    finally:
        Bound.launch, prefill_plans.Prompts.run = launching, running  # type: ignore[method-assign]
    return [name for name in names if name != "_write_kv_kernel"]


def compiled(name: str) -> Compiled:
    """What the kernel uses that a case of `CASES` launches for its prompts."""
    prefill_plans._compiled.clear()
    _launch(CASES[name])
    (kernel,) = prefill_plans._compiled.values()
    registers, spills, serialised = report(kernel)
    text = disassembled(kernel)
    products, loads, stores = (len(re.findall(rf"\b{word}", text)) for word in ("HGMMA", "UTMALDG", "UTMASTG"))
    return Compiled(registers, spills, serialised, kernel.metadata.shared, products, loads, stores)
