"""HOPPER_ATTN on a GPU of SM 9.0: its kernel for prompts against float64, with poison around all that it reads.

Keys are not split where nothing else is said, so that every request of more than 16 queries is the kernel's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.layers.kernel_trials import Case, check, trial_of

from attnreg.conformance.proof import attend, compare
from attnreg.runtime.interface import Call, Layout

if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    from attnreg.kernels.hopper import attention as hopper_attn
    from attnreg.kernels.hopper.prompts import choices, counters, widened
    from attnreg.kernels.hopper.prompts import plans as prefill_plans
    from attnreg.kernels.hopper.prompts.plans import PromptLaunch
    from attnreg.kernels.triton import plans
    from attnreg.kernels.triton.splits.beside import Beside
else:
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

PAGED = Case([1, 300, 0, 17, 129, 64], [3000, 700, 50, 17, 1029, 64], heads=(8, 2), head_size=128, dtype=torch.bfloat16)
FP8 = replace(PAGED, kv_dtype="fp8")
PACKED = replace(PAGED, queries=[300, 17, 129, 64, 1], keys=[300, 17, 129, 64, 1], block_size=None)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PromptLaunch]]:
    """The launches of the kernel during a test, which takes tiles of small heads however few they are.

    Each leaves its counters zero, which the launch after it begins with.
    """
    monkeypatch.setattr(choices, "SEVERAL", 0)
    monkeypatch.setattr(widened, "FEWEST_TILES", 0)
    plans._launches.cache_clear()
    seen: list[PromptLaunch] = []
    run = PromptLaunch.run

    def counted(prompts: PromptLaunch, *arguments: object) -> None:
        seen.append(prompts)
        run(prompts, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PromptLaunch, "run", counted)
    yield seen
    torch.cuda.synchronize()
    assert not any(places.numbers.any() for places in counters._counters.values())


def verify(case: Case, launches: list[PromptLaunch]) -> None:
    check(case, "cuda", module=hopper_attn, splits=1)
    assert launches


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", [PAGED, PACKED], ids=["paged", "packed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256])
def test_head_sizes(head_size: int, dtype: torch.dtype, case: Case, causal: bool, launches: list[PromptLaunch]) -> None:
    verify(replace(case, head_size=head_size, dtype=dtype, causal=causal), launches)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", [PAGED, PACKED], ids=["paged", "packed"])
@pytest.mark.parametrize(
    "sizes",
    [(192, 128), (256, 64), (128, 64), (128, 80), (96, 64), (256, 192), (256, 96), (64, 256), (192, 256), (128, 192)],
)
def test_values_narrower_than_keys(
    sizes: tuple[int, int], case: Case, causal: bool, launches: list[PromptLaunch]
) -> None:
    size, size_v = sizes
    verify(replace(case, head_size=size, head_size_v=size_v, causal=causal), launches)
    verify(replace(case, head_size=size, head_size_v=size_v, heads=(8, 8), layout="HND", window=100), launches)


@pytest.mark.parametrize("head_size", [80, 96, 192])
def test_features_of_heads_in_parts(head_size: int, launches: list[PromptLaunch]) -> None:
    case = replace(PAGED, head_size=head_size)
    verify(replace(case, window=100, features=frozenset({"sinks"})), launches)
    verify(replace(case, softcap=20.0, layout="HND", block_size=48), launches)
    verify(replace(case, queries=[2000, 37], keys=[5000, 4001], heads=(24, 2)), launches)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("case", [PAGED, PACKED], ids=["paged", "packed"])
def test_warpgroups(groups: int, case: Case, launches: list[PromptLaunch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of warpgroups computes a tile, and the rows past a request's end are no one's."""
    monkeypatch.setattr(prefill_plans, "groups_of", lambda *facts: groups)
    small = replace(case, head_size=64, features=frozenset({"sinks"}))
    verify(replace(small, window=100), launches)
    verify(replace(small, window=(60, 60), causal=False, heads=(24, 8), dtype=torch.float16), launches)
    if groups > 1:
        verify(small, launches)
        verify(replace(small, causal=False, heads=(24, 8), dtype=torch.float16), launches)
    assert {prompts.code.groups for prompts in launches} == {groups}


@pytest.mark.parametrize("size", [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)])
def test_maxima_that_grow(size: tuple[int, int], launches: list[PromptLaunch]) -> None:
    """Keys are walked from the last one on: where the first are the largest, maxima are followed, some time after."""
    trial = trial_of(replace(PACKED, head_size=size[0], head_size_v=size[1]), "cuda", module=hopper_attn, splits=1)
    for most in (4.0, 40.0):
        growth = torch.ones(len(trial.key), device="cuda")
        growth[: sum(PACKED.keys)] = torch.cat([torch.linspace(most, 0.5, n, device="cuda") for n in PACKED.keys])
        grown = replace(trial, key=(trial.key * growth[:, None, None]).to(trial.key.dtype))
        output, lse = attend(grown, grown.batch, grown.query)
        assert compare(grown, output, lse)[2] is None
    assert launches


@pytest.mark.parametrize("size", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_heads_further_apart_than_tokens(size: tuple[int, int], launches: list[PromptLaunch]) -> None:
    """A dynamic cache of transformers is [heads, tokens, size]."""
    trial = trial_of(replace(PACKED, head_size=size[0], head_size_v=size[1]), "cuda", module=hopper_attn, splits=1)
    query, key, value = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (trial.query, trial.key, trial.value))
    for apart in (replace(trial, key=key, value=value), replace(trial, query=query, key=key, value=value)):
        output, lse = attend(apart, apart.batch, apart.query)
        assert compare(apart, output, lse)[2] is None
    assert launches


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_size": None, "queries": [300, 17, 129, 64, 1], "keys": [300, 17, 129, 64, 1]},
        {"head_size": 64, "heads": (16, 2), "dtype": torch.float16, "causal": False},
        {"head_size": 96, "layout": "HND", "block_size": 48},
        {"head_size": 256},
        {"head_size": 192, "head_size_v": 128, "heads": (8, 8), "kv_dtype": "fp8"},
        {"softcap": 20.0, "features": frozenset({"sinks"})},
        {"window": 300, "features": frozenset({"sinks"})},
        {"window": (100, 30), "causal": False},
        {"queries": [600, 20, 128, 40], "keys": [40, 7, 128, 0], "causal": False},
        {"queries": [64] * 9, "keys": [3000, 64, 65, 500, 2999, 129, 1000, 192, 70]},
    ],
)  # fmt: skip
def test_split_keys(
    splits: int, changes: dict[str, Any], launches: list[PromptLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_attn.HopperPlan, "splits", splits)
    verify(replace(PAGED, **changes), launches)
    assert all(prompts.code.split for prompts in launches)


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of few queries are computed beside prompts whatever that is worth."""
    found = choices.beside_of

    def always(*facts: Any) -> Beside | None:
        beside = found(*facts)
        return None if beside is None else beside._replace(least=1 << 30, share=1 << 20)

    monkeypatch.setattr(hopper_attn, "beside_of", always)
    monkeypatch.setattr(choices, "choose_splits", lambda *facts: (1, 256))


MIXED = replace(PAGED, queries=[1, 300, 0, 1, 129, 1, 1], keys=[3000, 700, 50, 17, 1029, 1, 64])


@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_size": 64, "heads": (16, 2), "dtype": torch.float16},
        {"head_size": 96, "layout": "HND", "block_size": 48},
        {"head_size": 256, "causal": False},
        {"head_size": 192, "head_size_v": 128, "heads": (8, 8)},
        {"softcap": 20.0, "features": frozenset({"sinks"})},
        {"queries": [4, 300, 0, 7, 129, 1, 16], "keys": [3000, 700, 50, 17, 1029, 1, 64]},
        {"queries": [4, 300, 0, 7, 129, 1, 16], "keys": [3, 40, 50, 17, 0, 1, 64], "causal": False},
        {"queries": [1] * 200 + [700] * 3, "keys": [(i * 37) % 900 + 1 for i in range(200)] + [700, 900, 3000]},
    ],
)
def test_few_queries_beside_prompts(changes: dict[str, Any], launches: list[PromptLaunch]) -> None:
    check(replace(MIXED, **changes), "cuda", module=hopper_attn)
    assert launches
    assert all(prompts.code.mixed for prompts in launches)


def test_a_call_is_repeated_on_tensors_of_other_dimensions(launches: list[PromptLaunch]) -> None:
    trial = trial_of(replace(PACKED, queries=[300], keys=[300]), "cuda", module=hopper_attn, splits=1)
    expected, _ = attend(trial, trial.batch, trial.query)
    layer, given = trial.layer, (trial.query, trial.key, trial.value)
    call = Call(trial.query, None, torch.empty_like(expected), trial.key, trial.value, params=layer.params)
    again = hopper_attn.repeat(layer.spec, layer.plan(trial.batch), call)
    for _ in range(2):
        output = torch.zeros_like(expected)
        # [1, heads, tokens, size], as transformers has them
        again(*(x[None].transpose(1, 2) for x in given), output[None])
        tokens = trial.batch.num_tokens
        assert torch.equal(output[:tokens].view(torch.int16), expected[:tokens].view(torch.int16))
    assert len(launches) == 3


@pytest.mark.parametrize("heads", [(8, 8), (12, 4), (16, 1), (24, 2), (64, 8), (128, 1), (71, 1)])
@pytest.mark.parametrize("case", [PAGED, PACKED], ids=["paged", "packed"])
def test_groups(case: Case, heads: tuple[int, int], launches: list[PromptLaunch]) -> None:
    verify(replace(case, heads=heads, head_size=64), launches)


@pytest.mark.parametrize("block_size", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_blocks(block_size: int, layout: Layout, launches: list[PromptLaunch]) -> None:
    verify(replace(PAGED, block_size=block_size, layout=layout), launches)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 40, 100, 128, 1000])
@pytest.mark.parametrize("case", [PAGED, PACKED], ids=["paged", "packed"])
def test_windows(case: Case, window: int, causal: bool, launches: list[PromptLaunch]) -> None:
    verify(replace(case, window=window, causal=causal, features=frozenset({"sinks"})), launches)


@pytest.mark.parametrize("window", [(100, 30), (0, 50), (50, -1), (-1, 20)])
def test_windows_of_two_sides(window: tuple[int, int], launches: list[PromptLaunch]) -> None:
    verify(replace(PAGED, window=window, causal=False), launches)


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_caches_of_8_bits(
    sizes: tuple[int, int], dtype: torch.dtype, kv_dtype: str, launches: list[PromptLaunch]
) -> None:
    size, size_v = sizes
    case = replace(FP8, head_size=size, head_size_v=size_v, dtype=dtype, kv_dtype=kv_dtype)
    verify(case, launches)
    verify(replace(case, causal=False, layout="HND", block_size=48), launches)


def test_features_over_8_bits(launches: list[PromptLaunch]) -> None:
    verify(replace(FP8, features=frozenset({"sinks", "per_head_quant_scales"})), launches)
    verify(replace(FP8, softcap=20.0, heads=(12, 4)), launches)
    verify(replace(FP8, window=(100, 30), causal=False), launches)
    verify(replace(FP8, queries=[600, 20, 128, 40], keys=[40, 7, 128, 0], causal=False), launches)
    lengths = [(i * 37) % 90 for i in range(300)]
    verify(replace(FP8, queries=lengths, keys=[n + (n * 13) % 70 for n in lengths]), launches)


@pytest.mark.parametrize("window", [1, 40, 128, 1000])
def test_windows_over_8_bits(window: int, launches: list[PromptLaunch]) -> None:
    """Keys before every window are not widened."""
    verify(replace(FP8, window=window, features=frozenset({"sinks"})), launches)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_heads_in_groups_over_8_bits(heads: int, launches: list[PromptLaunch], monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(FP8, heads=(16, 4), features=frozenset({"sinks", "per_head_quant_scales"}))
    monkeypatch.setattr(widened, "MOST_MEMORY", heads * 4096 * 2 * 128 * 2)
    verify(case, launches)
    assert len(launches) % (4 // heads) == 0
    launches.clear()
    # batches alike share what runs them
    plans._launches.cache_clear()
    monkeypatch.setattr(widened, "MOST_MEMORY", 8192)
    check(case, "cuda", module=hopper_attn, splits=1)
    assert not launches


def test_softcap(launches: list[PromptLaunch]) -> None:
    verify(replace(PAGED, softcap=20.0, features=frozenset({"sinks"})), launches)
    verify(replace(PACKED, softcap=5.0, window=64, head_size=256), launches)


def test_rows_without_keys_and_more_queries_than_keys(launches: list[PromptLaunch]) -> None:
    verify(replace(PAGED, queries=[600, 20, 128, 40], keys=[40, 7, 128, 0], causal=False), launches)


def test_long_prompts(launches: list[PromptLaunch]) -> None:
    verify(replace(PAGED, queries=[2000, 1000, 37], keys=[5000, 1000, 4001]), launches)
    verify(replace(PACKED, queries=[4096, 2048, 333], keys=[4096, 2048, 333]), launches)


def test_many_requests(launches: list[PromptLaunch]) -> None:
    lengths = [(i * 37) % 90 for i in range(300)]
    verify(replace(PAGED, queries=lengths, keys=[n + (n * 13) % 70 for n in lengths]), launches)


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("case", [PAGED, FP8, replace(FP8, window=100)], ids=["16 bits", "8 bits", "8 bits, window"])
def test_a_graph_is_replayed_with_other_lengths(
    case: Case, splits: int | None, launches: list[PromptLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_attn.HopperPlan, "splits", splits)
    trial = trial_of(case, "cuda", module=hopper_attn, splits=1)
    assert trial.cache is not None
    # the slots of the new keys hold NaN until they are written
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    attend(trial, trial.batch, trial.query)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, lse = attend(trial, trial.batch, trial.query)
    trial.batch.seq_lens.copy_(torch.tensor([2900, 500, 20, 17, 1000, 64]))
    graph.replay()
    assert launches
    # the reference reads the lengths on the device
    assert compare(trial, output, lse)[2] is None


@pytest.mark.parametrize("changes", [{}, {"head_size": 64}, {"heads": (16, 8), "causal": False, "layout": "HND"}])
def test_a_graph_over_8_bits_widens_the_lengths_that_fit(
    changes: dict[str, Any], launches: list[PromptLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device decides at each replay whether widened keys fit; either launch computes all prompts."""
    case = replace(FP8, **{"heads": (32, 8), "queries": [1, 300, 0, 17, 900, 2], "keys": [9000] * 6, **changes})
    monkeypatch.setattr(widened, "MOST_MEMORY", 8 * 4096 * 2 * case.head_size * 2)
    trial = trial_of(case, "cuda", module=hopper_attn, splits=1)
    assert trial.cache is not None
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    attend(trial, trial.batch, trial.query)
    launches.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, lse = attend(trial, trial.batch, trial.query)
    assert [one.spaced.keys.shape[0] for one in launches] == [8 * 4096]
    for keys in ([9000, 1000, 5, 17, 900, 2], [9000] * 6, [1, 2112, 0, 17, 1900, 9], [1, 2113, 0, 17, 1900, 9]):
        trial.batch.seq_lens.copy_(torch.tensor(keys))
        output.fill_(torch.nan)
        graph.replay()
        assert compare(trial, output, lse)[2] is None


@pytest.mark.parametrize("changes", [{}, {"head_size": 64, "heads": (64, 8)}, {"causal": False, "layout": "HND"}])
def test_a_graph_of_mixed_requests_is_replayed_with_others(
    changes: dict[str, Any], launches: list[PromptLaunch]
) -> None:
    """The device decides at each replay which launch computes few queries; either computes all of them."""
    lengths = {"queries": [1] * 40 + [2000, 0, 1500], "keys": [4000] * 40 + [2000, 3, 4000]}
    case = replace(MIXED, **{"heads": (32, 8), **lengths, **changes})
    trial = trial_of(case, "cuda", module=hopper_attn)
    assert trial.cache is not None
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    attend(trial, trial.batch, trial.query)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, lse = attend(trial, trial.batch, trial.query)
    beside = launches[-1].code.beside
    assert beside is not None
    decided = []
    for keys in (
        [3000] * 40 + [2000, 3, 3500], [40, *[1] * 39, 2000, 3, 4000], [4000, *[17] * 39, 2000, 0, 1500],
        [100 * i + 1 for i in range(40)] + [2000, 3, 3000],
    ):  # fmt: skip
        trial.batch.seq_lens.copy_(torch.tensor(keys))
        output.fill_(torch.nan)
        graph.replay()
        assert compare(trial, output, lse)[2] is None
        decided.append(choices.mixes(beside, 2, case.queries, keys))
    assert decided == [True, False, False, True]


@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize("changes", [{}, {"queries": [4, 300, 0, 7, 129, 1, 16]}, {"dtype": torch.float16}])
def test_a_graph_computes_few_queries_beside_prompts(changes: dict[str, Any], launches: list[PromptLaunch]) -> None:
    trial = trial_of(replace(MIXED, **changes), "cuda", module=hopper_attn)
    assert trial.cache is not None
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    attend(trial, trial.batch, trial.query)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, lse = attend(trial, trial.batch, trial.query)
    for lengths in ([2900, 500, 20, 17, 1000, 1, 64], [7, 300, 0, 7, 129, 1, 60]):
        trial.batch.seq_lens.copy_(torch.tensor(lengths))
        output.fill_(torch.nan)
        graph.replay()
        assert compare(trial, output, lse)[2] is None
    assert [prompts.code.mixed for prompts in launches] == [True, True]


def test_runs_are_alike_to_the_bit() -> None:
    trial = trial_of(PAGED, "cuda", module=hopper_attn, splits=1)
    assert trial.cache is not None
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    first, _ = attend(trial, trial.batch, trial.query)
    again, _ = attend(trial, trial.batch, trial.query)
    assert torch.equal(first.view(torch.int16), again.view(torch.int16))
