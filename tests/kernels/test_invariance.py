"""A batch_invariant layer gives a request the same bits in every batch, by the schedule of every target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.compilers.compiling import TARGETS
from support.layers.kernel_trials import Case, KernelLayer, trial_of
from torch import Tensor

from attnreg.conformance.proof import attend, examine
from attnreg.kernels import torch_sdpa, triton_attn
from attnreg.kernels.triton import plans, schedule
from attnreg.kernels.triton.target import Target, target_for
from attnreg.kernels.triton.tiles import Shape
from attnreg.runtime.lengths import prefix_sums

INVARIANT = frozenset({"batch_invariant"})
# in every class of query lengths a request alone, and beside longer ones of its class
QUERIES, KEYS = [1, 2, 16, 30, 40], [1100, 5, 40, 90, 47]
TRIALS = [
    *((target, (2, 2), None) for target in TARGETS), ("gfx942", (2, 2), 40), ("gfx1100", (4, 1), 40),
    ("sm90", (4, 1), 40),
]  # fmt: skip


def named(name: str) -> Target:
    backend, arch = ("cuda", int(name[2:])) if name.startswith("sm") else ("hip", name)
    return target_for(backend, arch, 132)


@pytest.fixture
def schedule_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Have plans launch what a target would; the kernels are those of the machine."""

    def plan_for(name: str) -> None:
        target = named(name)
        monkeypatch.setattr(plans, "schedule", lambda _, *args, **more: schedule.schedule(target, *args, **more))

    # launches are kept by the machine's target: those that another test planned would be found
    plans._launches.cache_clear()
    yield plan_for
    plans._launches.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs its own schedule: tests/gpu")
@pytest.mark.parametrize(("target", "heads", "window"), TRIALS)
def test_a_request_alone_gets_the_same_bits(
    target: str, heads: tuple[int, int], window: int | None, schedule_of: Callable[[str], None]
) -> None:
    schedule_of(target)
    # a trial of such a layer runs each request alone too
    case = Case(QUERIES, KEYS, heads=heads, window=window, features=INVARIANT)
    assert examine(trial_of(case, "cpu")).problem is None


# what the host knows of the batch: its queries, and bounds of its keys and queries, as of a dummy batch of a graph too
KNOWN = {"bounds": ([1, 2, 16, 30], 57), "a graph's dummy": ([1, 1, 1, 1], 64), "of longer ones": ([40, 24, 0, 0], 40)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs its own schedule: tests/gpu")
@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_what_the_host_knows_changes_no_bits(target: str, known: str, schedule_of: Callable[[str], None]) -> None:
    schedule_of(target)
    trial = trial_of(Case([1, 2, 16, 30], [1100, 5, 40, 90], heads=(2, 2), features=INVARIANT), "cpu")
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    queries, longest = KNOWN[known]
    most = trial.batch.block_table.shape[1] * trial.layer.spec.block_size
    other = replace(
        trial.batch, query_start_loc_cpu=torch.tensor(prefix_sums(queries), dtype=torch.int32),
        seq_lens_cpu=torch.full_like(trial.batch.seq_lens_cpu, most), max_seq_len=most, max_query_len=longest,
    )  # fmt: skip
    exact, found = (attend(trial, batch, trial.query)[0] for batch in (trial.batch, other))
    assert torch.equal(exact[:49], found[:49])


# what some batches of a layer bring and others do not, such that it says nothing: layer, causality, what is brought
SILENT: dict[str, tuple[dict[str, Any], bool, Callable[[int], dict[str, Tensor]]]] = {
    "causality by request": ({"softcap": 5.0, "features": {"causal_by_request"}}, True,
                             lambda tokens: {"causal": torch.ones(4, dtype=torch.bool)}),
    "none by request, in a window": ({"window": (64, 30), "features": {"causal_by_request"}}, False,
                                     lambda tokens: {"causal": torch.zeros(4, dtype=torch.bool)}),
    "all by request, in a window": ({"window": (64, 30), "features": {"causal_by_request"}}, True,
                                    lambda tokens: {"causal": torch.ones(4, dtype=torch.bool)}),
    "empty ranges": ({"window": 64, "features": {"mm_prefix"}}, True,
                     lambda tokens: {"mm_prefix": torch.zeros(4, 2, 2, dtype=torch.int32)}),
    "chains as trees": ({"features": {"tree_mask"}}, True,
                        lambda tokens: {"tree_mask": torch.ones(tokens, 30, dtype=torch.bool)}),
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs its own schedule: tests/gpu")
@pytest.mark.parametrize("brought", SILENT)
@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_what_a_batch_brings_without_effect_changes_no_bits(
    target: str, brought: str, schedule_of: Callable[[str], None]
) -> None:
    schedule_of(target)
    _holds_whatever_is_brought(brought)


@pytest.mark.parametrize("brought", [name for name in SILENT if name != "chains as trees"])
def test_nor_does_it_where_calls_are_dense(brought: str) -> None:
    _holds_whatever_is_brought(brought, torch_sdpa, torch.float32)


def _holds_whatever_is_brought(brought: str, module: Any = triton_attn, dtype: torch.dtype = torch.float16) -> None:
    layer, causal, bring = SILENT[brought]
    layer = layer | {"features": INVARIANT | layer["features"], "dtype": dtype}
    trial = trial_of(Case([1, 2, 16, 30], [1100, 5, 40, 90], heads=(2, 2), causal=causal, **layer), "cpu")
    trial = replace(trial, layer=KernelLayer(trial.layer.spec, trial.layer.params, module))
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    without = replace(trial.batch, **dict.fromkeys(("mm_prefix", "tree_mask")))
    plain, found = (attend(trial, one, trial.query)[0] for one in (without, replace(without, **bring(49))))
    assert torch.equal(plain[:49], found[:49])


def launches(target: Target, shape: Shape, query_lens: list[int], max_seq_len: int) -> list[Any]:
    keys = schedule.KeyLengths.alike(max_seq_len)
    return schedule.schedule(
        target, shape, query_lens, num_kv_heads=8, max_query_len=max(query_lens), keys=keys, batch_invariant=True
    )


@pytest.mark.parametrize("group", [1, 4, 71])
@pytest.mark.parametrize("target", TARGETS)
def test_the_tile_of_a_request_depends_on_its_own_length(target: str, group: int) -> None:
    shape = Shape(0, False, group, 128, 128, 2, 2, True, False, 0, False)
    of = partial(launches, named(target), shape)
    beside = of([1, 2, 16, 17, 33, 100, 3000], 131_072)
    for queries in (1, 2, 5, 16, 17, 24, 32, 33, 64, 100, 3000):
        (alone,) = (one for one in of([queries], 131_072) if one.min_query_len <= queries <= one.max_query_len)
        (together,) = (one for one in beside if one.min_query_len <= queries <= one.max_query_len)
        same = ("config", "heads", "splits", "min_split")
        assert [getattr(alone, name) for name in same] == [getattr(together, name) for name in same]


@pytest.mark.parametrize("window", [0, 100, 2047, 5000, 40_000])
@pytest.mark.parametrize("length", [1, 1024, 1025, 2048, 8192, 8193, 32_768, 40_000, 131_072])
def test_keys_are_cut_alike_whatever_the_longest_request_is(length: int, window: int) -> None:
    shape = Shape(0, False, 4, 128, 128, 2, 2, True, False, window, False)
    tile = 64
    # the most keys that a tile of up to 16 queries walks, from the begin of a tile of keys on
    span = min(length, window + 15 + tile) if window else length

    def share(one: Any) -> int:
        return -(-max(-(-span // one.splits), one.min_split) // tile) * tile

    for queries in (1, 16):
        shares = set()
        for longest in (length, length + 1, 2 * length, 10**6):
            for others in ([], [1], [16], [1, 16, 400]):
                chosen = launches(named("sm90"), shape, [queries, *others], longest)
                shares |= {share(one) for one in chosen if one.min_query_len <= queries <= one.max_query_len}
        assert len(shares) == 1
