# mypy: disable-error-code="import-untyped"
"""A planned launch, which has no tensors, and the launches that batches with equal facts share.

The Triton kernels, those of MLA and those for SM 9.0 plan with these. Each family brings its kernel's code, and three
named tuples: a `VariantKey` (the facts about a call's tensors that the code depends on), its tensors and its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from attnreg.kernels.triton.launch import Kept, Kernel, KernelCode
from attnreg.kernels.triton.schedule import Launch, Shares
from attnreg.kernels.triton.splits.merge import MergeKey, Parts, PlannedMerge
from attnreg.runtime.interface import AttentionSpec
from attnreg.runtime.tensors import Kinds

# runs a launch. Arguments: the tensors of a call and those of a batch, two named tuples; and the numbers that differ
# between calls of one kind, or None
Run = Callable[..., None]
# the `MergedTensors` of a call's tensors
Merged = Callable[[Any], tuple[Any, ...]]
_NO_PARTS = Parts(None, None)


class VariantKey(Hashable, Protocol):
    """The facts about a call's tensors that a kernel's code depends on: strides, and which tensors are not given."""

    @property
    def merge_key(self) -> MergeKey:
        """The facts that the merge of split keys depends on."""


class Merging(NamedTuple):
    """How the parts of a launch's keys are merged.

    tensors: takes the merge's tensors from a call's. block_dv: the columns of a tile. dependent: the merge is set up
    while the launch before it runs. shares: given if the launch's programs share keys out.
    """

    tensors: Merged
    block_dv: int
    dependent: bool
    shares: Shares | None


class PlannedLaunch:
    """One launch of an attention kernel, without tensors, and the merge if its keys are split.

    The kernel's pointers are those of a call's tensors, of a batch's and of `Parts`, in this order.
    """

    def __init__(
        self, spec: AttentionSpec, chosen: Launch, requests: int, device: torch.device, kernel: Kernel,
        code: KernelCode, merging: Merging,
    ) -> None:  # fmt: skip
        self.chosen, self.requests = chosen, requests
        self.variant, self.merged = kernel.variant(device, code), merging.tensors
        # the programs of a tile's queries for a KV head: each computes as many heads as fit a tile
        head_tiles = -(-spec.num_heads // (spec.num_kv_heads * chosen.heads))
        self.programs = spec.num_kv_heads * head_tiles
        # each kernel takes the ones it has parameters for
        self.numbers = {
            "min_query_len": chosen.min_query_len,
            "max_query_len": chosen.max_query_len,
            "min_split": chosen.min_split,
            "programs_at_once": chosen.kv_heads_at_once * head_tiles,
            "head_size": spec.head_size,
            "rank": spec.head_size_v,
            "softmax_scale": spec.softmax_scale,
            "softcap": spec.softcap or 0.0,
        }
        self.merge: PlannedMerge | None = None
        if chosen.splits > 1 or chosen.shared:
            block_dv, dependent, shares = merging.block_dv, merging.dependent, merging.shares
            self.merge = PlannedMerge(spec, chosen, block_dv, requests, device, dependent, shares)

    def bind(self, key: VariantKey, rows: int, numbers: Mapping[str, Any]) -> Run:
        """The function that computes this launch's requests, for calls of ``rows`` queries, padding included.

        numbers: of the batch and the call. The grid has the most tiles that any lengths can fill with these rows: a
        captured graph may be replayed with any lengths within the bounds.
        """
        grid = (self.chosen.tiles(self.requests, rows) * self.programs, self.chosen.splits, 1)
        numbers = {**numbers, **self.numbers}
        if self.merge is not None:
            return self._bind_split(self.merge, key, rows, grid, numbers)
        bound = self.variant.bind(key, grid, {**numbers, "slots": 0})

        def run(call: Any, batch: Any, varying: tuple[Any, ...] | None = None) -> None:
            bound.launch(call + batch + _NO_PARTS, None, None if varying is None else bound.given(varying))

        return run

    def _bind_split(
        self, merge: PlannedMerge, key: VariantKey, rows: int, grid: tuple[int, int, int], numbers: Mapping[str, Any]
    ) -> Run:
        """The function that runs the kernel and then the merge."""
        second, slots, elements, sums = merge.bind(key.merge_key, rows, numbers)
        first = self.variant.bind(key, grid, {**numbers, "slots": slots})
        merged, shared = self.merged, merge.shares is not None

        def run(call: Any, batch: Any, varying: tuple[Any, ...] | None = None) -> None:
            parts = merge.parts(call.query, elements, sums)
            first.launch(call + batch, parts, None if varying is None else first.given(varying))
            lengths = (batch.query_start_loc, batch.seq_lens) if shared else (batch.query_start_loc,)
            second.launch(merged(call) + lengths, parts)

        return run


class Launches(tuple[PlannedLaunch, ...]):
    """The launches that batches with equal facts share, with the functions that run them.

    kinds: the kinds of calls seen. runs: the facts of a plan and a call, beside the batch's -> one function a launch.
    """

    kinds: Kinds
    runs: Kept[list[Run]]

    def __init__(self, planned: Any = ()) -> None:
        self.kinds, self.runs = Kinds(), Kept()

    def bound(self, key: VariantKey, rows: int, batch: NamedTuple, stride_lse: int) -> list[Run]:
        """One function a launch, for calls with these facts; batch: the batch's numbers."""

        def bind() -> list[Run]:
            numbers = {**batch._asdict(), "stride_lse": stride_lse}
            return [planned.bind(key, rows, numbers) for planned in self]

        return self.runs.of((key, rows, batch, stride_lse), bind)
