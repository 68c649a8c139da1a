"""TURBOQUANT/Hopper: attention over a packed KV cache, with a kernel for SM 9.0 for few queries.

The kernel computes heads of 64 and 128, over codes of 3 and 4 bits, and over keys of 8 bits with values of 4. All other
launches are TURBOQUANT/Triton's. Its kernel also stores keys and values, so both backends have the same cache.
"""

from __future__ import annotations

from attnreg.kernels.hopper.packed.plans import HopperPackedPlan
from attnreg.kernels.hopper.target import require
from attnreg.kernels.turboquant.attention import CAPTURABLE, TurboquantPlan, forward, kv_cache_shape, write_kv
from attnreg.runtime.interface import AttentionSpec, BatchMetadata

__all__ = ["CAPTURABLE", "forward", "kv_cache_shape", "plan", "write_kv"]


def plan(spec: AttentionSpec, batch: BatchMetadata) -> HopperTurboquantPlan:
    """The launches for a batch. Raises `SpecError` for other GPUs, and as TURBOQUANT does."""
    require(batch.query_start_loc.device)
    return HopperTurboquantPlan(spec, batch)


class HopperTurboquantPlan(TurboquantPlan):
    """A plan of TURBOQUANT whose launches of few queries go to the kernel for SM 9.0."""

    planned = HopperPackedPlan
