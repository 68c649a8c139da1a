"""FLASH_ATTN/FA3: FlashAttention 3, from its own package or from vLLM's, behind the runtime's contract.

The library is loaded from its file, so vLLM itself is not imported.
"""

from __future__ import annotations

from attnreg.kernels.flash_attn import record
from attnreg.kernels.flash_attn.builds import FlashBuild
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.runtime.interface import paged_cache_shape

__all__ = ["CAPTURABLE", "forward", "kv_cache_shape", "plan", "repeat", "write_kv"]

BACKEND = "FLASH_ATTN/FA3"
# a graph may capture it: the device reads all lengths. `forward` refuses packed keys, whose padding the host cuts off
CAPTURABLE = True
kv_cache_shape = paged_cache_shape

build = FlashBuild.first(BACKEND, (record.FA3_VLLM.load, record.FA3_OF_VLLM), (record.FA3.load, {}))
plan, forward, repeat = build.plan, build.forward, build.repeat
