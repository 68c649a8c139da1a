"""The plan of a batch: its launches, made once for all layers of a spec and run once per layer.

A plan has no memory of its own. Each run allocates the parts of split keys on the stream of the call. So two streams,
layers or graphs never share parts, and a captured graph has its parts in its own pool.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Self, TypeVar

from attnreg.kernels.triton.planned.launches import Launches, Run
from attnreg.kernels.triton.schedule import KeyLengths
from attnreg.runtime.interface import BatchMetadata, Call
from attnreg.runtime.tensors import is_captured

LaunchesT = TypeVar("LaunchesT", bound=Launches)


class BatchPlan(ABC, Generic[LaunchesT]):
    """The launches that compute attention for a batch, for all layers of one spec.

    A plan holds the batch's tensors but not the batch: the batch holds the plan. ``host``: the prefix sums of the
    batch's queries, as int32. ``keys``: the keys of its requests, as far as launches depend on them.
    """

    launches: LaunchesT
    # a named tuple: a kernel's pointers to the batch
    _tensors: Any
    # whether the batch's tensors are prepared for each run
    _masked = False
    # whether a replayed graph may have other lengths than the batch
    _replayed = True
    _for_graphs: Self | None = None
    # the last call's kind, functions and varying numbers: the next layer's call is mostly of the same kind
    _recent: tuple[object, Sequence[Run], tuple[Any, ...] | None] = (None, (), None)

    def __init__(self, batch: BatchMetadata) -> None:
        lengths = batch.lengths()
        self.host, self.keys = lengths.starts, KeyLengths.of(batch.max_seq_len, lengths)

    def run(self, call: Call) -> None:
        """Writes the output, and the lse, of every query of the batch."""
        plan = self.for_graphs() if is_captured(call.query) and self._replayed else self
        runs, tensors, varying = plan._prepared(call)
        batch = self._batch() if self._masked else self._tensors
        for run in runs:
            run(tensors, batch, varying)

    def for_graphs(self) -> Self:
        """The plan that a graph captures: its launches are for any lengths, which differ from replay to replay."""
        if self._for_graphs is None:
            self._for_graphs = plan = copy.copy(self)
            plan.keys = KeyLengths.any_of(self.keys.longest)
            plan.launches = self._launches_of(plan.keys)
            plan._recent = (None, (), None)
        return self._for_graphs

    @abstractmethod
    def _launches_of(self, keys: KeyLengths) -> LaunchesT:
        """The launches for requests of these keys."""

    @abstractmethod
    def _prepared(self, call: Call) -> tuple[Sequence[Run], Any, tuple[Any, ...] | None]:
        """For a call: the functions that run its launches, its tensors, and the varying numbers (`HeadStrides`) if any.

        The tensors are a named tuple in the order of the kernel's pointers.
        """

    def _batch(self) -> Any:
        """The tensors of the batch as a run needs them now."""
        return self._tensors
