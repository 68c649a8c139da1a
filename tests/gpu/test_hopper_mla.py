"""HOPPER_MLA on a Hopper GPU against float64: lengths, heads, formats, splits, graphs, poison, far caches."""

from __future__ import annotations

import random
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from support.layers.mla import filled_cache, mla_spec

from attnreg.conformance.bounds import bounds
from attnreg.kernels import reference, triton_mla
from attnreg.kernels.hopper.latents import attention as hopper_mla
from attnreg.kernels.hopper.latents import sparse as hopper_sparse
from attnreg.kernels.hopper.latents.plans import HopperLatentPlan
from attnreg.kernels.triton.planned import batches
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

    def __init__(
        self, queries: list[int], lengths: list[int], *, causal: bool = True, scale: float | None = None, topk: int = 0,
        **changes: Any,
    ) -> None:  # fmt: skip
        """scale: the factor of a cache of 8-bit floats. topk: the keys that a query chooses; 0: it sees all."""
        torch.manual_seed(0)
        heads = changes.pop("heads", 16)
        made = mla_spec(heads, **{"head_size": 576, "head_size_v": 512, "block_size": 64, **changes})
        self.spec, self.module = replace(made.latent, sparse=topk > 0), hopper_sparse if topk else hopper_mla
        factor = None if scale is None else torch.tensor([scale])
        cache, table = filled_cache(made, lengths, factor)
        factor = None if factor is None else factor.cuda()
        self.params = LayerParams(k_scale=factor, v_scale=factor)
        self.indices = None
        if topk:
            ends = [k - q + j + 1 if causal else k for q, k in zip(queries, lengths, strict=True) for j in range(q)]
            # rows of padding have indices that nobody may follow
            self.indices = torch.full((len(ends) + 2, topk + 5), -1, dtype=torch.int32)
            self.indices[len(ends) :] = 2**30
            for row, end in zip(self.indices, ends, strict=False):
                chosen = torch.randperm(max(end, 0))[:topk].int()
                row[: len(chosen)] = chosen
            self.indices = self.indices.cuda()
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
        return Call(self.query, cache, self.output, lse=self.lse, params=self.params, indices=self.indices)

    def run(self) -> None:
        self.module.forward(self.spec, self.module.plan(self.spec, self.batch), self.call)

    def check(self) -> None:
        """Assert that output and lse are the reference's but for rounding, and that padding is as it was."""
        n = self.batch.num_tokens
        cache, indices = as_kv_cache(self.spec, self.cache), None if self.indices is None else self.indices[:n]
        exact = reference.attention(self.spec, self.batch, self.query, cache, params=self.params, indices=indices)
        allowed, allowed_lse = bounds(self.spec, self.batch, exact, 8.0)
        assert ((self.output[:n].double() - exact.output).abs() <= allowed).all()
        lse = self.lse[:, :n].double()
        assert ((lse == exact.lse) | ((lse - exact.lse).abs() <= allowed_lse)).all()
        assert self.output[n:].isnan().all()
        assert self.lse[:, n:].isnan().all()


@pytest.fixture(params=[False, True], ids=["called", "in a graph"])
def captured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the launches are those that a graph captures, whose programs share keys out."""
    monkeypatch.setattr(batches, "is_captured", lambda query: request.param)
    return bool(request.param)


MIXED = [1, 0, 5, 1, 20, 2], [300, 0, 17, 1, 33, 4097]


@pytest.mark.usefixtures("captured")
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
        {"heads": 128, "kv_dtype": "fp8"},
        {"heads": 16, "kv_dtype": "fp8", "scale": 0.37, "block_size": 48},
        {"heads": 20, "kv_dtype": "fp8_e4m3", "dtype": torch.float16, "kv_layout": "HND"},
        {"heads": 128, "kv_dtype": "fp8_e5m2", "scale": 1.7, "block_size": 16},
        {"heads": 40, "kv_dtype": "fp8_e5m2", "dtype": torch.float16},
        {"heads": 128, "kv_dtype": "fp8_ds_mla"},
        {"heads": 24, "kv_dtype": "fp8_ds_mla", "block_size": 16, "kv_layout": "HND"},
        {"heads": 128, "topk": 200},
        {"heads": 16, "topk": 64, "block_size": 1},
        {"heads": 33, "topk": 300, "block_size": 24, "dtype": torch.float16},
        {"heads": 128, "topk": 200, "kv_dtype": "fp8", "scale": 2.5},
        {"heads": 64, "topk": 129, "kv_dtype": "fp8_ds_mla"},
    ],
    ids=lambda x: ", ".join(f"{name} {value}" for name, value in x.items() if name != "features") or "16 heads",
)
def test_any_batch(changes: dict[str, Any], causal: bool) -> None:
    layer = Layer(*MIXED, causal=causal, **changes)
    layer.run()
    layer.check()


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize(
    ("queries", "lengths"),
    [
        ([1] * 3, [5000, 1, 333]), ([1] * 4, [0, 700, 0, 64]), ([1, 0, 1], [64, 30, 4097]), ([1] * 5, [640] * 5),
        ([1] * 300, [(17 * i * i) % 200 for i in range(299)] + [3000]), ([2, 4, 1], [5, 3000, 700]),
        ([1, 30, 1, 2], [800, 90, 64, 1300]),
    ],
    ids=("one is long", "some have no keys", "one has no query", "alike", "many", "several queries", "prompts between"),
)  # fmt: skip
def test_programs_share_keys_out(
    queries: list[int], lengths: list[int], heads: int, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "is_captured", lambda query: True)
    layer = Layer(queries, lengths, heads=heads, kv_dtype=kv_dtype, causal=queries[0] == 1)
    shared = [one.chosen.shared for one in HopperLatentPlan(layer.spec, layer.batch).for_graphs().launches]
    assert any(shared)
    layer.run()
    layer.check()


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [16, 128])
def test_splits(heads: int, kv_dtype: str) -> None:
    layer = Layer([1, 1, 3, 1], [5000, 1, 333, 64], heads=heads, kv_dtype=kv_dtype)
    for splits in (1, 2, 5, 16, 40):
        for _ in range(2):
            layer.output.fill_(torch.nan)
            layer.lse.fill_(torch.nan)
            HopperLatentPlan(layer.spec, layer.batch, splits=splits).run(layer.call)
            layer.check()


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "fp8_ds_mla"])
def test_every_length_around_a_tile(kv_dtype: str) -> None:
    lengths = [*range(1, 8), *range(60, 70), *range(124, 134), *range(190, 196)]
    layer = Layer([1] * len(lengths), lengths, heads=128, kv_dtype=kv_dtype)
    for splits in (1, 3):
        layer.output.fill_(torch.nan)
        HopperLatentPlan(layer.spec, layer.batch, splits=splits).run(layer.call)
        layer.check()


@pytest.mark.parametrize(
    "changes", [{}, {"kv_dtype": "fp8", "scale": 0.5}, {"kv_dtype": "fp8_ds_mla"}, {"topk": 200}], ids=str
)
@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 4, 2]], ids=str)
def test_a_graph_of_a_dummy_batch_follows_the_lengths(queries: list[int], changes: dict[str, Any]) -> None:
    lengths = [3000, 70, 1500]
    layer = Layer(queries, lengths, **changes)
    assert layer.batch.block_table is not None
    # one token a request, and bounds of what may come
    dummy = replace(
        BatchMetadata.build([1] * 3, [1] * 3, device="cuda", block_table=layer.batch.block_table.clone()),
        max_query_len=max(queries), max_seq_len=max(lengths), seq_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
    )  # fmt: skip

    def run() -> None:
        layer.module.forward(layer.spec, layer.module.plan(layer.spec, dummy), layer.call)

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


@pytest.mark.parametrize("changes", [{}, {"kv_dtype": "fp8"}, {"kv_dtype": "fp8_ds_mla"}, {"topk": 200}], ids=str)
def test_a_cache_past_two_to_the_31_elements(changes: dict[str, Any]) -> None:
    layer = Layer([1, 2], [400, 700], **changes)
    blocks, size, width = layer.cache.shape
    # blocks lie far from each other, at multiples of a token; words of 8-bit numbers are past 2**31 too
    size_of = 4 // layer.cache.itemsize if layer.cache.itemsize == 1 else 1
    apart = -(-(size_of * 2**31 // blocks + 2**14) // width) * width
    if torch.cuda.mem_get_info()[0] < layer.cache.itemsize * blocks * apart + 2**30:
        pytest.skip("needs 10 GiB of memory on the GPU")
    memory = torch.full((blocks * apart * layer.cache.itemsize,), 0xFF, dtype=torch.uint8, device="cuda")
    far = memory.view(layer.cache.dtype).as_strided((blocks, size, width), (apart, width, 1))
    far.view(torch.uint8).copy_(layer.cache.view(torch.uint8))
    layer.cache = far
    layer.run()
    layer.check()


@pytest.mark.parametrize("changes", [{}, {"kv_dtype": "fp8"}, {"topk": 200}], ids=str)
def test_unaligned_queries_and_outputs(changes: dict[str, Any]) -> None:
    layer = Layer([1, 3], [400, 70], heads=24, **changes)
    rows, heads, _ = layer.query.shape
    query = torch.full((rows, heads, 585), torch.nan, dtype=layer.spec.dtype, device="cuda")[..., 3:579]
    query.copy_(layer.query)
    output = torch.full((rows, heads + 1, 515), torch.nan, dtype=layer.spec.dtype, device="cuda")
    layer.query, layer.output = query, output[:, 1:, 1:513]
    layer.run()
    layer.check()
    layer.output.fill_(torch.nan)
    assert output.isnan().all()


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2"])
def test_every_8_bit_float_is_what_it_is(kv_dtype: str) -> None:
    layer = Layer([1], [256], heads=16, kv_dtype=kv_dtype)
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(layer.cache.dtype).float()
    finite = codes.where(codes.isfinite(), 0.0)
    # key i holds the number i in every column; the weights are nearly alike
    layer.query *= 1e-6
    assert layer.batch.block_table is not None
    rows = layer.batch.block_table[0, :4].long()
    layer.cache[rows] = finite.view(4, 64, 1).expand(4, 64, 576).to(layer.cache.dtype)
    layer.run()
    layer.check()
    # and what is no number makes the outputs none
    for code in codes[~codes.isfinite()].to(layer.cache.dtype):
        layer.cache[rows[1], 7] = code
        layer.run()
        assert not layer.output[0].isfinite().any()


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("seed", range(32))
def test_random_layers(seed: int) -> None:
    pick = random.Random(seed)
    kv_dtype = pick.choice(["auto", "fp8", "fp8_e5m2", "fp8_ds_mla"])
    topk = pick.choice([0, 0, pick.randint(1, 700)])
    lengths = [pick.choice([pick.randint(0, 5), pick.randint(1, 300), pick.randint(1, 6000)]) for _ in range(6)]
    queries = [min(length, pick.choice([0, 1, 1, 1, 2, pick.randint(1, 40)])) for length in lengths]
    layer = Layer(
        queries, lengths, causal=pick.random() < 0.7, topk=topk, heads=pick.choice([1, 8, 16, 24, 64, 100, 128]),
        kv_dtype=kv_dtype, dtype=torch.float16 if kv_dtype != "fp8_ds_mla" and seed % 3 == 0 else torch.bfloat16,
        scale=pick.choice([None, 0.7]) if kv_dtype in ("fp8", "fp8_e5m2") else None,
        block_size=pick.choice([1, 7, 64] if topk else [16, 48, 64, 128, 256]), kv_layout=pick.choice(["NHD", "HND"]),
    )  # fmt: skip
    layer.run()
    layer.check()


@pytest.mark.parametrize("module", [hopper_mla, triton_mla], ids=["HOPPER_MLA", "TRITON_MLA"])
def test_a_query_that_is_no_number_has_no_numbers_for_outputs(module: ModuleType) -> None:
    # over 8-bit floats queries are bounded by what float16 holds, which could make a number of it
    layer = Layer([1, 1], [70, 300], kv_dtype="fp8")
    layer.query[1, 3, 5] = torch.nan
    layer.module = module
    layer.run()
    assert layer.output[1, 3].isnan().all()
    assert layer.output[0].isfinite().all()
    assert layer.output[1, :3].isfinite().all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "fp8_ds_mla"])
def test_the_sum_of_what_is_no_number_is_none(kv_dtype: str, splits: int) -> None:
    layer = Layer([1, 1], [70, 300], kv_dtype=kv_dtype)
    layer.query[1, 3, 5] = torch.nan
    HopperLatentPlan(layer.spec, layer.batch, splits=splits).run(layer.call)
    for found in (layer.output[:2].amax(2), layer.lse[:, :2].T):
        assert found.isnan().nonzero().tolist() == [[1, 3]]
