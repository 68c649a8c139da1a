"""HOPPER_ATTN: kernels for SM 9.0 behind the runtime's contract; TRITON_ATTN's kernels compute all else.

The kernel in `prompts` computes prompts, and the one in `decode` few queries over 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from attnreg.kernels.hopper import decode_plans
from attnreg.kernels.hopper.prompts.choices import beside_of, mixes, splits_of
from attnreg.kernels.hopper.prompts.plans import ManyQueries, prompts_of
from attnreg.kernels.hopper.prompts.widened import FORMATS, rows_for, widened_of
from attnreg.kernels.hopper.target import computes, require
from attnreg.kernels.triton.planned.arguments import AttentionBatch, AttentionTensors, HeadStrides
from attnreg.kernels.triton.planned.launches import Run
from attnreg.kernels.triton.plans import bound_launches
from attnreg.kernels.triton.schedule import SHORT_QUERIES, Launch
from attnreg.kernels.triton.splits.beside import Beside
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
from attnreg.runtime.lengths import queries_of

__all__ = ["CAPTURABLE", "KEYS_APART", "forward", "kv_cache_shape", "plan", "repeat", "run", "write_kv"]

# the features of layers that this package's kernels compute
COMPUTED = frozenset(
    ["asymmetric_window", "batch_invariant", "causal_by_request", "kv_connector", "lse", "non_causal",
     "per_head_quant_scales", "sinks", "sliding_window", "softcap"]
)  # fmt: skip


def plan(spec: AttentionSpec, batch: BatchMetadata) -> HopperPlan:
    """The launches for a batch, shared by all layers of this spec, and the slots of the new keys."""
    return HopperPlan(spec, batch)


class HopperPlan(TritonPlan):
    """A plan of TRITON_ATTN, with some of its launches replaced by kernels for SM 9.0."""

    # for measurements: constants and splits to use instead of the chosen ones
    changes: Mapping[str, Any] = MappingProxyType({})
    splits: int | None = None

    def __init__(self, spec: AttentionSpec, batch: BatchMetadata) -> None:
        """Raises `SpecError` for other GPUs."""
        self._num_sms = require(batch.query_start_loc.device).num_sms
        super().__init__(spec, batch)
        self.spec, self.causal = spec, batch.causal
        # the rows of widened keys, and whether one launch computes all requests
        self.rows, self.mixed = 0, False
        prompts = self.launches[-1].chosen if self.launches else None
        if (
            self._paged and computes(batch.causal, spec, COMPUTED)
            and prompts is not None and prompts.max_query_len > SHORT_QUERIES
        ):  # fmt: skip
            keys, many = batch.lengths().keys, self._many()
            if spec.cache_dtype in FORMATS:
                self.rows = rows_for(many, prompts, keys)
            elif (beside := self._beside(max(keys))) is not None:
                self.mixed = mixes(beside, prompts.min_query_len, many.queries, keys)
            self.apart = self.rows, self.mixed

    def _many(self) -> ManyQueries:
        """What the kernels for prompts know of the batch of a layer that this package computes."""
        assert isinstance(self.causal, bool)
        return ManyQueries(self.spec, self.causal, queries_of(self.host).each, self._numbers, self.changes)

    def _bind(self, tensors: AttentionTensors) -> list[Run]:
        runs = super()._bind(tensors)
        for i, planned in enumerate(self.launches):
            own = self._own(planned.chosen, tensors, runs[i])
            if own is not None:
                runs[i] = decode_plans.either(own, runs[i])
        shared = self.launches and self.launches[0].chosen.shared
        beside = self._beside(self.keys.longest) if shared and not self.keys.known else None
        if beside is None and not (self.mixed and self.keys.known):
            return runs
        prompts = self.launches[-1].chosen._replace(splits=1)
        together = prompts_of(self._many(), prompts, tensors, mixed=True, beside=beside)
        if together is None:
            return runs
        few: Sequence[Run] = ()
        if beside is not None:
            # a replay has other lengths: this launch computes few queries where that of prompts does not
            few = bound_launches(self._launches_of(self.keys, beside)[:1], self._numbers, tensors)
        return [decode_plans.either(_in_turn([*few, together.run]), _in_turn(runs))]

    def _beside(self, longest: int) -> Beside | None:
        """The constants by which the launch of prompts may compute few queries too; None if it may not.

        longest: the most keys of a request.
        """
        if not (len(self.launches) == 2 and self._paged and computes(self.causal, self.spec, COMPUTED)):
            return None
        prompts = self.launches[-1].chosen
        if self.spec.cache_dtype in FORMATS or prompts.max_query_len <= SHORT_QUERIES:
            return None
        many = self._many()
        return beside_of(self.spec, many.causal, prompts, many.queries, longest, self._num_sms)

    def _differing(self, key: Tensor, value: Tensor) -> tuple[Any, HeadStrides]:
        differing, heads = super()._differing(key, value)
        if any(planned.chosen.max_query_len > SHORT_QUERIES for planned in self.launches):
            # the copy engine needs to know where rows and heads are
            differing = differing, key.shape, key.stride(), value.shape, value.stride()
        return differing, heads

    def _own(self, launch: Launch, tensors: AttentionTensors, portable: Run) -> Run | None:
        """What runs a launch by a kernel of this package, None where none can. portable: what else runs it."""
        if not computes(self.causal, self.spec, COMPUTED):
            return None
        many = self._many()
        if launch.max_query_len > SHORT_QUERIES:
            splits = splits_of(self.spec, self.causal, launch, many.queries, self.keys.longest, self._num_sms)
            if not splits:
                return None
            launch = launch._replace(splits=splits if self.splits is None else self.splits)
            if self.rows:
                wide = widened_of(many, launch, self.rows, self.keys, tensors)
                return None if wide is None else wide.run_or(portable)
            prompts = prompts_of(many, launch, tensors)
            return None if prompts is None else prompts.run
        if not self._paged:
            return None
        device = tensors.query.device
        few = decode_plans.FewQueries(self.spec, self.causal, many.queries, self.keys, device, self.splits)
        planned = decode_plans.planned(few, launch, tensors)
        return None if planned is None else bound_launches([planned], self._numbers, tensors)[0]


def _in_turn(runs: Sequence[Run]) -> Run:
    """Runs several launches, one after the other."""

    def run(call: AttentionTensors, batch: AttentionBatch, varying: tuple[Any, ...] | None = None) -> None:
        for each in runs:
            each(call, batch, varying)

    return run
