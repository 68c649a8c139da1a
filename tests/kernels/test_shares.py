"""Keys that programs share out, in Triton's interpreter, or on a GPU if there is one, against float64."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from support.layers.kernel_trials import Case, check, in_graphs
from support.suite.examples import examples

from attnreg.kernels import triton_attn
from attnreg.kernels.hopper.prompts.choices import mixes
from attnreg.kernels.triton.plans import AttentionPlan
from attnreg.kernels.triton.schedule import SMALLEST_SPLIT, KeyLengths, Launch, shares_of
from attnreg.kernels.triton.splits.beside import Beside, is_worth_here, work_of
from attnreg.kernels.triton.splits.shares import parts_of_requests
from attnreg.kernels.triton.tiles import Config
from attnreg.kernels.turboquant import attention as turboquant
from attnreg.runtime.interface import BatchMetadata
from attnreg.runtime.lengths import Lengths, starts_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONG, SHORT = 4000, 60


IN_GRAPHS = in_graphs(triton_attn)
CASES = {
    "one long": Case([1, 1, 1], [2000, 5, 33]),
    "the last is long": Case([1, 1, 1], [17, 33, 2100], heads=(8, 1)),
    "all alike": Case([1] * 5, [640] * 5),
    "no keys": Case([1, 1, 1], [0, 1500, 0], causal=False, features=frozenset({"sinks"})),
    "none has keys": Case([1, 1], [0, 0], causal=False),
    "no queries": Case([0, 1, 0, 1, 0], [0, 900, 12, 70, 0]),
    "prompts between": Case([1, 20, 1, 40, 2], [800, 20, 64, 90, 1300]),
    "several queries, not causal": Case([3, 1, 4], [5, 1200, 700], causal=False, layout="HND"),
    "sinks and softcap": Case([1, 2, 1], [1000, 7, 300], softcap=5.0, features=frozenset({"sinks", "alibi"})),
    "8-bit floats": Case([1, 1, 2], [1000, 7, 300], kv_dtype="fp8_e4m3", features=frozenset({"fp8_query"})),
    "8-bit output": Case([1, 1, 2], [1000, 7, 300], kv_dtype="fp8_e4m3", features=frozenset({"fp8_output", "sinks"})),
    "packed keys": Case([1, 2, 1], [900, 70, 33], block_size=None),
    "AMD's layout": Case([1, 2, 1], [900, 70, 33], layout="SPLIT"),
    "more heads than a tile": Case([1, 1], [1000, 30], heads=(160, 1)),
    "many requests": Case([1] * 150, [(17 * i * i) % 200 for i in range(149)] + [1500], heads=(1, 1), head_size=16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_lengths(case: Case) -> None:
    check(case, DEVICE, module=IN_GRAPHS)


@pytest.mark.parametrize("kv_dtype", ["turboquant_4bit_nc", "turboquant_k8v4", "turboquant_3bit_ub"])
def test_any_lengths_of_packed_codes(kv_dtype: str) -> None:
    check(Case([1, 2, 1], [900, 70, 33], head_size=64, kv_dtype=kv_dtype), DEVICE, module=in_graphs(turboquant))


LENGTHS = st.sampled_from((0, 1, 16, 31, 32, 33, 64, 255, 256, 257, 500, 900, 1500))


@examples(40)
@given(st.lists(st.tuples(st.sampled_from((0, 1, 1, 1, 2, 17)), LENGTHS), min_size=2, max_size=6), st.data())
def test_any_batch(requests: list[tuple[int, int]], data: st.DataObject) -> None:
    queries, keys = map(list, zip(*requests, strict=True))
    causal = data.draw(st.booleans())
    features = data.draw(st.sets(st.sampled_from(("sinks", "alibi"))))
    if causal or "alibi" in features:
        keys = [max(q, k) for q, k in zip(queries, keys, strict=True)]
    heads = data.draw(st.sampled_from(((4, 2), (8, 1), (3, 3))))
    case = Case(queries, keys, heads=heads, head_size=16, causal=causal, features=frozenset(features))
    check(case, DEVICE, module=IN_GRAPHS)


@triton.jit
def _parts_kernel(  # type: ignore[no-untyped-def]
    starts_ptr,
    lengths_ptr,
    parts_ptr,
    num_reqs,
    SHARES: tl.constexpr,  # noqa: N803
):
    i = tl.arange(0, SHARES.lanes)
    parts, _ = parts_of_requests(starts_ptr, lengths_ptr, num_reqs, 1, 1, i, SHARES)
    tl.store(parts_ptr + i, parts, mask=i < num_reqs)


@examples(60)
@given(
    st.lists(st.one_of(LENGTHS, st.integers(0, 2000), st.integers(0, 200_000)), min_size=1, max_size=140),
    st.sampled_from((1, 2, 16, 33, 49, 66, 132, 264)),
    st.floats(0.5, 8),
    st.sampled_from((16, 64, 128)),
)
def test_there_are_programs_for_all_parts(lengths: list[int], programs: int, begin: float, block_n: int) -> None:
    requests = len(lengths)
    launch = Launch(Config(16, block_n, 4, 2), 1, 1, 4, True, 1, 0, 1, programs)
    shares = shares_of(launch, requests, block_n, begin * block_n)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=DEVICE)
    parts = torch.full((requests,), -1, dtype=torch.int32, device=DEVICE)
    _parts_kernel[(1,)](starts, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), parts, requests, shares)
    assert parts.min() >= 1
    assert parts.sum() <= launch.sharing(requests)
    # nor is a part smaller than it has to be
    assert all(n == 1 or length > SMALLEST_SPLIT for n, length in zip(parts.tolist(), lengths, strict=True))


@triton.jit
def _beside_kernel(starts_ptr, lengths_ptr, out_ptr, num_reqs, most, SHARES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    i = tl.arange(0, SHARES.lanes)
    few, many, longest = work_of(starts_ptr, lengths_ptr, i, num_reqs, most, SHARES.beside)
    tl.store(out_ptr, is_worth_here(few, many, longest, SHARES.beside).to(tl.int32))
    parts, _ = parts_of_requests(starts_ptr, lengths_ptr, num_reqs, 1, most, i, SHARES)
    tl.store(out_ptr + 1 + i, parts, mask=i < num_reqs)


QUERIES = st.one_of(st.sampled_from((0, 1, 1, 1, 2, 4)), st.integers(17, 3000))


@examples(60)
@given(
    st.lists(st.tuples(QUERIES, st.one_of(LENGTHS, st.integers(0, 200_000))), min_size=1, max_size=60),
    st.sampled_from((1, 4, 8)),
    st.booleans(),
)
def test_the_device_decides_as_the_host_whether_prompts_take_few_queries(
    requests: list[tuple[int, int]], kv_heads: int, causal: bool
) -> None:
    queries, keys = map(list, zip((1, 7), *requests, strict=True))
    beside, most = Beside(32, kv_heads, 132, causal), 4
    shares = shares_of(Launch(Config(16, 64, 4, 2), 1, most, 4, True, 1, 0, 1, 132), len(queries), 64, 64.0)
    assert shares is not None
    out = torch.full((1 + len(queries),), -1, dtype=torch.int32, device=DEVICE)
    starts, lengths = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, *accumulate(queries)], keys))
    _beside_kernel[(1,)](starts, lengths, out, len(queries), most, shares._replace(beside=beside))
    decided, *parts = out.tolist()
    assert decided == mixes(beside, most + 1, queries, keys)
    # each request of few queries has parts if prompts do not compute it
    assert [n > 0 for n in parts] == [0 < n <= most and not decided for n in queries]


def batch_of(*lengths: int, queries: int = 1, bound: int = 0) -> BatchMetadata:
    table = torch.zeros(len(lengths), 1 + max(*lengths, bound) // 16, dtype=torch.int32, device=DEVICE)
    batch = BatchMetadata.build([queries] * len(lengths), lengths, device=DEVICE, block_table=table)
    return replace(batch, max_seq_len=bound) if bound else batch


PLAIN = Case([1], [1])


@pytest.mark.parametrize(
    ("case", "batch", "shared"),
    [
        (PLAIN, batch_of(LONG, SHORT, SHORT), True),
        (PLAIN, batch_of(LONG, LONG, LONG), True),
        (replace(PLAIN, softcap=5.0), batch_of(LONG, SHORT), True),
        (PLAIN, batch_of(LONG, SHORT, queries=8), True),
        (PLAIN, batch_of(LONG), False),
        (PLAIN, batch_of(*[LONG] * 140), True),
        (PLAIN, batch_of(*[LONG] * 1025), False),
        # which would take more memory for parts than others
        (replace(PLAIN, heads=(64, 8)), batch_of(*[LONG] * 1024, queries=2), False),
    ],
    ids=("differ", "alike", "softcap", "8 queries", "one", "many", "too many", "too many rows"),
)
def test_programs_share_keys_out_in_graphs(case: Case, batch: BatchMetadata, shared: bool) -> None:
    plan = AttentionPlan(case.spec, batch)
    # where the host knows them, it cuts them itself
    assert not any(one.chosen.shared for one in plan.launches)
    assert [one.chosen.shared > 0 for one in plan.for_graphs().launches] == [shared]
    assert plan.for_graphs().launches.rotates == plan.launches.rotates


@pytest.mark.parametrize(
    "case",
    [
        replace(PLAIN, window=64), replace(PLAIN, window=(9, -1), causal=False), replace(PLAIN, chunk=64),
        replace(PLAIN, features=frozenset({"batch_invariant"})), replace(PLAIN, causal=[True, False]),
    ],
    ids=("window", "window behind", "chunks", "batch_invariant", "causal by request"),
)  # fmt: skip
def test_keys_that_not_all_see_are_not_shared_out(case: Case) -> None:
    batch = batch_of(LONG, SHORT)
    if isinstance(case.causal, list):
        batch = replace(batch, causal=torch.tensor(case.causal, device=DEVICE))
    for plan in (AttentionPlan(case.spec, batch), AttentionPlan(case.spec, batch).for_graphs()):
        assert not any(one.chosen.shared for one in plan.launches)


def test_a_graph_is_captured_for_lengths_that_nobody_knows() -> None:
    plans = [AttentionPlan(PLAIN.spec, batch_of(*lengths, bound=LONG)) for lengths in ((LONG, 1), (1, 1), (LONG, LONG))]
    assert len({id(plan.for_graphs().launches) for plan in plans}) == 1
    assert len({id(plan.launches) for plan in plans}) > 1


def test_what_a_graph_is_captured_for() -> None:
    assert KeyLengths.any_of(131000) == KeyLengths(131072, ((1, 131072),), known=False)


@examples(100)
@given(st.lists(st.integers(1, 100_000), min_size=2, max_size=64), st.integers(0, 1000))
def test_lengths_that_are_known_hide_no_request(lengths: list[int], more: int) -> None:
    starts = starts_of(array("i", [1] * len(lengths)).tobytes())
    keys = KeyLengths.of(max(lengths) + more, Lengths.of(starts, array("i", lengths).tobytes()))
    assert sum(count for count, _ in keys.few) in (1, len(lengths))
    assert all(a[1] >= b[1] for a, b in pairwise(keys.few))
