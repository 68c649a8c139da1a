"""The adapters over aiter, run from end to end on a CPU over a fake aiter that computes: every claim of their rows."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from support.stand_ins import fake_aiter
from support.stand_ins.aiter_layers import MHA, check, check_all_is_called, filled, latent_layer, make
from support.stand_ins.fake_aiter import Fake

from attnreg import Platform, Registry
from attnreg.conformance.verify import verify
from attnreg.runtime.interface import (
    BatchMetadata,
    Call,
    UnclaimedError,
)


@pytest.mark.parametrize("backend", MHA)
def test_what_a_row_claims_is_so_through_aiter(fake: Fake, registry: Registry, mi350: Platform, backend: str) -> None:
    # the process that probes modules has no fake, and probes those alone that are not imported here
    make(registry, mi350, backend)
    (evidence,) = verify([backend], registry=registry, platform=mi350, device="cpu", size="pairs")
    assert (evidence.problems, evidence.undecided) == ([], [])
    # about host and device, and of no run on one device
    assert evidence.unproven == ["adaptive_verification"]
    assert evidence.claims["features"].keys() == registry.backends[backend].variants[-1].served - {
        "adaptive_verification"
    }
    check_all_is_called(fake.calls, backend)


MIXED = [(1, 40), (1, 17), (5, 9), (0, 12), (1, 1), (20, 33), (1, 64), (0, 0), (1, 2)]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("backend", MHA)
def test_requests_of_all_kinds_in_any_order(
    fake: Fake, registry: Registry, mi350: Platform, backend: str, layout: str
) -> None:
    layer = make(registry, mi350, backend, kv_layout=layout)
    cache, table = filled(layer, [k for _, k in MIXED])
    batch = BatchMetadata.build([q for q, _ in MIXED], [k for _, k in MIXED], block_table=table)
    query = torch.randn(batch.num_tokens, 4, 64, dtype=torch.bfloat16)
    output = torch.full_like(query, torch.nan)
    layer.attend(query, cache, batch, output)
    check(layer, batch, query, output, cache)
    if backend == "ROCM_AITER_FA":
        # decodes that stand together share a call, and so do the other requests
        paged, packed = "paged_attention_v1", "flash_attn_varlen_func"
        assert [name for name, _ in fake.calls] == [paged, packed, paged, packed, paged, paged]


def test_long_prompts_are_gathered_piece_by_piece(
    fake: Fake, registry: Registry, mi350: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make(registry, mi350, "ROCM_AITER_FA")
    monkeypatch.setattr(layer.module, "KEYS", 40)
    lengths = [20, 20, 50, 3, 10]
    cache, table = filled(layer, lengths)
    batch = BatchMetadata.build([2] * 5, lengths, block_table=table)
    query = torch.randn(10, 4, 64, dtype=torch.bfloat16)
    output = torch.full_like(query, torch.nan)
    layer.attend(query, cache, batch, output)
    check(layer, batch, query, output, cache)
    assert [given["k"].shape[0] for _, given in fake.calls] == [40, 50, 13]


@pytest.mark.parametrize("backend", MHA)
def test_outputs_and_queries_with_gaps(fake: Fake, registry: Registry, mi350: Platform, backend: str) -> None:
    layer = make(registry, mi350, backend)
    for queries in ([1, 1, 1], [3, 1, 7]):
        keys = [q + 20 for q in queries]
        cache, table = filled(layer, keys)
        batch = BatchMetadata.build(queries, keys, block_table=table)
        query = torch.randn(batch.num_tokens, 6, 70, dtype=torch.bfloat16)[:, 1:5, :64]
        whole = torch.full((batch.num_tokens, 6, 70), torch.nan, dtype=torch.bfloat16)
        layer.attend(query, cache, batch, whole[:, 1:5, :64])
        check(layer, batch, query, whole[:, 1:5, :64], cache)
        assert int(whole.isnan().sum()) == whole.numel() - query.numel()


@pytest.mark.parametrize("window", [None, 1, 2, 30])
@pytest.mark.parametrize("backend", MHA)
def test_encoders_and_vision_towers(
    fake: Fake, registry: Registry, mi350: Platform, backend: str, window: int | None
) -> None:
    role = {"role": "vision"} if backend == "ROCM_AITER_FA" else {}
    features = frozenset({"sliding_window"} if window else ())
    layer = make(
        registry, mi350, backend, attn_type="encoder_only", head_size=80, block_size=None, features=features,
        sliding_window=window, **role,
    )  # fmt: skip
    batch = BatchMetadata.build([9, 1, 0, 40], causal=False)
    query, key, value = (torch.randn(52, heads, 80, dtype=torch.bfloat16) for heads in (4, 2, 2))
    output = torch.full_like(query, torch.nan)
    layer.attend(query, None, batch, output, key=key, value=value)
    check(layer, batch, query, output, None, key, value)
    # a window of one token would be taken for none
    (name,) = {name for name, _ in fake.calls}
    assert name == ("mha_batch_prefill_func" if window == 1 else "flash_attn_varlen_func")


def test_a_cache_of_16_bits_is_not_taken_for_the_format_of_the_queries(
    fake: Fake, registry: Registry, mi350: Platform
) -> None:
    layer = make(registry, mi350, "ROCM_AITER_FA", kv_dtype="float16")
    cache, table = filled(layer, [20])
    batch = BatchMetadata.build([1], [20], block_table=table)
    query = torch.randn(1, 4, 64, dtype=torch.bfloat16)
    output = torch.full_like(query, torch.nan)
    layer.attend(query, cache, batch, output)
    check(layer, batch, query, output, cache)
    assert [name for name, _ in fake.calls] == ["unified_attention"]


def test_many_query_heads_per_kv_head(fake: Fake, registry: Registry, mi350: Platform) -> None:
    for heads, name in ((16, "paged_attention_v1"), (17, "unified_attention")):
        layer = make(registry, mi350, "ROCM_AITER_FA", num_heads=heads, num_kv_heads=1)
        cache, table = filled(layer, [20])
        batch = BatchMetadata.build([1], [20], block_table=table)
        query = torch.randn(1, heads, 64, dtype=torch.bfloat16)
        output = torch.full_like(query, torch.nan)
        layer.attend(query, cache, batch, output)
        check(layer, batch, query, output, cache)
        assert fake.calls.pop()[0] == name


@pytest.mark.parametrize("window", [None, 5])
def test_no_number_of_a_layer_is_dropped(fake: Fake, registry: Registry, mi350: Platform, window: int | None) -> None:
    """A softcap reaches every function, though the row claims none: so it is not forgotten where one is claimed."""
    layer = make(registry, mi350, "ROCM_AITER_FA")
    features = frozenset({"softcap", *(["sliding_window"] if window else [])})
    layer.spec = replace(layer.spec, softcap=1.5, sliding_window=window, features=features)
    cache, table = filled(layer, [k for _, k in MIXED])
    batch = BatchMetadata.build([q for q, _ in MIXED], [k for _, k in MIXED], block_table=table)
    query = torch.randn(batch.num_tokens, 4, 64, dtype=torch.bfloat16)
    output = torch.full_like(query, torch.nan)
    layer.module.forward(layer.spec, layer.module.plan(layer.spec, batch), Call(query, cache, output))
    check(layer, batch, query, output, cache)
    decode = "unified_attention" if window else "paged_attention_v1"
    assert {name for name, _ in fake.calls} == {decode, "flash_attn_varlen_func"}


def test_one_scale_without_the_other(fake: Fake, registry: Registry, mi350: Platform) -> None:
    for backend in MHA:
        layer = make(registry, mi350, backend, kv_dtype="fp8", k_scale=torch.tensor(0.5))
        cache, table = filled(layer, [20])
        batch = BatchMetadata.build([1], [20], block_table=table)
        query = torch.randn(1, 4, 64, dtype=torch.bfloat16)
        output = torch.full_like(query, torch.nan)
        layer.attend(query, cache, batch, output)
        check(layer, batch, query, output, cache)


@pytest.mark.parametrize("backend", MHA)
def test_fp8_of_another_kind_than_this_gpus_is_refused(
    fresh: None, registry: Registry, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    # an aiter that was built for another GPU
    Fake(torch.float8_e4m3fn).install(monkeypatch)
    mi300 = Platform(platform="rocm", arch="gfx942", flags=frozenset({"aiter", "aiter_mha"}))
    layer = make(registry, mi300, backend, kv_dtype="fp8")
    with pytest.raises(UnclaimedError) as caught:
        layer.kv_cache_shape(4)
    assert str(caught.value) == (
        "kv_dtype fp8: the cache holds float8_e4m3fnuz, and on this GPU aiter reads float8_e4m3fn"
    )
    batch = BatchMetadata.build([1], [1], block_table=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(UnclaimedError):
        layer.plan(batch)


def test_the_unified_kernel_is_causal_only(fake: Fake, registry: Registry, mi350: Platform) -> None:
    layer = make(registry, mi350, "ROCM_AITER_UNIFIED_ATTN")
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(UnclaimedError) as caught:
        layer.module.plan(layer.spec, BatchMetadata.build([2], [4], block_table=table, causal=False))
    assert str(caught.value) == "non_causal: aiter's unified kernel is causal only"


def test_the_stand_in_for_the_cache_write_takes_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnreg.kernels.triton import cache

    given = inspect.signature(fake_aiter.write).parameters
    monkeypatch.undo()
    assert list(given) == list(inspect.signature(cache._write).parameters)


@pytest.mark.parametrize("backend", [*MHA, "ROCM_AITER_MLA"])
@pytest.mark.parametrize("keys", [[], [0], [5, 0]])
def test_nothing_to_compute(fake: Fake, registry: Registry, mi350: Platform, backend: str, keys: list[int]) -> None:
    layer = latent_layer(registry, mi350) if "MLA" in backend else make(registry, mi350, backend)
    cache, table = filled(layer, keys)
    batch = BatchMetadata.build([0] * len(keys), keys, block_table=table)
    query, output = (torch.full((2, layer.spec.num_heads, size), torch.nan, dtype=torch.bfloat16)
                     for size in (layer.spec.head_size, layer.spec.head_size_v))  # fmt: skip
    layer.attend(query, cache, batch, output)
    assert output.isnan().all()
    assert fake.calls == []
