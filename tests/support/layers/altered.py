"""CPU_ATTN with faults, for tests of the proof."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from attnreg.kernels import cpu_attn
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCache, LayerParams


def altered(**changes: Any) -> Any:
    """A kernel module: CPU_ATTN with some of its arguments changed.

    ``changes`` maps an argument (spec, batch, slots, params, kv_cache) to the function that replaces it. ``written``
    and ``after`` are called after a cache write and after a forward.
    """

    def changed(name: str, value: Any) -> Any:
        return changes[name](value) if name in changes else value

    def plan(spec: AttentionSpec, batch: BatchMetadata) -> Any:
        return cpu_attn.plan(changed("spec", spec), changed("batch", batch)), batch

    def write_kv(spec: Any, plan: Any, key: Tensor, value: Tensor, kv_cache: KVCache, *, params: LayerParams) -> None:
        cpu_attn.write_kv(spec, cpu_attn.plan(spec, changed("slots", plan[1])), key, value, kv_cache, params=params)
        changes.get("written", lambda *_: None)(plan[1], key, kv_cache)

    def forward(spec: Any, plan: Any, call: Call) -> None:
        call = call._replace(kv_cache=changed("kv_cache", call.kv_cache), params=changed("params", call.params))
        cpu_attn.forward(changed("spec", spec), plan[0], call)
        changes.get("after", lambda *_: None)(plan[1], call.output, call.lse, call.kv_cache)

    module = ModuleType("altered")
    vars(module).update(kv_cache_shape=cpu_attn.kv_cache_shape, plan=plan, write_kv=write_kv, forward=forward)
    return module


def burst(*_: Any) -> None:
    """A part of a kernel module that raises, as a kernel does that needs too much of the device."""
    raise RuntimeError("out of shared memory")
