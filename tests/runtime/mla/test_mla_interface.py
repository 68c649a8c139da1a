"""The contract of MLA: its two forms are one result, its cache is what it says, and what does not fit is refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.layers.mla import absorbed, filled_cache, mla_spec
from torch import Tensor

from attnreg import AttentionRequest
from attnreg.kernels import reference
from attnreg.kernels.mla import reference as mla_reference
from attnreg.runtime import latents
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, LayerParams, SpecError, paged_cache_shape
from attnreg.runtime.mla.interface import MLASpec, as_kv_cache, latent_cache_shape, projections, read_latents

SCALE = torch.tensor([0.25])


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("causal", [True, False])
def test_both_forms_have_one_result(causal: bool, kv_dtype: str) -> None:
    spec = mla_spec(kv_dtype=kv_dtype)
    scale = SCALE if kv_dtype == "fp8" else None
    cache, table = filled_cache(spec, [40, 0, 17, 1], scale)
    batch = BatchMetadata.build([1, 0, 5, 1], [40, 0, 17, 1], block_table=table, causal=causal)
    query = torch.randn(batch.num_tokens, spec.num_heads, spec.qk_head_dim, dtype=torch.float64)
    weight = torch.randn(spec.num_heads * 48, spec.kv_lora_rank).to(spec.latent.dtype)
    exact = mla_reference.attention(spec, batch, query, cache, weight, kv_scale=scale)
    kernels = as_kv_cache(spec.latent, cache)
    params = LayerParams(k_scale=scale, v_scale=scale)
    latent = reference.attention(spec.latent, batch, absorbed(spec, weight, query), kernels, params=params)
    torch.testing.assert_close(latent.lse, exact.lse)
    output = torch.einsum("thc,hvc->thv", latent.output, projections(spec, weight).w_uv.double())
    torch.testing.assert_close(output, exact.output)


def test_prompts_see_their_own_tokens_as_they_were_given() -> None:
    spec = mla_spec(kv_dtype="fp8")
    cache, table = filled_cache(spec, [9, 9], SCALE)
    batch = BatchMetadata.build([4, 1], [9, 9], block_table=table)
    query = torch.randn(5, spec.num_heads, spec.qk_head_dim, dtype=torch.float64)
    weight = torch.randn(spec.num_heads * 48, spec.kv_lora_rank).bfloat16()
    new = torch.randn(5, spec.kv_lora_rank), torch.randn(5, spec.qk_rope_head_dim)
    stored = mla_reference.attention(spec, batch, query, cache, weight, kv_scale=SCALE)
    given = mla_reference.attention(spec, batch, query, cache, weight, kv_scale=SCALE, new=new)
    # in some head of each; in another, older tokens may be all that counts
    assert not torch.isclose(stored.lse[:, :4], given.lse[:, :4]).all(dim=0).any()
    torch.testing.assert_close(stored.output[4], given.output[4])
    # the cache that holds the new tokens as they are has the same result
    exact = replace(spec, latent=replace(spec.latent, kv_dtype="auto", dtype=torch.float32))
    rows = read_latents(spec.latent, cache, SCALE)
    place = [int(table[0, k // 16]) * 16 + k % 16 for k in range(5, 9)]
    rows.flatten(0, 1)[place] = torch.cat(new, -1)[:4]
    wide = mla_reference.attention(exact, batch, query, rows, weight.float())
    torch.testing.assert_close(wide.output[:4], given.output[:4])


def test_the_specs_of_both_forms_are_those_of_the_requests() -> None:
    request = AttentionRequest(
        attention="mla", head_size=576, head_size_v=512, num_heads=16, num_kv_heads=1, block_size=64, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, features={"lse"},
    )  # fmt: skip
    latent = AttentionSpec.from_request(request)
    spec = MLASpec.from_request(request, latent)
    assert (latent.latent, latent.num_kv_heads, latent.softmax_scale) == (True, 1, 1 / math.sqrt(192))
    assert (spec.kv_lora_rank, spec.qk_rope_head_dim, spec.qk_head_dim) == (512, 64, 192)
    assert spec.expanded == replace(AttentionSpec.from_request(request.expanded()), block_size=None)
    assert (spec.expanded.head_size, spec.expanded.head_size_v, spec.expanded.softmax_scale) == (
        192,
        128,
        1 / math.sqrt(192),
    )
    assert latent_cache_shape(latent, 7) == ((7, 64, 576), torch.bfloat16)
    assert AttentionSpec.from_request(replace(request, head_size_v=None)) == latent


def test_a_latent_is_the_value_and_the_beginning_of_the_key() -> None:
    spec = mla_spec().latent
    cache = torch.randn(3, 16, spec.head_size, dtype=torch.bfloat16)
    for layout in ("NHD", "HND"):
        key, value = as_kv_cache(replace(spec, kv_layout=layout), cache)
        shape = paged_cache_shape(replace(spec, kv_layout=layout), 3)
        assert (key.shape, value.shape) == (shape.key, shape.value)
        assert value.data_ptr() == key.data_ptr() == cache.data_ptr()


def test_the_bytes_of_fp8_ds_mla() -> None:
    latent, rope = torch.zeros(1, 512), torch.zeros(1, 64)
    latent[0, 0], latent[0, 1], latent[0, 130], rope[0, 63] = 448.0, -1.0, 896.0, 1.5
    stored = latents.packed(latent, rope)
    assert stored.shape == (1, 656)
    assert latent_cache_shape(mla_spec(kv_dtype="fp8_ds_mla").latent, 2) == ((2, 16, 656), torch.uint8)
    numbers, scales, rotary = stored[0].split([512, 16, 128])
    # e4m3: 448 is 0x7E, -1 is 0xB8
    assert {i: int(b) for i, b in enumerate(numbers) if b} == {0: 0x7E, 1: 0xB8, 130: 0x7E}
    assert scales.view(torch.float32).tolist() == [1.0, 2.0, 2.0**-126, 2.0**-126]
    assert rotary.view(torch.bfloat16).tolist() == [0.0] * 63 + [1.5]
    torch.testing.assert_close(latents.unpacked(stored), torch.cat([latent, rope], -1))


def test_latents_come_back_from_fp8_ds_mla_within_the_rounding_of_their_tiles() -> None:
    latent, rope = torch.randn(40, 512) * torch.logspace(-12, 12, 40)[:, None], torch.randn(40, 64).bfloat16().float()
    # at an odd address, as a part of other memory
    memory = torch.zeros(40, 701, dtype=torch.uint8)
    memory[:, 13:669] = latents.packed(latent, rope)
    back = latents.unpacked(memory[:, 13:669])
    assert torch.equal(back[:, 512:], rope)
    largest = latent.unflatten(-1, (4, 128)).abs().amax(-1, keepdim=True).expand(-1, -1, 128).flatten(1)
    errors = (back[:, :512] - latent).abs()
    assert (errors <= latent.abs() * 2**-4 + largest / 448 * 2**-10).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 2}, "a decoder with one KV head, whose value is the beginning of its key"),
        ({"head_size_v": 65}, "num_kv_heads is 1, head_size 64, head_size_v 65, attn_type decoder; MLA in its latent"),
        ({"attn_type": "encoder"}, "MLA in its latent form is a decoder"),
        ({"kv_layout": "SPLIT"}, "kv_layout is SPLIT; latents lie in NHD or HND"),
        ({"kv_dtype": "fp8_ds_mla"}, "the format holds a latent of 512 and a rotary part of 64 in bfloat16"),
        ({"kv_dtype": "fp8_ds_mla", "latent": False}, "kv_dtype is fp8_ds_mla, which holds latents"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    fields = {
        "num_heads": 4, "num_kv_heads": 1, "head_size": 64, "head_size_v": 32, "dtype": torch.bfloat16,
        "softmax_scale": 0.1, "block_size": 16, "latent": True,
    }  # fmt: skip
    with pytest.raises(SpecError, match=re.escape(message)):
        AttentionSpec(**{**fields, **changes})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk_nope_head_dim": None}, "softmax_scale is not given, and of a latent it depends on qk_nope_head_dim"),
        ({"head_size_v": None, "qk_rope_head_dim": None}, "head_size_v is not given"),
        ({"v_head_dim": None}, "v_head_dim is not given; a layer of MLA expands latents by it"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim is 32, and a cached latent of 576 with a value of 512"),
    ],
)
def test_what_a_request_must_say(fields: dict[str, Any], message: str) -> None:
    request = AttentionRequest(
        **{
            "attention": "mla", "head_size": 576, "head_size_v": 512, "num_heads": 4, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128,
        } | fields
    )  # fmt: skip
    with pytest.raises(SpecError, match=re.escape(message)):
        MLASpec.from_request(request, AttentionSpec.from_request(request))


@pytest.mark.parametrize("weight", [torch.zeros(192, 63), torch.zeros(191, 64), torch.zeros(192, 64).half(), None])
def test_a_kv_b_proj_of_other_sizes_is_refused(weight: Tensor | None) -> None:
    expected = "a tensor" if weight is None else r"\[192, 64\] bfloat16"
    with pytest.raises(SpecError, match=rf"kv_b_proj is .*; expected {expected}"):
        projections(mla_spec(), weight)  # type: ignore[arg-type]
