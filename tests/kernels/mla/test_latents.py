"""The kernels of MLA in its latent form, in Triton's interpreter and in PyTorch, against the float64 reference."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from support.layers.mla import filled_cache, mla_spec
from torch import Tensor

from attnreg.conformance.bounds import bounds
from attnreg.kernels import reference, torch_mla, triton_mla
from attnreg.runtime import latents
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, LayerParams, SpecError
from attnreg.runtime.mla.interface import MLASpec, as_kv_cache

MODULES = [triton_mla, torch_mla]
MIXED = [1, 0, 5, 1, 20], [300, 0, 17, 1, 33]


def latent_call(spec: MLASpec, batch: BatchMetadata, cache: Tensor, scale: Tensor | None = None) -> Call:
    """A call with poison in the rows of padding and in all that is written."""
    layer, rows = spec.latent, batch.num_tokens + 2
    query = torch.randn(rows, layer.num_heads, layer.head_size).to(layer.dtype)
    query[batch.num_tokens :] = torch.nan
    output = torch.full((rows, layer.num_heads, layer.head_size_v), torch.nan, dtype=layer.dtype)
    lse = torch.full((layer.num_heads, rows), torch.nan)
    params = LayerParams(k_scale=scale, v_scale=scale)
    return Call(query, as_kv_cache(layer, cache), output, None, None, lse, params)


def verify(spec: AttentionSpec, batch: BatchMetadata, call: Call) -> None:
    """Assert that output and lse are the reference's but for rounding, and that padding is as it was."""
    exact = reference.attention(spec, batch, call.query, call.kv_cache, params=call.params)
    allowed, allowed_lse = bounds(spec, batch, exact, 8.0)
    n = batch.num_tokens
    assert call.lse is not None
    assert ((call.output[:n].double() - exact.output).abs() <= allowed).all()
    lse = call.lse[:, :n].double()
    assert ((lse == exact.lse) | ((lse - exact.lse).abs() <= allowed_lse)).all()
    assert call.output[n:].isnan().all()
    assert call.lse[:, n:].isnan().all()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_dtype": "fp8", "num_heads": 16},
        {"kv_dtype": "fp8_e5m2", "block_size": 48},
        {"kv_dtype": "fp8_ds_mla"},
        {"head_size": 64, "head_size_v": 64, "num_heads": 40},
        {"head_size": 69, "head_size_v": 48, "block_size": 64, "dtype": torch.float16},
        {"head_size": 288, "head_size_v": 256, "kv_layout": "HND"},
        {"num_heads": 20, "features": frozenset({"lse", "batch_invariant"})},
    ],
    ids=["plain", "fp8", "e5m2", "ds_mla", "no rotary part", "odd sizes", "MiniCPM3", "batch invariant"],
)
def test_any_batch(module: ModuleType, changes: dict[str, Any], causal: bool) -> None:
    spec = mla_spec(**changes)
    scale = torch.tensor([0.25]) if str(changes.get("kv_dtype")) in ("fp8", "fp8_e5m2") else None
    cache, table = filled_cache(spec, MIXED[1], scale)
    batch = BatchMetadata.build(*MIXED, block_table=table, causal=causal)
    call = latent_call(spec, batch, cache, scale)
    module.forward(spec.latent, module.plan(spec.latent, batch), call)
    verify(spec.latent, batch, call)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("features", [{"lse"}, {"lse", "batch_invariant"}], ids=["whole", "split"])
def test_a_query_that_is_no_number_has_none_for_its_sum(module: ModuleType, kv_dtype: str, features: set[str]) -> None:
    spec = mla_spec(kv_dtype=kv_dtype, features=frozenset(features))
    cache, table = filled_cache(spec, [40, 7])
    batch = BatchMetadata.build([1, 1], [40, 7], block_table=table)
    call = latent_call(spec, batch, cache)
    call.query[1, 2, 5] = torch.nan
    module.forward(spec.latent, module.plan(spec.latent, batch), call)
    assert call.lse is not None
    for found in (call.output[:2].amax(2), call.lse[:, :2].T):
        assert found.isnan().nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("module", MODULES)
def test_any_strides(module: ModuleType) -> None:
    spec = mla_spec(dtype=torch.float16)
    dense, table = filled_cache(spec, MIXED[1])
    wide = torch.full((2, *dense.shape[:2], 96), torch.nan, dtype=dense.dtype)
    wide[1, :, :, 3:83] = dense
    batch = BatchMetadata.build(*MIXED, block_table=table)
    call = latent_call(spec, batch, wide[1, :, :, 3:83])
    rows, heads, size = call.query.shape
    apart = torch.full((heads, rows, size + 5), torch.nan, dtype=dense.dtype).transpose(0, 1)[:, :, 2 : size + 2]
    apart.copy_(call.query)
    output = torch.full((rows, heads + 1, 70), torch.nan, dtype=dense.dtype)
    call = call._replace(query=apart, output=output[:, 1:, 1:65])
    module.forward(spec.latent, module.plan(spec.latent, batch), call)
    verify(spec.latent, batch, call)
    output[:, 1:, 1:65] = torch.nan
    assert output.isnan().all()


def test_a_plan_serves_any_lengths_within_its_bounds() -> None:
    spec = mla_spec(dtype=torch.float16)
    cache, table = filled_cache(spec, MIXED[1])
    actual = BatchMetadata.build(*MIXED, block_table=table)
    captured = BatchMetadata(
        query_start_loc=actual.query_start_loc, seq_lens=actual.seq_lens, max_query_len=32, max_seq_len=4096,
        query_start_loc_cpu=torch.arange(6, dtype=torch.int32), seq_lens_cpu=torch.full((5,), 4096, dtype=torch.int32),
        block_table=table,
    )  # fmt: skip
    call = latent_call(spec, actual, cache)
    triton_mla.forward(spec.latent, triton_mla.plan(spec.latent, captured), call)
    verify(spec.latent, actual, call)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "fp8_ds_mla"])
def test_new_latents_are_written_in_their_two_parts(module: ModuleType, kv_dtype: str) -> None:
    spec = mla_spec(kv_dtype=kv_dtype)
    layer, scale = spec.latent, torch.tensor([0.25]) if kv_dtype == "fp8" else None
    cache, table = filled_cache(spec, [20], scale)
    slots = torch.tensor([3, -1, 40, 9])
    before = cache.view(torch.uint8).clone()
    # as models have them: a part of a projection's output, and one rotary part
    latent = torch.randn(4, layer.head_size_v + 7).bfloat16()[:, None, : layer.head_size_v]
    rope = torch.randn(4, 1, layer.head_size - layer.head_size_v).bfloat16()
    batch = BatchMetadata.build([4], [20], block_table=table, slot_mapping=slots)
    params = LayerParams(k_scale=scale, v_scale=scale)
    module.write_kv(layer, module.plan(layer, batch), latent, rope, as_kv_cache(layer, cache), params=params)
    both = torch.cat([latent, rope], -1)[:, 0]
    expected = latents.packed(latent[:, 0], rope[:, 0]) if kv_dtype == "fp8_ds_mla" else both
    expected = (both.float() / scale).to(cache.dtype) if scale is not None else expected
    for row, slot in ((0, 3), (2, 40), (3, 9)):
        stored = cache[slot // 16, slot % 16]
        assert torch.equal(stored.view(torch.uint8), expected[row].view(torch.uint8))
        cache.view(torch.uint8)[slot // 16, slot % 16] = before[slot // 16, slot % 16]
    assert torch.equal(cache.view(torch.uint8), before)


def test_what_the_kernels_do_not_compute_is_refused() -> None:
    batch = BatchMetadata.build([1], [1], block_table=torch.zeros(1, 1, dtype=torch.int32))
    plain = AttentionSpec(
        num_heads=1, num_kv_heads=1, head_size=64, head_size_v=64, dtype=torch.float16, softmax_scale=1.0, block_size=16
    )
    for module in MODULES:
        with pytest.raises(SpecError, match=r"the layer is .* MLA in its latent form"):
            module.plan(plain, batch)
        with pytest.raises(BatchError, match="the batch has no block_table: MLA in its latent form reads the cache"):
            module.plan(mla_spec().latent, BatchMetadata.build([1]))
    for size, size_v in ((700, 512), (600, 528), (64, 40)):
        with pytest.raises(SpecError, match=f"head_size is {size} and head_size_v {size_v}; the kernel computes"):
            triton_mla.plan(mla_spec(head_size=size, head_size_v=size_v).latent, batch)


def test_bytes_at_odd_places_are_refused() -> None:
    spec = mla_spec(kv_dtype="fp8_ds_mla")
    cache, table = filled_cache(spec, [9])
    odd = torch.zeros(*cache.shape[:2], 658, dtype=torch.uint8)[..., :656]
    batch = BatchMetadata.build([1], [9], block_table=table, slot_mapping=torch.tensor([3]))
    call = latent_call(spec, batch, odd)
    with pytest.raises(BatchError, match="fp8_ds_mla holds float32 scales, which lie at multiples of 4"):
        triton_mla.forward(spec.latent, triton_mla.plan(spec.latent, batch), call)
