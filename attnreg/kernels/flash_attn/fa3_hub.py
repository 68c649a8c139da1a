"""FLASH_ATTN/FA3-hub: FlashAttention 3 as the kernel hub builds it, from the cache of the hub alone.

Not run on a GPU yet.
"""

from __future__ import annotations

from attnreg.kernels.flash_attn import hub, record
from attnreg.kernels.flash_attn.builds import Build
from attnreg.kernels.triton.cache import write_new_kv as write_kv
from attnreg.kernels.upstream import UpstreamError
from attnreg.runtime.interface import paged_cache_shape

__all__ = ["CAPTURABLE", "forward", "kv_cache_shape", "plan", "repeat", "write_kv"]

BACKEND = "FLASH_ATTN/FA3-hub"
CAPTURABLE = True
kv_cache_shape = paged_cache_shape


def _loaded() -> Build:
    """The first kernel of the hub's that is in the cache: vLLM's build has sinks."""
    try:
        return Build(BACKEND, hub.operator(record.HUB_VLLM_FA3, record.FA3_VLLM), record.FA3_OF_VLLM)
    except UpstreamError as e:
        try:
            return Build(BACKEND, hub.operator(record.HUB_FA3, record.FA3), {})
        except UpstreamError as other:
            raise UpstreamError(f"{e}; {other}") from other


build = _loaded()
plan, forward, repeat = build.plan, build.forward, build.repeat
