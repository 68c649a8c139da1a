"""HOPPER_MLA on a Hopper GPU against float64: lengths, heads, splits, graphs, poison, far caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.mla import filled_cache, mla_spec

from attnreg.conformance.bounds import bounds
from attnreg.kernels import reference
from attnreg.kernels.hopper import mla as hopper_mla
from attnreg.kernels.hopper.latent_plans import HopperLatentPlan
from attnreg.runtime.interface import BatchMetadata, Call, LayerParams
from attnreg.runtime.mla.interface import as_kv_cache

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
    pytest.mark.filterwarnings("default"),
]


class Layer:
    """A layer's tensors for a step; cached tokens that no request has, and all that is written, hold NaN."""

    def __init__(self, queries: list[int], lengths: list[int], *, causal: bool = True, **changes: Any) -> None:
        torch.manual_seed(0)
        heads = changes.pop("heads", 16)
        made = mla_spec(heads, **{"head_size": 576, "head_size_v": 512, "block_size": 64, **changes})
        self.spec = made.latent
        cache, table = filled_cache(made, lengths)
        self.cache = cache.cuda()
        self.batch = BatchMetadata.build(queries, lengths, device="cuda", block_table=table.cuda(), causal=causal)
        rows = sum(queries) + 2
        self.query = torch.randn(rows, heads, 576).to("cuda", self.spec.dtype)
        self.query[sum(queries) :] = torch.nan
        self.output = torch.full((rows, heads, 512), torch.nan, dtype=self.spec.dtype, device="cuda")
        self.lse = torch.full((heads, rows), torch.nan, device="cuda")

    @property
    def call(self) -> Call:
        cache = as_kv_cache(self.spec, self.cache)
        return Call(self.query, cache, self.output, lse=self.lse, params=LayerParams())

    def check(self) -> None:
        """Assert that output and lse are the reference's but for rounding, and that padding is as it was."""
        n = self.batch.num_tokens
        exact = reference.attention(self.spec, self.batch, self.query, as_kv_cache(self.spec, self.cache))
        allowed, allowed_lse = bounds(self.spec, self.batch, exact, 8.0)
        assert ((self.output[:n].double() - exact.output).abs() <= allowed).all()
        lse = self.lse[:, :n].double()
        assert ((lse == exact.lse) | ((lse - exact.lse).abs() <= allowed_lse)).all()
        assert self.output[n:].isnan().all()
        assert self.lse[:, n:].isnan().all()


MIXED = [1, 0, 5, 1, 20, 2], [300, 0, 17, 1, 33, 4097]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heads": 128},
        {"heads": 1, "block_size": 16},
        {"heads": 20, "block_size": 48, "dtype": torch.float16},
        {"heads": 40, "block_size": 128, "kv_layout": "HND"},
        {"heads": 96, "block_size": 32},
        {"heads": 64, "features": frozenset({"lse", "batch_invariant"})},
    ],
    ids=["16 heads", "128 heads", "1 head", "float16", "HND", "96 heads", "batch invariant"],
)
def test_any_batch(changes: dict[str, Any], causal: bool) -> None:
    layer = Layer(*MIXED, causal=causal, **changes)
    hopper_mla.forward(layer.spec, hopper_mla.plan(layer.spec, layer.batch), layer.call)
    layer.check()


@pytest.mark.parametrize("heads", [16, 128])
def test_splits(heads: int) -> None:
    layer = Layer([1, 1, 3, 1], [5000, 1, 333, 64], heads=heads)
    for splits in (1, 2, 5, 16, 40):
        for _ in range(2):
            layer.output.fill_(torch.nan)
            layer.lse.fill_(torch.nan)
            HopperLatentPlan(layer.spec, layer.batch, splits=splits).run(layer.call)
            layer.check()


def test_every_length_around_a_tile() -> None:
    lengths = [*range(1, 8), *range(60, 70), *range(124, 134), *range(190, 196)]
    layer = Layer([1] * len(lengths), lengths, heads=128)
    for splits in (1, 3):
        layer.output.fill_(torch.nan)
        HopperLatentPlan(layer.spec, layer.batch, splits=splits).run(layer.call)
        layer.check()


@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 4, 2]], ids=str)
def test_a_graph_of_a_dummy_batch_follows_the_lengths(queries: list[int]) -> None:
    lengths = [3000, 70, 1500]
    layer = Layer(queries, lengths)
    assert layer.batch.block_table is not None
    # one token a request, and bounds of what may come
    dummy = replace(
        BatchMetadata.build([1] * 3, [1] * 3, device="cuda", block_table=layer.batch.block_table.clone()),
        max_query_len=max(queries), max_seq_len=max(lengths), seq_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
    )  # fmt: skip

    def run() -> None:
        hopper_mla.forward(layer.spec, hopper_mla.plan(layer.spec, dummy), layer.call)

    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
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
        layer.lse.fill_(torch.nan)
        graph.replay()
        layer.check()
        # other queries in the memory that the graph knows
        n = layer.batch.num_tokens
        layer.query[:n] = layer.query[:n].flip(0)


def test_a_cache_past_two_to_the_31_elements() -> None:
    layer = Layer([1, 2], [400, 700])
    blocks, size, width = layer.cache.shape
    # blocks lie far from each other, at multiples of a token
    apart = -(-(2**31 // blocks + 2**14) // width) * width
    if torch.cuda.mem_get_info()[0] < 2 * blocks * apart + 2**30:
        pytest.skip("needs 6 GiB of memory on the GPU")
    memory = torch.full((blocks * apart,), torch.nan, dtype=layer.spec.dtype, device="cuda")
    far = memory.as_strided((blocks, size, width), (apart, width, 1))
    far.copy_(layer.cache)
    layer.cache = far
    hopper_mla.forward(layer.spec, hopper_mla.plan(layer.spec, layer.batch), layer.call)
    layer.check()


def test_unaligned_queries_and_outputs() -> None:
    layer = Layer([1, 3], [400, 70], heads=24)
    rows, heads, _ = layer.query.shape
    query = torch.full((rows, heads, 585), torch.nan, dtype=layer.spec.dtype, device="cuda")[..., 3:579]
    query.copy_(layer.query)
    output = torch.full((rows, heads + 1, 515), torch.nan, dtype=layer.spec.dtype, device="cuda")
    layer.query, layer.output = query, output[:, 1:, 1:513]
    hopper_mla.forward(layer.spec, hopper_mla.plan(layer.spec, layer.batch), layer.call)
    layer.check()
    layer.output.fill_(torch.nan)
    assert output.isnan().all()
