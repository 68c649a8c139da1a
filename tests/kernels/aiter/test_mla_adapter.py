"""The adapter of MLA over aiter, run from end to end on a CPU over a fake aiter that computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.stand_ins.aiter_layers import check, check_all_is_called, check_calls, filled, latent_layer
from support.stand_ins.fake_aiter import Fake

from attnreg import Platform, Registry
from attnreg.kernels import reference
from attnreg.runtime.interface import (
    BatchError,
    BatchMetadata,
    KVCache,
    LayerParams,
    SpecError,
    UnclaimedError,
)

LENGTHS = {
    "decode": ([1, 1, 1], [40, 1, 17]),
    "verification": ([3, 3], [20, 3]),
    "uneven": ([1, 3, 0, 2], [20, 30, 12, 2]),
    "prompts": ([9, 0, 1, 6], [9, 4, 33, 26]),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("pattern", LENGTHS)
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 48, 128])
def test_mla(
    fake: Fake, registry: Registry, mi350: Platform, heads: int, pattern: str, lse: bool, causal: bool
) -> None:
    features = [*(["lse"] if lse else []), *([] if causal else ["non_causal"])]
    layer = latent_layer(registry, mi350, heads, features=features)
    queries, keys = LENGTHS[pattern]
    cache, table = filled(layer, keys)
    batch = BatchMetadata.build(queries, keys, block_table=table, causal=causal)
    tokens = batch.num_tokens
    query = torch.randn(tokens + 2, heads, 576).bfloat16()
    output = torch.full((tokens + 2, heads, 512), torch.nan, dtype=torch.bfloat16)
    total = torch.full((heads, tokens + 2), torch.nan) if lse else None
    layer.attend(query, cache, batch, output, lse=total)
    check(layer, batch, query, output, cache)
    assert output[tokens:].isnan().all()
    if total is not None:
        exact = reference.attention(layer.spec, batch, query, cache)
        torch.testing.assert_close(total[:, :tokens].double(), exact.lse, rtol=1e-5, atol=1e-4)
        assert total[:, tokens:].isnan().all()
    check_calls(fake.calls, "ROCM_AITER_MLA")
    prompts = pattern == "prompts" and causal and not lse and heads in (16, 128)
    ((name, given),) = fake.calls
    assert name == ("mla_prefill_fwd" if prompts else "mla_decode_fwd")
    whole = heads in (16, 32, 128) and (pattern == "decode" or (pattern == "verification" and causal))
    assert given["max_seqlen_q"] == (max(queries) if whole or prompts else 1)
    assert given["q"].shape[:2] == ((tokens, heads) if whole or prompts else (tokens * -(-heads // 16), 16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [4, 16, 32])
def test_mla_with_an_fp8_cache_rounds_its_queries_too(
    fake: Fake, registry: Registry, mi350: Platform, heads: int, dtype: str
) -> None:
    scale = torch.tensor([0.25])
    params = LayerParams(k_scale=scale, v_scale=scale)
    layer = latent_layer(registry, mi350, heads, kv_dtype="fp8", dtype=dtype, params=params)
    cache, table = filled(layer, [20, 40])
    batch = BatchMetadata.build([1, 1], [20, 40], block_table=table)
    query = torch.randn(2, heads, 576).to(layer.spec.dtype)
    output = torch.full((2, heads, 512), torch.nan, dtype=layer.spec.dtype)
    layer.attend(query, cache, batch, output)
    # against the queries as they were rounded, the result is exact
    ((_, given),) = fake.calls
    rounded = (given["q"].float() * given["q_scale"]).view(2, -1, 576)[:, :heads]
    assert (rounded - query.float()).abs().max() <= 2**-4 * query.float().abs().max()
    check(layer, batch, rounded, output, cache)
    check_calls(fake.calls, "ROCM_AITER_MLA")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_mla_writes_latents_alone(fake: Fake, registry: Registry, mi350: Platform, layout: str) -> None:
    layer = latent_layer(registry, mi350, kv_layout=layout)
    cache, table = filled(layer, [20])
    before = cache.key.clone()
    batch = BatchMetadata.build([2], [20], block_table=table, slot_mapping=torch.tensor([5, -1]))
    key = torch.randn(2, 1, 576).bfloat16()
    layer.write_kv(key[..., :512], key[..., 512:], cache, batch)
    tokens = cache.key if layout == "NHD" else cache.key.transpose(1, 2)
    assert torch.equal(tokens[0, 5], key[0])
    assert int((cache.key != before).any(-1).sum()) == 1


def test_all_that_the_record_says_of_mla_is_passed(fake: Fake, registry: Registry, mi350: Platform) -> None:
    scale = torch.tensor([0.25])
    params = LayerParams(k_scale=scale, v_scale=scale)
    quantised = latent_layer(registry, mi350, kv_dtype="fp8", params=params)
    for layer, (queries, keys) in ((quantised, LENGTHS["decode"]), (latent_layer(registry, mi350), LENGTHS["prompts"])):
        cache, table = filled(layer, keys)
        batch = BatchMetadata.build(queries, keys, block_table=table)
        query = torch.randn(batch.num_tokens, 16, 576).bfloat16()
        layer.attend(query, cache, batch, query.new_empty(batch.num_tokens, 16, 512))
    check_all_is_called(fake.calls, "ROCM_AITER_MLA")


def test_mla_refuses_what_its_kernels_cannot_read(fake: Fake, registry: Registry, mi350: Platform) -> None:
    layer = latent_layer(registry, mi350)
    module, spec = layer.module, layer.spec
    table = torch.zeros(1, 1, dtype=torch.int32)
    batch = BatchMetadata.build([1], [1], block_table=table)
    own = torch.zeros(2, 16, 1, 576, dtype=torch.bfloat16)
    apart = torch.zeros(2, 2, 16, 1, 576, dtype=torch.bfloat16)[:, 0]
    query, output = torch.zeros(1, 16, 576).bfloat16(), torch.zeros(1, 16, 512).bfloat16()
    refused: list[tuple[Any, type[Exception], str]] = [
        (
            lambda: layer.attend(query, KVCache(own, own.clone()[..., :512]), batch, output),
            BatchError,
            "kv_cache.value has memory of its own; of latents it is kv_cache.key[..., :head_size_v]",
        ),
        (
            lambda: layer.attend(query, KVCache(apart, apart[..., :512]), batch, output),
            BatchError,
            "kv_cache.key has gaps; aiter's kernels for MLA read the slots of a dense cache",
        ),
        (
            lambda: module.plan(spec, BatchMetadata.build([1])),
            BatchError,
            "there is no block_table: MLA in its latent form reads the cache",
        ),
        (
            lambda: module.plan(replace(spec, latent=False), batch),
            SpecError,
            "the layer is not MLA in its latent form; ROCM_AITER_MLA computes nothing else",
        ),
        (
            lambda: module.plan(replace(spec, head_size_v=256), batch),
            UnclaimedError,
            "head sizes 576 and 256: the kernels are compiled for (576, 512)",
        ),
        (
            lambda: module.plan(replace(spec, dtype=torch.float16), batch),
            UnclaimedError,
            "dtype torch.float16, kv_dtype auto: the kernels know bfloat16 and fp8",
        ),
        (
            lambda: module.kv_cache_shape(replace(spec, kv_dtype="fp8_e5m2"), 2),
            UnclaimedError,
            "kv_dtype fp8_e5m2: the cache holds float8_e5m2, and on this GPU aiter reads float8_e4m3fn",
        ),
    ]
    for call, error, message in refused:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value) == message
    assert fake.calls == []
