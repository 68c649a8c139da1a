"""Prompts of MLA: new tokens, context in chunks, and their merge, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.layers.mla import filled_cache, mla_spec
from torch import Tensor

from attnreg.kernels import cpu_attn, torch_sdpa, triton_attn
from attnreg.kernels.dense import prompts as torch_prefill
from attnreg.kernels.mla import reference as mla_reference
from attnreg.runtime.interface import BatchError, BatchMetadata, SpecError
from attnreg.runtime.mla.interface import MLASpec
from attnreg.runtime.mla.prompts import ContextPiece, ExpandedPrompts, chunks_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODULES = {"triton": triton_attn, "dense": cpu_attn, "torch": torch_prefill}
SCALE = torch.tensor([0.25], device=DEVICE)
QUERIES, CONTEXTS = [5, 3, 1, 0, 20, 4], [0, 17, 32, 9, 0, 70]


class Layer:
    """A layer's tensors, and the batch of some lengths."""

    def __init__(self, queries: list[int], contexts: list[int], *, causal: Any = True, **changes: Any) -> None:
        torch.manual_seed(len(queries))
        self.spec: MLASpec = mla_spec(**({"dtype": torch.float32} | changes))
        dtype = self.spec.latent.dtype
        quantised = self.spec.latent.kv_dtype == "fp8"
        lengths = [q + c for q, c in zip(queries, contexts, strict=True)]
        cache, table = filled_cache(self.spec, lengths, SCALE.cpu() if quantised else None)
        self.scale, self.cache = SCALE if quantised else None, cache.to(DEVICE)
        self.batch = BatchMetadata.build(queries, lengths, device=DEVICE, block_table=table.to(DEVICE), causal=causal)
        tokens = sum(queries)
        self.weight = (torch.randn(self.spec.num_heads * 48, self.spec.kv_lora_rank) * 0.1).to(DEVICE, dtype)
        # two rows of padding
        self.query = torch.randn(tokens + 2, self.spec.num_heads, self.spec.qk_head_dim).to(DEVICE, dtype)
        self.new = tuple(
            torch.randn(tokens + 2, n).to(DEVICE, dtype) for n in (self.spec.kv_lora_rank, self.spec.qk_rope_head_dim)
        )

    def run(
        self, module: Any, workspace_tokens: int = 64, *, with_lse: bool = True, **changes: Any
    ) -> tuple[Tensor, Tensor]:
        prompts = ExpandedPrompts(
            self.spec, module, self.weight, kv_scale=self.scale, workspace_tokens=workspace_tokens
        )
        output = torch.full(
            (len(self.query), self.spec.num_heads, 16), torch.nan, dtype=self.query.dtype, device=DEVICE
        )
        total = torch.full((self.spec.num_heads, len(self.query)), torch.nan, device=DEVICE)
        given = {
            "query": self.query, "latent": self.new[0], "rope": self.new[1], "cache": self.cache, "batch": self.batch,
            "output": output, "lse": total if with_lse else None,
        }  # fmt: skip
        prompts(**(given | changes))
        return output, total

    def check(self, module: Any, workspace_tokens: int = 64, tolerance: float = 2e-5) -> None:
        output, lse = self.run(module, workspace_tokens)
        n = self.batch.num_tokens
        new = self.new[0][:n], self.new[1][:n]
        exact = mla_reference.attention(
            self.spec, self.batch, self.query[:n], self.cache, self.weight, kv_scale=self.scale, new=new,
            decode_queries=0,
        )  # fmt: skip
        torch.testing.assert_close(output[:n].double(), exact.output, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[:, :n].double(), exact.lse, atol=tolerance, rtol=tolerance)
        assert output[n:].isnan().all()
        assert lse[:, n:].isnan().all()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Memory that is allocated uninitialised holds NaN, infinities or huge numbers; the sizes of what was allocated."""
    empty, sizes = torch.Tensor.new_empty, []

    def poisoned_empty(self: Tensor, *size: Any, **more: Any) -> Tensor:
        memory = empty(self, *size, **more)
        sizes.append(memory.numel())
        if memory.is_floating_point():
            memory.fill_((torch.nan, torch.inf, torch.finfo(memory.dtype).max)[len(sizes) % 3])
        return memory

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned_empty)
    return sizes


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("workspace_tokens", [16, 17, 32, 119, 128])
def test_any_chunks_give_the_exact_result(module: str, workspace_tokens: int) -> None:
    Layer(QUERIES, CONTEXTS).check(MODULES[module], workspace_tokens)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("queries", "contexts"),
    [
        ([7, 4], [0, 0]),
        ([3, 2], [32, 16]),
        ([1], [64]),
        ([2, 3, 4], [16, 0, 48]),
        ([0, 3], [40, 0]),
        ([0], [0]),
    ],
)
def test_contexts_that_end_with_a_chunk_or_are_none(module: str, queries: list[int], contexts: list[int]) -> None:
    Layer(queries, contexts).check(MODULES[module], 32)


@pytest.mark.parametrize("causal", [False, [True, False, True, True, False, False]])
def test_new_tokens_that_see_each_other(causal: Any) -> None:
    for module in MODULES.values():
        Layer(QUERIES, CONTEXTS, causal=causal).check(module, 40)


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"kv_dtype": "fp8"}, 2e-5),
        ({"kv_dtype": "auto", "dtype": torch.bfloat16}, 3e-2),
        ({"kv_dtype": "fp8", "dtype": torch.float16}, 1e-2),
        ({"kv_dtype": "fp8_ds_mla", "dtype": torch.bfloat16}, 5e-2),
        ({"block_size": 48}, 2e-5),
        ({"kv_layout": "HND"}, 2e-5),
    ],
)
def test_every_cache_is_read(changes: dict[str, Any], tolerance: float) -> None:
    # Triton's interpreter cannot multiply bfloat16
    module = cpu_attn if changes.get("dtype") == torch.bfloat16 else triton_attn
    Layer(QUERIES, CONTEXTS, **changes).check(module, 50, tolerance)


def test_padding_of_a_batch_has_no_key() -> None:
    layer = Layer([3, 2], [17, 9])
    lengths = torch.tensor([20, 0], dtype=torch.int32)
    layer.batch = replace(layer.batch, seq_lens=lengths.to(DEVICE), seq_lens_cpu=lengths)
    for module in MODULES.values():
        output, lse = layer.run(module)
        assert (output[3:5] == 0).all()
        assert (lse[:, 3:5] == -torch.inf).all()
        assert output[:3].isfinite().all()


@pytest.mark.parametrize("name", MODULES)
def test_the_device_is_right_where_the_host_knows_bounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, module = Layer(QUERIES, CONTEXTS), MODULES[name]
    more = torch.tensor([0, 15, 16, 40, 30, 90], dtype=torch.int32)
    # a table has room for the bounds, in columns that name no block
    table = layer.batch.block_table
    assert table is not None
    table = torch.cat([table, table.new_full((len(more), 5), 2**30)], dim=1)
    bounds = layer.batch.seq_lens_cpu + more
    batch = replace(layer.batch, seq_lens_cpu=bounds, max_seq_len=300, block_table=table)
    monkeypatch.setattr(BatchMetadata, "on_host", False)
    monkeypatch.setattr(BatchMetadata, "host_lens", property(lambda batch: batch.seq_lens_cpu))
    layer.batch, given, plan = batch, list[BatchMetadata](), module.plan
    monkeypatch.setattr(module, "plan", lambda spec, batch: given.append(batch) or plan(spec, batch))
    layer.check(module, 48)
    # packed keys lie one behind the other, in as many rows as the host says at least
    assert len(given) > 2
    for batch in given[1:]:
        assert batch.key_start_loc is None or batch.key_start_loc.diff().tolist() == batch.seq_lens.tolist()
        assert (batch.seq_lens <= batch.seq_lens_cpu).all()
    exact = all((batch.seq_lens == batch.seq_lens_cpu).all() for batch in given)
    # a module that computes from the host's lengths gets the device's
    assert exact == (module is not triton_attn)


def test_expanded_context_fits_the_workspace(poisoned: list[int]) -> None:
    layer = Layer([4, 2], [500, 300])
    poisoned.clear()
    layer.run(triton_attn, 48)
    heads = layer.spec.num_heads
    # keys, and keys with values as kv_b_proj makes them
    assert max(poisoned) <= 48 * heads * 48
    assert sum(poisoned) < 3 * 48 * heads * 48


def test_strides_are_free() -> None:
    layer = Layer(QUERIES, CONTEXTS)
    n = len(layer.query)
    wide = torch.full((n, layer.spec.num_heads + 3, 60), torch.nan, device=DEVICE)
    wide[:, 1:5, 5:53] = layer.query
    apart = torch.full((*layer.cache.shape[:2], 100), torch.nan, device=DEVICE)
    apart[..., 7:87] = layer.cache
    whole = torch.full((n, 9, 40), torch.nan, device=DEVICE)
    lse = torch.full((n, layer.spec.num_heads), torch.nan, device=DEVICE).t()
    expected, expected_lse = layer.run(triton_attn)
    layer.run(triton_attn, query=wide[:, 1:5, 5:53], cache=apart[..., 7:87], output=whole[:, 2:6, 3:19], lse=lse)
    torch.testing.assert_close(whole[:, 2:6, 3:19], expected, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse, equal_nan=True)


def test_an_lse_is_needed_only_for_context() -> None:
    layer = Layer([4, 2], [0, 0], features=frozenset())
    layer.spec = replace(layer.spec, expanded_features=frozenset())
    assert layer.run(torch_sdpa, with_lse=False)[0][:6].isfinite().all()
    layer = Layer([4, 0, 2], [0, 0, 0])
    # by PyTorch's function without an LSE, by scores with one
    plain, scored = (layer.run(torch_prefill, with_lse=lse)[0] for lse in (False, True))
    torch.testing.assert_close(plain, scored, equal_nan=True)
    layer = Layer([4, 2], [0, 5])
    layer.spec = replace(layer.spec, expanded_features=frozenset())
    with pytest.raises(BatchError, match="a request has context, which is merged by an lse"):
        layer.run(torch_sdpa, with_lse=False)


def test_a_plan_is_made_once_for_equal_layers_and_again_for_changed_lengths() -> None:
    layer = Layer([4, 2], [40, 50])
    layer.run(triton_attn)
    (plan,) = layer.batch.plans.values()
    layer.run(triton_attn)
    assert list(layer.batch.plans.values()) == [plan]
    layer.batch.seq_lens[1] -= 20
    layer.check(triton_attn)
    assert plan not in layer.batch.plans.values()
    # and for a table laid out anew in place: all requests read the blocks of the first
    layer.batch.block_table.as_strided_(layer.batch.block_table.shape, (0, 1))  # type: ignore[union-attr]
    layer.check(triton_attn)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"query": torch.zeros(3, 4, 48)}, "query has 3 rows; the batch has 6 tokens"),
        ({"latent": torch.zeros(8, 64).half()}, r"latent is \[8, 64\] float16; expected \[any, 64\] float32"),
        ({"rope": torch.zeros(16, 8).t()}, "rope has stride 8 in its last dimension"),
        ({"cache": torch.zeros(9, 16, 72)}, r"cache is \[9, 16, 72\] float32; expected \[any, 16, 80\] float32"),
        (
            {"output": torch.zeros(1, 4, 16, device=DEVICE).expand(8, 4, 16)},
            "output has strides .* give it memory of its own",
        ),
        ({"lse": torch.zeros(4, 5)}, "lse has 5 columns; the batch has 6 tokens"),
        ({"batch": BatchMetadata.build([6])}, "without a block_table"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(BatchError, match=error):
        Layer([4, 2], [40, 50]).run(
            triton_attn, **{k: x.to(DEVICE) if isinstance(x, Tensor) else x for k, x in changes.items()}
        )


@pytest.mark.parametrize("workspace_tokens", [0, 15, -1, True, 16.0])
def test_a_workspace_holds_a_block(workspace_tokens: Any) -> None:
    with pytest.raises(SpecError, match=r"workspace_tokens is .*; expected an integer of at least 16, the tokens of a"):
        Layer([4], [40]).run(triton_attn, workspace_tokens)


def test_chunks_are_filled_request_by_request() -> None:
    assert chunks_of([], 4) == []
    assert chunks_of([0, 0], 4) == []
    assert chunks_of([3, 6, 4, 3, 0], 4) == [
        [ContextPiece(0, 0, 3), ContextPiece(1, 0, 1)],
        [ContextPiece(1, 1, 5)],
        [ContextPiece(1, 5, 6), ContextPiece(2, 0, 3)],
        [ContextPiece(2, 3, 4), ContextPiece(3, 0, 3)],
    ]
