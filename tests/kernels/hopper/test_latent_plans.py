"""What HOPPER_MLA refuses, and says so before a kernel is compiled or launched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from support.compilers.gluon import observed
from support.registries.asking import MLA

from attnreg import AttentionRequest, Platform, Registry
from attnreg.kernels.hopper import target
from attnreg.kernels.hopper.latents import attention as hopper_mla
from attnreg.kernels.hopper.latents import plans as latent_plans
from attnreg.kernels.hopper.latents import sparse as hopper_sparse
from attnreg.kernels.hopper.latents.plans import by_row, cache_strides, validate_spec
from attnreg.kernels.triton.target import target_for
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, KVCache, SpecError
from attnreg.selection.selector import evaluate

SPEC = AttentionSpec(
    num_heads=16, num_kv_heads=1, head_size=576, head_size_v=512, dtype=torch.bfloat16, softmax_scale=0.1,
    block_size=16, features=frozenset({"lse"}), latent=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"latent": False}, "latent form"),
        ({"head_size": 288, "head_size_v": 256}, "head_size is 288 and head_size_v 256"),
        ({"head_size": 512}, "head_size is 512"),
        ({"kv_dtype": "float16"}, "that of the cache torch.float16"),
        ({"dtype": torch.float32}, "dtype is torch.float32"),
        ({"block_size": 24}, "block_size is 24"),
    ],
)
def test_another_layer(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        validate_spec(replace(SPEC, **changes))
    validate_spec(SPEC)
    for kv_dtype in ("fp8", "fp8_e5m2", "fp8_ds_mla"):
        validate_spec(replace(SPEC, kv_dtype=kv_dtype))
    # of sparse layers, whose caches are read token by token
    sparse = replace(SPEC, block_size=24, sparse=True)
    assert hopper_sparse.kv_cache_shape(sparse, 3).key == (3, 24, 1, 576)
    with pytest.raises(SpecError, match="head_size is 512"):
        hopper_sparse.kv_cache_shape(replace(sparse, head_size=512), 3)


@pytest.mark.parametrize(
    ("backend", "arch"), [("cuda", 80), ("cuda", 89), ("cuda", 100), ("cuda", 120), ("hip", "gfx942"), ("hip", 90)]
)
def test_another_gpu_is_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, backend: str, arch: Any
) -> None:
    monkeypatch.setattr(target, "target_of", lambda device: target_for(backend, arch, 100))
    with pytest.raises(SpecError, match=rf"cuda:0 is {backend} {arch}; .* compute capability 9.0 alone"):
        target.require(torch.device("cuda", 0))
    monkeypatch.setattr(target, "target_of", lambda device: target_for("cuda", 90, 132))
    assert target.require(torch.device("cuda", 0)).num_sms == 132


def test_a_processor_is_refused() -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(SpecError, match=r"the device is cpu; .* compute capability 9.0 alone"):
        hopper_mla.plan(SPEC, BatchMetadata.build([1], [1], block_table=table))


def test_a_batch_without_a_cache() -> None:
    with pytest.raises(BatchError, match="no block_table"):
        hopper_mla.plan(SPEC, BatchMetadata.build([1], [1]))


def test_strides_of_a_cache() -> None:
    cache = torch.zeros(5, 16, 1, 576, dtype=torch.bfloat16)
    address = cache.data_ptr()
    assert address % 16 == 0
    assert cache_strides(cache, tokens_first=True) == (address, 5, 16 * 576, 576)
    assert cache_strides(cache.transpose(1, 2), tokens_first=False) == (address, 5, 16 * 576, 576)
    # blocks of several layers, one behind the other, and every second block
    assert cache_strides(cache[1::2], tokens_first=True) == (address + 16 * 576 * 2, 2, 32 * 576, 576)
    # the stride of the only block is that of nothing
    only = cache[:1].as_strided((1, 16, 1, 576), (7, 576, 576, 1))
    assert cache_strides(only, tokens_first=True)[1:] == (1, 16 * 576, 576)
    wide = torch.zeros(3, 16, 1, 640, dtype=torch.bfloat16)[..., :576]
    assert cache_strides(wide, tokens_first=True)[1:] == (3, 16 * 640, 640)
    # blocks that begin between tokens, and more tokens than 32 bits count
    between = torch.empty(5 * 9300, dtype=torch.bfloat16).as_strided((3, 16, 1, 576), (16 * 576 + 8, 576, 576, 1))
    assert cache_strides(between, tokens_first=True)[1:] == (3, 16 * 576 + 8, 576)
    far = torch.empty(2**28, 16, 1, 576, dtype=torch.bfloat16, device="meta")
    assert cache_strides(far, tokens_first=True)[1:] == (2**28, 16 * 576, 576)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.uint8])
def test_strides_that_lead_nowhere_are_no_words(kv_dtype: torch.dtype) -> None:
    width = 576 if kv_dtype != torch.uint8 else 656
    memory = torch.arange(16 * width, dtype=torch.int32).to(torch.uint8).view(kv_dtype)
    # of the only block, and of the one head
    cache = memory.as_strided((1, 16, 1, width), (7, width, 5, 1))
    words, scales = by_row(cache, cache_strides(cache, tokens_first=True), True)
    assert words.stride()[:2] == (16 * width // 4, width // 4)
    assert torch.equal(words.flatten().view(torch.uint8), memory.view(torch.uint8))
    assert (scales is None) == (width == 576)
    turned = memory.as_strided((1, 1, 16, width), (7, 5, width, 1))
    assert torch.equal(by_row(turned, cache_strides(turned, tokens_first=False), False)[0].flatten(), words.flatten())


@pytest.mark.parametrize(
    ("strides", "offset"),
    [((16 * 580, 580), 0), ((16 * 576, 576), 4), ((16 * 576 + 4, 576), 0), ((16 * 576, 0), 0), ((0, 576), 0)],
)
def test_a_cache_that_the_hardware_cannot_copy(strides: tuple[int, int], offset: int) -> None:
    memory = torch.zeros(5 * 16 * 600, dtype=torch.bfloat16)
    assert memory.data_ptr() % 16 == 0
    cache = memory.as_strided((3, 16, 1, 576), (*strides, 576, 1), offset)
    with pytest.raises(BatchError, match=r"kv_cache.key has strides .* TRITON_MLA_SPARSE read any"):
        cache_strides(cache, tokens_first=True)


def test_a_launch_is_made_once_for_caches_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_plans, "require", lambda device: target_for("cuda", 90, 132))
    table = torch.zeros(1, 4, dtype=torch.int32)
    plan = latent_plans.HopperLatentPlan(SPEC, BatchMetadata.build([1], [50], block_table=table))
    query, output = torch.zeros(1, 16, 576).bfloat16(), torch.zeros(1, 16, 512).bfloat16()
    # others than before in their places, blocks and strides
    whole = torch.zeros(2, 9, 16, 1, 576, dtype=torch.bfloat16)
    caches = [whole[0, :4], whole[1, 1:5], whole[1], whole[0, ::2]]
    with observed() as launches:
        for cache in caches:
            plan.run(Call(query, KVCache(cache, cache[..., :512]), output))
    latent_plans._launches.cache_clear()
    assert len(plan.launches.runs) == 1
    # each is cut in parts, which a merge joins
    launches = [launch for launch in launches if launch[0].function.__name__ == "latent_attention_kernel"]
    assert len(launches) == len(caches)
    for cache, (_, arguments) in zip(caches, launches, strict=True):
        for name, columns in (("wide_desc", 256), ("narrow_desc", 64)):
            found = arguments[name]
            assert found.base.data_ptr() == cache.data_ptr()
            assert found.shape == [len(cache), 2, 9, 8, 64]
            assert found.strides == [cache.stride(0), 8 * 576, 64, 576, 1]
            assert found.block_shape == [1, 2, columns // 64, 8, 64]


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("HOPPER_MLA", MLA),
        ("HOPPER_MLA_SPARSE", {**MLA, "attention": "mla_sparse"}),
        ("HOPPER_PREFILL", {**MLA, "phase": "prefill", "head_size": 192}),
        ("HOPPER_ATTN", {"head_size": 128, "block_size": 16}),
    ],
)
def test_only_an_older_triton_is_refused(default: Registry, name: str, asked: dict[str, Any]) -> None:
    request = AttentionRequest(**asked, dtype="bfloat16")
    platforms = [
        Platform(platform="cuda", arch="sm90", packages={"torch": "2.11", "triton": v})
        for v in ("3.5.1", triton.__version__, "3.9.0", "3.10.0", "3.9.0+git1234", "4.0.0")
    ]
    refused, *accepted = (evaluate(request, p, default, name) for p in platforms)
    assert refused.chosen is None
    reasons = [r.text for c in refused.candidates for r in c.reasons]
    assert reasons == ["package triton is version 3.5.1; needs >=3.6"]
    assert all(selection.chosen is not None for selection in accepted)
