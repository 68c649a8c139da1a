"""MLA on a GPU: graphs captured with dummy batches, caches past 2**31 elements, split keys, and poison.

Without a GPU the same is computed in Triton's interpreter, at small sizes and without graphs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.layers.mla import filled_cache, mla_spec
from torch import Tensor

from attnreg.kernels import reference, triton_mla
from attnreg.kernels.mla import triton_sparse
from attnreg.kernels.mla.plans import LatentPlan
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, LayerParams
from attnreg.runtime.mla.interface import as_kv_cache

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# the interpreter multiplies no bfloat16
DTYPE, PRECISION = (torch.bfloat16, 2e-2) if GPU else (torch.float16, 3e-3)
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
MODULES = {"dense": triton_mla, "sparse": triton_sparse}


class Layer:
    """A layer's tensors for a step; cached blocks that no request has hold NaN."""

    def __init__(
        self, queries: list[int], lengths: list[int], *, sparse: bool, heads: int = 16, **changes: Any
    ) -> None:
        torch.manual_seed(0)
        made = mla_spec(heads, dtype=DTYPE, **changes)
        self.spec: AttentionSpec = replace(made.latent, sparse=sparse)
        cache, table = filled_cache(replace(made, latent=self.spec), lengths)
        self.cache, self.table = cache.to(DEVICE), table.to(DEVICE)
        self.batch = BatchMetadata.build(queries, lengths, device=DEVICE, block_table=self.table)
        rows = sum(queries)
        self.query = torch.randn(rows, heads, self.spec.head_size).to(DEVICE, DTYPE)
        self.output = torch.full((rows, heads, self.spec.head_size_v), torch.nan, dtype=DTYPE, device=DEVICE)
        self.lse = torch.full((heads, rows), torch.nan, device=DEVICE)
        self.indices = None
        if sparse:
            ends = [k - q + j + 1 for q, k in zip(queries, lengths, strict=True) for j in range(q)]
            self.indices = torch.full((rows, 24), -1, dtype=torch.int32)
            for row, end in zip(self.indices, ends, strict=True):
                row[: min(end, 20)] = torch.randperm(end)[:20]
            self.indices = self.indices.to(DEVICE)

    @property
    def call(self) -> Call:
        return Call(
            self.query, as_kv_cache(self.spec, self.cache), self.output, lse=self.lse, params=LayerParams(),
            indices=self.indices,
        )  # fmt: skip

    def check(self, batch: BatchMetadata | None = None) -> None:
        """Assert that output and lse are exact but for rounding, and written."""
        cache = as_kv_cache(self.spec, self.cache)
        exact = reference.attention(self.spec, batch or self.batch, self.query, cache, indices=self.indices)
        n = len(exact.output)
        torch.testing.assert_close(self.output[:n].double(), exact.output, rtol=PRECISION, atol=PRECISION)
        torch.testing.assert_close(self.lse[:, :n].double(), exact.lse, rtol=PRECISION, atol=PRECISION)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 4, 2]], ids=str)
def test_a_graph_of_a_dummy_batch_follows_the_lengths(kind: str, queries: list[int]) -> None:
    module, lengths = MODULES[kind], [3000, 70, 1500] if GPU else [90, 30, 40]
    layer = Layer(queries, lengths, sparse=kind == "sparse")
    # one token a request, and bounds of what may come
    dummy = replace(
        BatchMetadata.build([1] * 3, [1] * 3, device=DEVICE, block_table=layer.table.clone()),
        max_query_len=max(queries), max_seq_len=max(lengths), seq_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
    )  # fmt: skip
    assert dummy.block_table is not None

    def run() -> None:
        module.forward(layer.spec, module.plan(layer.spec, dummy), layer.call)

    graph = torch.cuda.CUDAGraph() if GPU else None
    if graph is not None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            run()
    dummy.query_start_loc.copy_(layer.batch.query_start_loc)
    dummy.seq_lens.copy_(layer.batch.seq_lens)
    for _ in range(2):
        layer.output.fill_(torch.nan)
        if graph is not None:
            graph.replay()
        else:
            # what the host knows is of the dummy's rows; the interpreter launches anew
            plan = replace(dummy, query_start_loc_cpu=layer.batch.query_start_loc_cpu)
            module.forward(layer.spec, module.plan(layer.spec, plan), layer.call)
        layer.check()
        # other queries in the memory that the graph knows
        layer.query.copy_(layer.query.flip(0))


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "fp8_ds_mla"])
def test_splits_give_what_one_program_gives(kv_dtype: str) -> None:
    if kv_dtype == "fp8_ds_mla" and not GPU:
        pytest.skip("the format is of bfloat16 layers, whose rounding the interpreter does not have")
    lengths = [5000, 1, 333] if GPU else [100, 1, 33]
    layer = Layer([1, 1, 3], lengths, sparse=False, kv_dtype=kv_dtype)
    for splits in (1, 2, 5, 16):
        layer.output.fill_(torch.nan)
        LatentPlan(layer.spec, layer.batch, splits=splits).run(layer.call)
        layer.check()


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize(
    ("queries", "lengths"),
    [
        ([1, 1, 1], [700, 5, 33]), ([1, 1], [0, 600]), ([1, 0, 1], [64, 30, 500]), ([1] * 4, [320] * 4),
        ([2, 1, 3], [4, 650, 300]), ([1, 20, 1], [400, 20, 64]),
    ],
    ids=("one is long", "no keys", "no query", "alike", "several queries", "a prompt between"),
)  # fmt: skip
def test_programs_share_keys_out(
    queries: list[int], lengths: list[int], kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kv_dtype == "fp8_ds_mla" and not GPU:
        pytest.skip("the format is of bfloat16 layers, whose rounding the interpreter does not have")
    monkeypatch.setattr("attnreg.kernels.triton.planned.batches.is_captured", lambda query: True)
    layer = Layer(queries, lengths, sparse=False, kv_dtype=kv_dtype)
    plan = LatentPlan(layer.spec, layer.batch)
    assert not any(one.chosen.shared for one in plan.launches)
    assert plan.for_graphs().launches[0].chosen.shared
    plan.run(layer.call)
    layer.check()


@pytest.mark.parametrize(
    ("queries", "lengths", "shared"),
    [
        ([1] * 16, [3000] + [5] * 15, True), ([1] * 16, [1200] + [900] * 15, False),
        ([1] * 15 + [2], [5] * 15 + [3000], False), ([1] * 16 + [30], [3000] + [5] * 15 + [30], True),
    ],
    ids=("one is long", "alike", "several queries", "beside a prompt"),
)  # fmt: skip
def test_keys_that_the_host_knows_are_shared_out_where_one_request_has_most(
    queries: list[int], lengths: list[int], shared: bool
) -> None:
    layer = Layer(queries, lengths, sparse=False)
    plan = LatentPlan(layer.spec, layer.batch)
    assert (plan.launches[0].chosen.shared > 0) == shared
    plan.run(layer.call)
    layer.check()


def test_those_of_chosen_tokens_are_not_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnreg.kernels.triton.planned.batches.is_captured", lambda query: True)
    layer = Layer([1, 1], [700, 5], sparse=False)
    plan = LatentPlan(layer.spec, layer.batch, alike=True)
    # a plan for graphs would be made with these
    plan._launches_of = None
    plan.run(layer.call)
    layer.check()


@pytest.mark.parametrize("kind", MODULES)
def test_a_cache_past_two_to_the_31_elements(kind: str) -> None:
    layer = Layer([1, 2], [40, 70], sparse=kind == "sparse")
    blocks, size, width = layer.cache.shape
    apart = 2**31 // blocks + 2**14 if GPU else size * width
    if GPU and torch.cuda.mem_get_info()[0] < 2 * blocks * apart + 2**30:
        pytest.skip("needs 6 GiB of memory on the GPU")
    # blocks lie far from each other, at multiples of a token
    apart = -(-apart // width) * width
    far = torch.full((blocks * apart,), torch.nan, dtype=DTYPE, device=DEVICE).as_strided(
        (blocks, size, width), (apart, width, 1)
    )
    far.copy_(layer.cache)
    layer.cache = far
    module = MODULES[kind]
    module.forward(layer.spec, module.plan(layer.spec, layer.batch), layer.call)
    layer.check()


def test_two_streams_share_no_memory() -> None:
    lengths = [900, 800] if GPU else [60, 50]
    layers = [Layer([1, 2], lengths, sparse=False) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in layers] if GPU else [None, None]
    outputs: list[Tensor] = []
    if GPU:
        torch.cuda.synchronize()
    for _ in range(5):
        for layer, stream in zip(layers, streams, strict=True):
            with torch.cuda.stream(stream):
                # the launches of both are those of one plan's
                LatentPlan(layer.spec, layer.batch, splits=4).run(layer.call)
    if GPU:
        torch.cuda.synchronize()
    for layer in layers:
        layer.check()
        outputs.append(layer.output)
    assert torch.equal(*outputs)
