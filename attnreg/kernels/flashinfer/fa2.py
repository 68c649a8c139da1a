"""FLASHINFER/fa2: FlashInfer's own kernels after FlashAttention 2, from Ampere on."""

from __future__ import annotations

from attnreg.kernels.flashinfer.own import Own
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.runtime.interface import paged_cache_shape

__all__ = ["forward", "kv_cache_shape", "plan", "write_kv"]

BACKEND = "FLASHINFER/fa2"
kv_cache_shape = paged_cache_shape
_own = Own.load(BACKEND, "fa2")
plan, forward = _own.plan, _own.forward
