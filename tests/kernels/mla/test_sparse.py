"""Sparse MLA over the tokens that an indexer chose, against float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.layers.mla import filled_cache, mla_spec
from torch import Tensor

from attnreg.kernels import reference
from attnreg.kernels.mla import sparse
from attnreg.kernels.mla import torch_sparse as torch_mla_sparse
from attnreg.kernels.mla import triton_sparse as triton_mla_sparse
from attnreg.runtime.interface import BatchError, BatchMetadata, Call, LayerParams, SpecError
from attnreg.runtime.mla.interface import as_kv_cache
from attnreg.runtime.sparse.indices import validate_indices

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODULES = {"triton": triton_mla_sparse, "torch": torch_mla_sparse}
QUERIES, LENGTHS = [1, 3, 0, 2, 4], [40, 70, 9, 20, 4]


class Layer:
    """A layer's tensors, a batch of some lengths, and what its queries chose."""

    def __init__(
        self,
        queries: list[int],
        lengths: list[int],
        topk: int = 12,
        *,
        causal: Any = True,
        heads: int = 4,
        **changes: Any,
    ) -> None:
        torch.manual_seed(topk)
        draw = random.Random(topk)
        self.spec = replace(mla_spec(heads, **({"dtype": torch.float32} | changes)).latent, sparse=True)
        scale = torch.tensor([0.25]) if self.spec.kv_dtype == "fp8" else None
        cache, table = filled_cache(replace(mla_spec(heads), latent=self.spec), lengths, scale)
        self.cache, self.scale = cache.to(DEVICE), None if scale is None else scale.to(DEVICE)
        self.batch = BatchMetadata.build(queries, lengths, device=DEVICE, block_table=table.to(DEVICE), causal=causal)
        rows = []
        for i, (q, k) in enumerate(zip(queries, lengths, strict=True)):
            for j in range(q):
                end = k - q + j + 1 if (causal if isinstance(causal, bool) else causal[i]) else k
                some = draw.sample(range(end), min(end, draw.randint(0, topk)))
                rows.append([*some, *[-1] * (topk - len(some))])
                draw.shuffle(rows[-1])
        # two rows of padding
        tokens = len(rows) + 2
        self.indices = torch.tensor([*rows, *[[2**30] * topk] * 2], dtype=torch.int32, device=DEVICE)
        self.query = torch.randn(tokens, heads, self.spec.head_size).to(DEVICE, self.spec.dtype)

    def run(self, module: Any, **changes: Any) -> tuple[Tensor, Tensor]:
        tokens, heads, _ = self.query.shape
        output = torch.full((tokens, heads, self.spec.head_size_v), torch.nan, dtype=self.spec.dtype, device=DEVICE)
        lse = torch.full((heads, tokens), torch.nan, device=DEVICE)
        params = LayerParams(k_scale=self.scale, v_scale=self.scale)
        call = Call(
            self.query, as_kv_cache(self.spec, self.cache), output, lse=lse, params=params, indices=self.indices
        )
        module.forward(self.spec, module.plan(self.spec, self.batch), call._replace(**changes))
        return output, lse

    def check(self, module: Any, tolerance: float = 2e-5) -> None:
        output, lse = self.run(module)
        params = LayerParams(k_scale=self.scale, v_scale=self.scale)
        cache = as_kv_cache(self.spec, self.cache)
        exact = reference.attention(self.spec, self.batch, self.query, cache, params=params, indices=self.indices)
        n = self.batch.num_tokens
        torch.testing.assert_close(output[:n].double(), exact.output, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[:, :n].double(), exact.lse, atol=tolerance, rtol=tolerance)
        assert output[n:].isnan().all()
        assert lse[:, n:].isnan().all()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("topk", [1, 12, 33])
@pytest.mark.parametrize("causal", [True, False, [False, True, True, False, True]])
def test_a_query_attends_to_what_it_chose(module: str, topk: int, causal: Any) -> None:
    Layer(QUERIES, LENGTHS, topk, causal=causal).check(MODULES[module])


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"kv_dtype": "fp8"}, 2e-3), ({"dtype": torch.bfloat16}, 3e-2), ({"dtype": torch.float16}, 4e-3),
        ({"kv_dtype": "fp8_ds_mla", "dtype": torch.bfloat16}, 3e-2), ({"block_size": 48}, 2e-5),
        ({"block_size": 1}, 2e-5), ({"kv_layout": "HND"}, 2e-5), ({"heads": 1}, 2e-5), ({"heads": 21}, 2e-5),
    ],
)  # fmt: skip
def test_every_cache_and_number_of_heads(module: str, changes: dict[str, Any], tolerance: float) -> None:
    Layer(QUERIES, LENGTHS, **changes).check(MODULES[module], tolerance)


@pytest.mark.parametrize("module", MODULES)
def test_a_position_that_is_not_seen_contributes_nothing(module: str) -> None:
    layer = Layer(QUERIES, LENGTHS, 40)
    exact = layer.run(MODULES[module])
    free = (layer.indices == -1).nonzero()
    for at, position in zip(free.tolist(), [-2, -(2**31), 2**31 - 1, 70, 5000] * 100, strict=False):
        layer.indices[tuple(at)] = position
    # a later query's own key, and one past the end
    layer.indices[1][layer.indices[1] == 5000] = 68
    for x, y in zip(layer.run(MODULES[module]), exact, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)


@pytest.mark.parametrize("module", MODULES)
def test_one_chosen_token_is_the_output_itself(module: str) -> None:
    layer = Layer(QUERIES, LENGTHS, 1)
    ends = [k - q + j + 1 for q, k in zip(QUERIES, LENGTHS, strict=True) for j in range(q)]
    owners = [i for i, q in enumerate(QUERIES) for _ in range(q)]
    keys = by_position(layer)
    for place in (lambda end: 0, lambda end: end - 1, lambda end: end // 2, lambda end: min(end - 1, 16)):
        for row, end in enumerate(ends):
            layer.indices[row, 0] = place(end)
        output, lse = layer.run(MODULES[module])
        for row, end in enumerate(ends):
            key = keys[owners[row]][place(end)]
            torch.testing.assert_close(output[row], key[: layer.spec.head_size_v].expand(4, -1), atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(lse[:, row], layer.query[row] @ key * 0.1, atol=1e-5, rtol=1e-5)
        layer.check(MODULES[module])


@pytest.mark.parametrize("module", MODULES)
def test_a_position_that_is_given_twice_counts_twice(module: str) -> None:
    layer = Layer([1], [40], 3)
    layer.indices[0] = torch.tensor([7, 30, 7])
    output, lse = layer.run(MODULES[module])
    some = torch.stack([by_position(layer)[0][k] for k in (7, 30, 7)])
    scores = layer.query[0] @ some.T * 0.1
    exact = scores.softmax(-1) @ some[:, : layer.spec.head_size_v]
    torch.testing.assert_close(output[0], exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[:, 0], scores.logsumexp(-1), atol=1e-5, rtol=1e-5)


def by_position(layer: Layer) -> list[Tensor]:
    """The latents of each request, by position."""
    table = layer.batch.block_table
    assert table is not None
    size = layer.cache.shape[1]
    return [
        layer.cache[table[i, : -(-n // size)].long()].flatten(0, 1)[:n]
        for i, n in enumerate(layer.batch.seq_lens.tolist())
    ]


@pytest.mark.parametrize("module", MODULES)
def test_a_query_that_chose_none_is_zero(module: str) -> None:
    layer = Layer([2, 1], [9, 0])
    layer.indices[0] = -1
    output, lse = layer.run(MODULES[module])
    assert (output[[0, 2]] == 0).all()
    assert (lse[:, [0, 2]] == -torch.inf).all()


@pytest.mark.parametrize("module", MODULES)
def test_the_order_of_positions_and_their_strides_change_no_more_than_rounding(module: str) -> None:
    layer = Layer(QUERIES, LENGTHS)
    exact = layer.run(MODULES[module])
    wide = torch.full((len(layer.query), 40), 3, dtype=torch.int32, device=DEVICE)
    wide[:, 9:21] = layer.indices.flip(1)
    for x, y in zip(layer.run(MODULES[module], indices=wide[:, 9:21]), exact, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("gap", [0, 3])
def test_a_cache_whose_tokens_lie_apart(module: str, gap: int) -> None:
    layer = Layer(QUERIES, LENGTHS)
    exact = layer.run(MODULES[module])
    blocks, block_size, width = layer.cache.shape
    apart = torch.full((blocks, block_size + gap, 128), torch.nan, device=DEVICE)
    apart[:, :block_size, 8 : 8 + width] = layer.cache
    layer.cache = apart[:, :block_size, 8 : 8 + width]
    for x, y in zip(layer.run(MODULES[module]), exact, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)


@pytest.mark.parametrize("module", MODULES)
def test_blocks_between_whose_tokens_is_no_whole_number_are_refused(module: str) -> None:
    layer = Layer(QUERIES, LENGTHS)
    blocks, block_size, width = layer.cache.shape
    memory = torch.zeros(blocks * (block_size * width + 8), device=DEVICE)
    layer.cache = memory.as_strided((blocks, block_size, width), (block_size * width + 8, width, 1))
    with pytest.raises(BatchError, match="of sparse MLA a block's is a multiple of a token's"):
        layer.run(MODULES[module])


@pytest.mark.parametrize("module", MODULES)
def test_without_queries_nothing_is_written(module: str) -> None:
    for queries, lengths in (([], []), ([0, 0], [4, 0])):
        layer = Layer(queries, lengths)
        assert all(x.isnan().all() for x in layer.run(MODULES[module]))


def test_a_row_of_padding_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as memory happened to say would be read by a kernel that looks at lengths before queries."""
    layer = Layer(QUERIES, LENGTHS)
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(2**30))
    output = layer.query.new_zeros(layer.query.shape[0], 4, layer.spec.head_size_v)
    call = Call(layer.query, as_kv_cache(layer.spec, layer.cache), output, indices=layer.indices)
    _, batch, _ = sparse.by_token(layer.spec, layer.batch, call)
    tokens = layer.batch.num_tokens
    assert batch.query_start_loc.diff().tolist() == [1] * tokens + [0, 0]
    assert batch.seq_lens[tokens:].tolist() == [0, 0]


def test_a_second_run_is_bitwise_the_same() -> None:
    layer = Layer(QUERIES, LENGTHS, 33)
    for x, y in zip(layer.run(triton_mla_sparse), layer.run(triton_mla_sparse), strict=True):
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda x: None, "indices is None; expected a tensor"),
        (lambda x: x.long(), r"indices is \[12, 12\] int64; expected \[any, any\] int32"),
        (lambda x: x.t(), "indices has stride 12 in its last dimension"),
        (lambda x: x[:3], "indices has 3 rows; query has 12"),
        (lambda x: set_(x, 0, 40), r"indices\[0, 3\] is 40; the query of this row sees 40 keys: expected a position"),
        (lambda x: set_(x, 1, 68), r"indices\[1, 3\] is 68; the query of this row sees 68 keys"),
        (lambda x: set_(x, 2, -2), r"indices\[2, 3\] is -2; .* or -1 for none"),
        (lambda x: twice(x), r"indices\[3\] has the position 7 twice"),
    ],
)
def test_indices_that_do_not_fit_are_refused(change: Any, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNREG_DEBUG", "1")
    layer = Layer(QUERIES, LENGTHS)
    validate_indices(layer.spec, layer.batch, layer.indices, len(layer.query))
    with pytest.raises(BatchError, match=error):
        validate_indices(layer.spec, layer.batch, change(layer.indices), len(layer.query))


def set_(indices: Tensor, row: int, position: int) -> Tensor:
    indices[row, 3] = position
    return indices


def twice(indices: Tensor) -> Tensor:
    indices[3, :4] = torch.tensor([7, -1, 7, -1])
    return indices


def test_a_layer_of_another_kind_is_refused() -> None:
    layer = Layer(QUERIES, LENGTHS)
    with pytest.raises(BatchError, match="indices are given, but the layer is not sparse MLA"):
        validate_indices(replace(layer.spec, sparse=False), layer.batch, layer.indices, 12)
    with pytest.raises(SpecError, match="sparse and not latent"):
        replace(layer.spec, latent=False)
