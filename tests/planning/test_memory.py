"""The memory of a run: which layers a stage has, the bytes of a token, and what fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnreg
from attnreg.errors import Location
from attnreg.language.engine.runs import MemoryRules, StageRules
from attnreg.planning.memory import CacheOfLayers, Room, fit_of, stages_of

HERE = Location("steps.yaml", 1, 1)


def before_last(layers: int, stages: int) -> list[int]:
    """The sizes of the stages as vLLM's `get_pp_indices` has them."""
    sizes = [layers // stages] * stages
    for i in range(2, layers % stages + 2):
        sizes[-i] += 1
    return sizes


@given(layers=st.integers(1, 200), data=st.data())
def test_the_stages_share_out_the_layers_as_the_engines_do(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    split = StageRules("before_last", HERE).split(layers, stages)
    assert [len(part) for part in split] == before_last(layers, stages)
    assert [i for part in split for i in part] == list(range(layers))
    last = [len(part) for part in StageRules("last", HERE).split(layers, stages)]
    assert last == sorted(last)
    assert sum(last) == layers
    assert last[-1] - last[0] <= 1


@pytest.mark.parametrize(("release", "spare"), [("vllm-0.33.0", "before_last"), ("vllm-0.24.0", "before_last")])
def test_the_engines_say_how_they_share_out_layers(release: str, spare: str) -> None:
    registry = attnreg.load_registry(release)
    assert registry.stages is not None
    assert registry.memory is not None
    assert (registry.stages.spare, registry.memory.share) == (spare, 0.92)


def test_a_stage_counts_its_own_layers_and_the_last_one_the_drafts() -> None:
    full = CacheOfLayers((0, 2), False, 100)
    window = CacheOfLayers((1, 3), False, 10, keeps=4)
    draft = CacheOfLayers((0,), True, 1000)
    first, last = stages_of([full, window, draft], [(0, 1), (2, 3)], dcp=1)
    assert (first.bytes_per_token, first.layers, first.draft_layers) == (110, (0, 1), ())
    assert (last.bytes_per_token, last.layers, last.draft_layers) == (1110, (2, 3), (0,))
    # the window keeps the latest four tokens
    assert (first.later_bytes, first.keeps) == (100, 4)
    assert first.words == "110 B a token, 100 B after 4 tokens"
    # at which token of a request a rank's window is full is the engine's matter
    [halves] = stages_of([full, window], [(0, 1, 2, 3)], dcp=2)
    assert (halves.at_least, halves.later_bytes, halves.words) == (110, None, "110 B a token")
    [plain] = stages_of([full], [(0, 2)], dcp=1)
    assert (plain.later_bytes, plain.keeps, plain.words) == (None, None, "200 B a token")


def test_what_grows_behind_a_window_is_counted() -> None:
    """DeepSeek V4 keeps a key for each few tokens beside its window."""
    [stage] = stages_of([CacheOfLayers((0, 1), False, 100, keeps=128, compress=4)], [(0, 1)], dcp=1)
    assert stage.words == "200 B a token, 50 B after 128 tokens"
    unknown = CacheOfLayers((2,), False, None)
    [partly] = stages_of([CacheOfLayers((0,), False, 100, keeps=8), unknown], [(0, 1, 2)], dcp=1)
    assert partly.words == "at least 100 B a token"
    [alone] = stages_of([CacheOfLayers((0,), False, 100, keeps=8)], [(0,)], dcp=1)
    assert alone.words == "100 B a token, 0 B after 8 tokens"


def test_what_is_not_known_is_no_number() -> None:
    known, unknown = CacheOfLayers((0,), False, 100), CacheOfLayers((1,), False, None)
    one, both = stages_of([known, unknown], [(0,), (0, 1)], dcp=1)
    assert (one.bytes_per_token, both.bytes_per_token, both.at_least) == (100, None, 100)
    assert both.words == "at least 100 B a token"
    [nothing] = stages_of([unknown], [(1,)], dcp=1)
    assert nothing.words == "not known"
    # whether an engine shares out a draft's tokens over the ranks of dcp is not known
    [shared] = stages_of([known, CacheOfLayers((0,), True, 10)], [(0,)], dcp=2)
    assert (shared.bytes_per_token, shared.at_least) == (None, 55)


@given(
    share=st.floats(0.1, 1),
    weights=st.integers(1, 5_000),
    workspace=st.integers(0, 500),
    length=st.integers(1, 64),
    page=st.sampled_from([1, 4, 16]),
    dcp=st.sampled_from([1, 2, 3]),
    layers=st.lists(
        st.builds(
            CacheOfLayers,
            st.lists(st.integers(0, 5), min_size=1, unique=True).map(tuple),
            st.booleans(),
            st.sampled_from([None, 0, 1, 7]),
            st.sampled_from([None, 3, 8]),
            st.sampled_from([None, 2]),
            st.sampled_from([None, 0, 5]),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_what_fits_is_the_most_that_fits(share, weights, workspace, length, page, dcp, layers) -> None:
    split = [(0, 1, 2), (3, 4, 5)]
    rules = MemoryRules(share, "--x", HERE)
    fit = fit_of(Room(10_000, weights), rules, layers, split, workspace, length, page=page, dcp=dcp)
    assert fit.cache_bytes == int(10_000 * share) - weights - workspace
    assert fit.where == HERE

    def needed(tokens: int) -> int:
        own = -(-tokens // dcp)
        loads = []
        for stage, indices in enumerate(split):
            count = [len(c.layers) * stage if c.draft else len({*c.layers} & {*indices}) for c in layers]
            loads.append(sum(c.at_least(own, page) * n for c, n in zip(layers, count, strict=True)))
        return max(loads)

    assert fit.request_bytes == needed(length)
    if not needed(length):
        assert fit.requests is None
        return
    assert fit.requests is not None
    assert fit.requests * needed(length) <= max(fit.cache_bytes, 0) < (fit.requests + 1) * needed(length)
    if fit.tokens is not None:
        assert fit.tokens == 0 or needed(fit.tokens) <= fit.cache_bytes
        assert needed(fit.tokens + 1) > fit.cache_bytes


def test_the_users_share_replaces_the_engines() -> None:
    cache = [CacheOfLayers((0,), False, 1)]
    fit = fit_of(Room(1000, 100, 0.5), MemoryRules(0.9, "--x", HERE), cache, [(0,)], 0, 10)
    assert (fit.cache_bytes, fit.where, fit.tokens, fit.requests) == (400, None, 400, 40)
