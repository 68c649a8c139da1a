"""HOPPER_ATTN: kernels for SM 9.0 behind the runtime's contract, with TRITON_ATTN's for what they do not compute.

Prompts go to the kernel in `prefill`, few queries over 8-bit floats to the one in `decode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from attnreg.kernels.hopper import decode_plans
from attnreg.kernels.hopper.prefill_plans import prompts_of, takes
from attnreg.kernels.hopper.target import require
from attnreg.kernels.triton.plans import ALIKE, bound_launches
from attnreg.kernels.triton.schedule import SHORT_QUERIES, Launch
from attnreg.kernels.triton.splits import Run
from attnreg.kernels.triton_attn import (
    CAPTURABLE,
    KEYS_APART,
    TritonPlan,
    forward,
    kv_cache_shape,
    repeat,
    run,
    write_kv,
)
from attnreg.runtime.interface import AttentionSpec, BatchMetadata
from attnreg.runtime.lengths import content, queries_of

__all__ = ["CAPTURABLE", "KEYS_APART", "forward", "kv_cache_shape", "plan", "repeat", "run", "write_kv"]

# what the kernels of this package compute
COMPUTED = frozenset(
    ["asymmetric_window", "batch_invariant", "causal_by_request", "kv_connector", "lse", "non_causal",
     "per_head_quant_scales", "sinks", "sliding_window", "softcap"]
)  # fmt: skip


def plan(spec: AttentionSpec, batch: BatchMetadata) -> HopperPlan:
    """The launches for a batch, shared by all layers of this spec, and the slots of the new keys."""
    return HopperPlan(spec, batch)


class HopperPlan(TritonPlan):
    """A plan of TRITON_ATTN, some of whose launches go to kernels for SM 9.0."""

    # constants in place of those that are chosen, and splits of few queries, for measurements
    changes: Mapping[str, Any] = MappingProxyType({})
    splits: int | None = None

    def __init__(self, spec: AttentionSpec, batch: BatchMetadata) -> None:
        """Raises `SpecError` for another GPU."""
        self._num_sms = require(batch.query_start_loc.device).num_sms
        super().__init__(spec, batch)
        self.spec, self.causal, self.starts = spec, batch.causal, batch.query_start_loc_cpu
        # launches for lengths up to the same multiple are shared
        self.max_seq_len = -(-batch.max_seq_len // ALIKE) * ALIKE

    def _bind(self, tensors: tuple[Any, ...]) -> list[Run]:
        runs = super()._bind(tensors)
        for i, planned in enumerate(self.launches):
            own = self._own(planned.chosen, tensors)
            if own is not None:
                runs[i] = _either(own, runs[i])
        return runs

    def _differing(self, key: Tensor, value: Tensor) -> tuple[Any, tuple[int, int]]:
        differing, heads = super()._differing(key, value)
        if any(planned.chosen.max_query_len > SHORT_QUERIES for planned in self.launches):
            # the copy engine is told where rows and heads are
            differing = differing, key.shape, key.stride(), value.shape, value.stride()
        return differing, heads

    def _own(self, launch: Launch, tensors: Sequence[Any]) -> Run | None:
        """What runs a launch by a kernel of this package, None where none can."""
        if not isinstance(self.causal, bool) or not self.spec.features <= COMPUTED:
            return None
        queries = queries_of(content(self.starts)).each
        if launch.max_query_len > SHORT_QUERIES:
            if not takes(self.spec, self.causal, launch, queries, self._num_sms):
                return None
            prompts = prompts_of(self.spec, self.causal, launch, self._numbers, tensors, self.changes)
            return None if prompts is None else prompts.run
        if not self._paged:
            return None
        few = decode_plans.planned(self.spec, self.causal, launch, queries, self.max_seq_len, tensors, self.splits)
        return None if few is None else bound_launches([few], self._numbers, *tensors)[0]


def _either(own: Run, portable: Run) -> Run:
    """Runs a kernel of this package where the call's memory can be addressed by 16 bytes."""

    def run(call: Sequence[Any], batch: Sequence[Any], varying: tuple[Any, ...] | None = None) -> None:
        query, key, value, output, *_ = call
        address = query.data_ptr() | key.data_ptr() | value.data_ptr() | output.data_ptr()
        (portable if address % 16 else own)(call, batch, varying)

    return run
