"""HOPPER_ATTN: kernels for SM 9.0 behind the runtime's contract, with TRITON_ATTN's for what they do not compute."""

from __future__ import annotations

from attnreg.kernels.hopper.prefill_plans import HopperPlan
from attnreg.kernels.triton_attn import CAPTURABLE, KEYS_APART, forward, kv_cache_shape, repeat, run, write_kv
from attnreg.runtime.interface import AttentionSpec, BatchMetadata

__all__ = ["CAPTURABLE", "KEYS_APART", "forward", "kv_cache_shape", "plan", "repeat", "run", "write_kv"]


def plan(spec: AttentionSpec, batch: BatchMetadata) -> HopperPlan:
    """The launches for a batch, shared by all layers of this spec, and the slots of the new keys."""
    return HopperPlan(spec, batch)
