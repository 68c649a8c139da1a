"""Plans as captured graphs use them: made for a dummy batch, run again with any other lengths within its bounds.

In Triton's interpreter a plan that is run again stands for the replay of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.layers.kernel_trials import Case, trial_of

from attnreg.conformance.proof import attend, compare
from attnreg.conformance.trial import Trial
from attnreg.kernels.triton.splits.merge import PlannedMerge
from attnreg.runtime.interface import BatchMetadata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# numpy, in the interpreter, warns of the NaN that the tests plant in rows that are masked
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window and sinks": {"window": 30, "features": frozenset({"sinks"})},
    "fp8": {"kv_dtype": "fp8", "features": frozenset({"per_head_quant_scales"})},
    "invariant": {"features": frozenset({"batch_invariant"})},
    "multi-head": {"heads": (2, 2)},
    "SPLIT": {"layout": "SPLIT"},
}


def planned_for(dummy: Sequence[int], bound: int, trial: Trial) -> BatchMetadata:
    """The batch of a trial as the host knew it when a graph was captured: other queries, keys up to the bound."""
    starts = torch.tensor([0, *torch.tensor(dummy).cumsum(0)], dtype=torch.int32)
    keys = torch.full((len(dummy),), trial.batch.max_seq_len, dtype=torch.int32)
    return replace(trial.batch, query_start_loc_cpu=starts, seq_lens_cpu=keys, max_query_len=bound)


DUMMIES = [([1] * 6, 64), ([40, 0, 0, 0, 0, 0], 40), ([24, 2, 1, 0, 1, 3], 24), ([16] * 6, 20), ([0] * 6, 33)]


@pytest.mark.parametrize(
    ("name", "dummy", "bound"),
    [*(("plain", *one) for one in DUMMIES), *((name, *DUMMIES[0]) for name in CASES if name != "plain")],
    ids=str,
)
def test_every_row_is_written_whatever_the_lengths_are(name: str, dummy: list[int], bound: int) -> None:
    # totals of at most the dummy's rows, and of more where the tensors have more
    case = Case([1, min(17, bound), 0, 2, 0, 1], [300, 33, 7, 2, 0, 0], **CASES[name])
    trial = trial_of(replace(case, queries=[*case.queries[:5], 0]), DEVICE)
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    batch = planned_for(dummy, bound, trial)
    assert compare(trial, *attend(trial, batch, trial.query)).problem is None
    # the last request is padding: a query without a key
    queries = torch.tensor([0, 1, 1 + min(16, bound), 1 + min(16, bound), 3 + min(16, bound), 3 + min(16, bound)])
    starts = torch.cat([queries, queries[-1:] + 1]).int()
    trial.batch.query_start_loc.copy_(starts)
    assert compare(trial, *attend(trial, batch, trial.query)).problem is None


def test_no_two_runs_share_the_memory_that_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_of(Case([1, 1], [900, 700], heads=(1, 1)), DEVICE)
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    made: list[torch.Tensor] = []
    parts = PlannedMerge.parts

    def kept(query: torch.Tensor, elements: int, sums: int) -> Any:
        given = parts(query, elements, sums)
        made.append(given.memory)
        return given

    monkeypatch.setattr(PlannedMerge, "parts", staticmethod(kept))
    for _ in range(2):
        attend(trial, trial.batch, trial.query)
    # an output and a sum for each part, together
    assert len(made) == 2
    assert len({part.data_ptr() for part in made}) == 2
    ends = sorted((x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes()) for x in made)
    assert ends[0][1] <= ends[1][0]


def test_parts_take_memory_for_the_rows_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # one long request among many short ones: parts by row, not slots of the longest for each
    trial = trial_of(Case([1] * 20 + [40], [1] * 20 + [900], heads=(1, 1)), DEVICE)
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    sizes: list[int] = []
    parts, plan = PlannedMerge.parts, trial.layer.plan(trial.batch)
    merges = [one.merge for one in plan.launches if one.merge is not None]

    def counted(query: torch.Tensor, elements: int, sums: int) -> Any:
        merge = merges[len(sizes)]
        sizes.append(sums // (merge.num_heads * merge.splits))
        return parts(query, elements, sums)

    monkeypatch.setattr(PlannedMerge, "parts", staticmethod(counted))
    assert compare(trial, *attend(trial, trial.batch, trial.query)).problem is None
    assert sizes
    assert max(sizes) <= len(trial.query)
