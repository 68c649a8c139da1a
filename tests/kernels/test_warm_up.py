"""Batches for a warm-up launch every kernel that an engine's batches launch, as they would on an H200."""

from __future__ import annotations

import pytest
from support.compilers.compiler import Compiler

USUAL, FEW, MANY = (8192, 256, 32768), (2048, 32, 8192), (8192, 1024, 32768)
NAMES = [
    "HOPPER_ATTN, window", "HOPPER_ATTN, heads of 64", "HOPPER_ATTN, heads of 256", "HOPPER_ATTN, invariant",
    "TRITON_ATTN", "TRITON_ATTN, sinks", "TRITON_ATTN, float32", "TURBOQUANT", "HOPPER_MLA", "TRITON_MLA",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("HOPPER_ATTN", USUAL),
        ("HOPPER_ATTN, fp8", USUAL),
        ("HOPPER_MLA, 16 heads", MANY),
        ("HOPPER_MLA", MANY),
        *((name, FEW) for name in NAMES),
    ],
)
def test_random_batches_launch_what_the_warm_up_launched(
    compiler: Compiler, name: str, bounds: tuple[int, int, int]
) -> None:
    warm, missed = compiler.call("warm_up", "missed", name, *bounds, 300)
    assert missed == []
    # one kernel is no proof
    assert warm > 4
