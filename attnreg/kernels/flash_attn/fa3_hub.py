"""FLASH_ATTN/FA3-hub: FlashAttention 3 as the kernel hub builds it, from the cache of the hub alone.

Not run on a GPU yet.
"""

from __future__ import annotations

from functools import partial

from attnreg.kernels.flash_attn import hub, record
from attnreg.kernels.flash_attn.builds import FlashBuild
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.runtime.interface import paged_cache_shape

__all__ = ["CAPTURABLE", "forward", "kv_cache_shape", "plan", "repeat", "write_kv"]

BACKEND = "FLASH_ATTN/FA3-hub"
CAPTURABLE = True
kv_cache_shape = paged_cache_shape

# vLLM's build first: it has sinks
build = FlashBuild.first(
    BACKEND,
    (partial(hub.operator, record.HUB_VLLM_FA3, record.FA3_VLLM), record.FA3_OF_VLLM),
    (partial(hub.operator, record.HUB_FA3, record.FA3), {}),
)
plan, forward, repeat = build.plan, build.forward, build.repeat
