"""The adapters over aiter, run from end to end on a CPU over a fake aiter that computes: every claim of their rows."""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import fake_aiter
from support.fake_aiter import Fake
from torch import Tensor

import attnreg
from attnreg import AttentionRequest, Platform, Registry
from attnreg.conformance.bounds import bounds
from attnreg.conformance.verify import verify
from attnreg.kernels import reference
from attnreg.kernels.aiter import upstream
from attnreg.runtime.interface import (
    AttentionSpec,
    BatchError,
    BatchMetadata,
    KVCache,
    LayerParams,
    SpecError,
    UnclaimedError,
)
from attnreg.runtime.layer import Attention

MHA = ("ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN")


def functions_of(row: str) -> set[str]:
    return {n.name for n in upstream.record().of(row) if n.parameters}


def check_calls(calls: list[tuple[str, dict[str, Any]]], row: str) -> None:
    """Each call is one that the record has for the row; together they pass just what the record says is passed."""
    given = defaultdict[str, set[str]](set)
    for name, arguments in calls:
        given[name] |= arguments.keys()
    assert given.keys() <= functions_of(row)
    for name, passed in given.items():
        assert passed <= {p.name for p in upstream.record().functions[name].parameters if p.passed}, name


# ordinary attention --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", MHA)
def test_what_a_row_claims_is_so_through_aiter(fake: Fake, registry: Registry, mi350: Platform, backend: str) -> None:
    (evidence,) = verify([backend], registry=registry, platform=mi350, device="cpu", size="pairs")
    assert evidence.problems == []
    # about host and device, and of no run on one device
    assert evidence.unproven == ["adaptive_verification"]
    assert evidence.claims["features"].keys() == registry.backends[backend].variants[-1].served - {
        "adaptive_verification"
    }
    check_calls(fake.calls, backend)
    assert {name for name, _ in fake.calls} == functions_of(backend)


@pytest.mark.parametrize("backend", MHA)
def test_all_that_the_record_says_is_passed_is_passed(
    fake: Fake, registry: Registry, mi350: Platform, backend: str
) -> None:
    verify([backend], registry=registry, platform=mi350, device="cpu", size="claims")
    for name, arguments in fake.calls:
        assert list(arguments) == [p.name for p in upstream.record().functions[name].parameters if p.passed]


def make(registry: Registry, platform: Platform, backend: str, **fields: Any) -> Attention:
    """A layer of 4 heads and 2 KV heads with blocks of 16: fields of its request, and numbers of its layer."""
    request = {"head_size": 64, "num_heads": 4, "num_kv_heads": 2, "block_size": 16, "dtype": "bfloat16"}
    names = AttentionRequest.__dataclass_fields__
    asked = AttentionRequest(**(request | {k: v for k, v in fields.items() if k in names}))
    selection = attnreg.select(asked, platform, registry, backend, to_run=True)
    return Attention.from_selection(selection, **{k: v for k, v in fields.items() if k not in names})


def filled(layer: Attention, seq_lens: list[int]) -> tuple[KVCache, Tensor]:
    """A cache of random numbers with all blocks in use, and the block table of requests of these lengths."""
    size = layer.spec.block_size or 1
    blocks = [-(-k // size) for k in seq_lens]
    cache = layer.new_kv_cache(sum(blocks))
    for tensor in cache:
        tensor.copy_(torch.randn(tensor.shape))
    table = torch.zeros(len(seq_lens), max([*blocks, 1]), dtype=torch.int32)
    free = torch.randperm(sum(blocks)).int()
    for row, count in zip(table, blocks, strict=True):
        row[:count], free = free[:count], free[count:]
    return cache, table


def check(layer: Attention, batch: BatchMetadata, query: Tensor, output: Tensor, *storage: Any) -> None:
    """The output is the reference's but for rounding."""
    spec, params = layer.spec, layer.params
    cache, key, value = (*storage, None, None, None)[:3]
    exact = reference.attention(spec, batch, query, cache, key=key, value=value, params=params)
    allowed, _ = bounds(spec, batch, exact, 8.0)
    assert ((output[: batch.num_tokens].double() - exact.output).abs() <= allowed).all()


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
    layer.module.forward(layer.spec, layer.module.plan(layer.spec, batch), query, cache, output)
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


def test_the_stand_in_for_the_cache_write_takes_what_the_kernel_takes() -> None:
    from attnreg.kernels.triton.launchers import write_kv as real

    assert inspect.signature(fake_aiter.write_kv).parameters.keys() == inspect.signature(real).parameters.keys()


@pytest.mark.parametrize("backend", [*MHA, "ROCM_AITER_MLA"])
@pytest.mark.parametrize("keys", [[], [0], [5, 0]])
def test_nothing_to_compute(fake: Fake, registry: Registry, mi350: Platform, backend: str, keys: list[int]) -> None:
    layer = latent_layer(registry, mi350) if "MLA" in backend else make(registry, mi350, backend)
    cache, table = latents(layer, keys) if "MLA" in backend else filled(layer, keys)
    batch = BatchMetadata.build([0] * len(keys), keys, block_table=table)
    query, output = (torch.full((2, layer.spec.num_heads, size), torch.nan, dtype=torch.bfloat16)
                     for size in (layer.spec.head_size, layer.spec.head_size_v))  # fmt: skip
    layer.attend(query, cache, batch, output)
    assert output.isnan().all()
    assert fake.calls == []


# MLA -----------------------------------------------------------------------------------------------------------------


def latent_layer(registry: Registry, platform: Platform, heads: int = 16, **fields: Any) -> Attention:
    """A layer of MLA in its latent form, and its spec: what `Attention.from_selection` does not make yet."""
    features = frozenset(fields.pop("features", ()))
    request = AttentionRequest(
        attention="mla", head_size=576, num_heads=heads, num_kv_heads=1, block_size=16, features=features,
        dtype=fields.get("dtype", "bfloat16"), kv_dtype=fields.get("kv_dtype", "auto"),
    )  # fmt: skip
    selection = attnreg.select(request, platform, registry, "ROCM_AITER_MLA", to_run=True)
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=1,
        head_size=576,
        head_size_v=512,
        dtype=getattr(torch, request.dtype),
        softmax_scale=192**-0.5,
        kv_dtype=request.kv_dtype or "auto",
        block_size=16,
        features=features,
        kv_layout=fields.get("kv_layout", "NHD"),
    )
    return Attention(selection, spec, fields.get("params", LayerParams()))


def latents(layer: Attention, seq_lens: list[int]) -> tuple[KVCache, Tensor]:
    cache, table = filled(layer, seq_lens)
    return KVCache(cache.key, cache.key[..., :512]), table


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
    cache, table = latents(layer, keys)
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
    params = LayerParams(k_scale=torch.tensor([0.25]), v_scale=torch.tensor([0.25]))
    layer = latent_layer(registry, mi350, heads, kv_dtype="fp8", dtype=dtype, params=params)
    cache, table = latents(layer, [20, 40])
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
    cache, table = latents(layer, [20])
    before = cache.key.clone()
    batch = BatchMetadata.build([2], [20], block_table=table, slot_mapping=torch.tensor([5, -1]))
    key = torch.randn(2, 1, 576).bfloat16()
    # the value is a part of the key, and is not read
    layer.write_kv(key, torch.full((2, 1, 512), torch.nan).bfloat16(), cache, batch)
    tokens = cache.key if layout == "NHD" else cache.key.transpose(1, 2)
    assert torch.equal(tokens[0, 5], key[0])
    assert int((cache.key != before).any(-1).sum()) == 1


def test_all_that_the_record_says_of_mla_is_passed(fake: Fake, registry: Registry, mi350: Platform) -> None:
    params = LayerParams(k_scale=torch.tensor([0.25]))
    quantised = latent_layer(registry, mi350, kv_dtype="fp8", params=params)
    for layer, (queries, keys) in ((quantised, LENGTHS["decode"]), (latent_layer(registry, mi350), LENGTHS["prompts"])):
        cache, table = latents(layer, keys)
        batch = BatchMetadata.build(queries, keys, block_table=table)
        query = torch.randn(batch.num_tokens, 16, 576).bfloat16()
        layer.attend(query, cache, batch, query.new_empty(batch.num_tokens, 16, 512))
    for name, arguments in fake.calls:
        recorded = {p.name for p in upstream.record().functions[name].parameters if p.passed}
        assert arguments.keys() == recorded
    assert {name for name, _ in fake.calls} == functions_of("ROCM_AITER_MLA")


def test_mla_refuses_what_its_kernels_cannot_read(fake: Fake, registry: Registry, mi350: Platform) -> None:
    layer = latent_layer(registry, mi350)
    module, spec = layer.module, layer.spec
    table = torch.zeros(1, 1, dtype=torch.int32)
    batch = BatchMetadata.build([1], [1], block_table=table)
    own = layer.new_kv_cache(2)
    apart = torch.zeros(2, 2, 16, 1, 576, dtype=torch.bfloat16)[:, 0]
    query, output = torch.zeros(1, 16, 576).bfloat16(), torch.zeros(1, 16, 512).bfloat16()
    refused: list[tuple[Any, type[Exception], str]] = [
        (
            lambda: layer.attend(query, own, batch, output),
            BatchError,
            "kv_cache.value has memory of its own; with MLA it is kv_cache.key[..., :head_size_v]",
        ),
        (
            lambda: layer.attend(query, KVCache(own.key, own.key.clone()[..., :512]), batch, output),
            BatchError,
            "kv_cache.value has memory of its own; with MLA it is kv_cache.key[..., :head_size_v]",
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
            lambda: module.plan(replace(spec, num_kv_heads=2), batch),
            SpecError,
            (
                "num_kv_heads is 2, head_size 576 and head_size_v 512; MLA in its latent form has one KV head, whose "
                "value is a part of its key"
            ),
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
