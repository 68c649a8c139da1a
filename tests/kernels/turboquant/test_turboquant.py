"""TURBOQUANT in Triton's interpreter: its bytes are the codec's, its numbers the reference's, bad input is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnreg import AttentionRequest, Platform, Registry
from attnreg.conformance.claims import Claims
from attnreg.conformance.proof import prove
from attnreg.conformance.trial import Case, lengths_of, prepare
from attnreg.kernels import reference
from attnreg.kernels.triton.layout import Cache
from attnreg.kernels.triton.target import target_for
from attnreg.kernels.turboquant import store as storing
from attnreg.kernels.turboquant.store import store
from attnreg.language.packed import Packed, Side, packed_formats
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, KVCache, SpecError
from attnreg.runtime.layer import Attention
from attnreg.runtime.turboquant import codec
from attnreg.runtime.turboquant.cache_bytes import packed_blocks
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import Selection

# numpy, in the interpreter, warns of what stands in parts that no key was written to, and is masked
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SM89 = Platform(platform="cuda", arch="sm89", packages={"torch": "2.11", "triton": "3.7"})
OWN = {
    # the kernels are made for every side, not for the presets alone
    "groups": Packed("groups", Side(4, group=16), Side(3, group=32)),
    "two bits": Packed("two bits", Side(2, "hadamard", "norm"), Side(2, group=8)),
}


def selected(registry: Registry, **changes: Any) -> Selection:
    request: dict[str, Any] = {
        "head_size": 32, "num_heads": 4, "num_kv_heads": 2, "block_size": 16, "dtype": "float16",
        "kv_dtype": "turboquant_4bit_nc", **changes,
    }  # fmt: skip
    return evaluate(AttentionRequest(**request), SM89, registry, "TURBOQUANT")


def small(
    registry: Registry, kv_dtype: str, head_size: int, size_v: int | None, features: set[str], lengths: str
) -> Case:
    request = AttentionRequest(
        head_size=head_size, head_size_v=size_v, num_heads=4, num_kv_heads=2, block_size=16, dtype="float16",
        kv_dtype=kv_dtype, features=features,
    )  # fmt: skip
    return Case(request=request, lengths=lengths, storage="NHD")


@pytest.mark.parametrize(
    ("kv_dtype", "head_size", "size_v", "features", "lengths"),
    [
        ("turboquant_k8v4", 64, None, {"sinks", "lse"}, "decode"),
        ("turboquant_4bit_nc", 32, None, {"sliding_window", "lse", "kv_connector"}, "decode"),
        ("turboquant_k3v4_nc", 80, 48, {"softcap", "non_causal"}, "chunked"),
        ("turboquant_3bit_nc", 40, None, {"causal_by_request", "lse"}, "chunked"),
        ("turboquant_4bit_ub", 32, 80, {"sinks", "non_causal", "lse"}, "chunked"),
        ("turboquant_3bit_ub", 32, None, {"batch_invariant", "lse"}, "decode"),
    ],
)
def test_presets_compute_what_their_codes_stand_for(
    default: Registry, kv_dtype: str, head_size: int, size_v: int | None, features: set[str], lengths: str
) -> None:
    case = small(default, kv_dtype, head_size, size_v, features, lengths)
    outcome = prove(case, evaluate(case.request, SM89, default, "TURBOQUANT"))
    assert outcome.problem is None
    assert 0 < outcome.share < 0.5


def stored(packed: Packed, key: torch.Tensor, value: torch.Tensor, slots: list[int]) -> tuple[Any, ...]:
    """What the kernel wrote of some keys and values [tokens, 2, size]: the spec, the cache and its rows by slot."""
    from attnreg.kernels.turboquant import attention as turboquant_attn

    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=key.shape[2], head_size_v=value.shape[2], dtype=torch.float16,
        softmax_scale=0.2, kv_dtype=packed.name, block_size=16, packed=packed, features=frozenset({"lse"}),
    )  # fmt: skip
    shape = turboquant_attn.kv_cache_shape(spec, 3)
    cache = KVCache(*(torch.full(x, 0xFF, dtype=torch.uint8) for x in (shape.key, shape.value)))
    # the kernel itself, as where the host does not see the numbers
    store(spec, key, value, cache, torch.tensor(slots))
    pages = packed_blocks(packed, spec.head_size, spec.head_size_v, 16)
    rows = [page.rows(x).transpose(1, 2).flatten(0, 1) for page, x in zip(pages, cache, strict=True)]
    return spec, cache, pages, rows


@pytest.mark.parametrize("name", ["turboquant_3bit_ub", "turboquant_4bit_nc", "turboquant_3bit_ls", *OWN])
def test_the_store_writes_the_bytes_of_the_codec(default: Registry, name: str) -> None:
    packed = {**packed_formats(default.vocabulary.words["kv_dtypes"]), **OWN}[name]
    generator = torch.Generator().manual_seed(3)
    key, value = (torch.randn(20, 2, n, generator=generator).half() for n in (40, 32))
    key[3], value[4] = 0.0, 2.0
    slots = [*range(16, 32), 0, 1, 2, 3]
    spec, cache, pages, rows = stored(packed, key, value, slots)
    for page, found, original in zip(pages, rows, (key, value), strict=True):
        exact = codec.encode(page, original)
        # a number between two codes may become either
        assert float((found[slots] != exact).float().mean()) < 0.002
        unused = sorted({*range(48)} - {*slots})
        assert (found[unused] == 0xFF).all()
    from attnreg.kernels.turboquant import attention as turboquant_attn

    query = torch.randn(2, 4, 40, generator=generator).half()
    batch = BatchMetadata.build([2], [20], block_table=torch.tensor([[1, 0, 2]], dtype=torch.int32))
    output, lse = torch.empty(2, 4, 32, dtype=torch.float16), torch.empty(4, 2)
    turboquant_attn.forward(spec, turboquant_attn.plan(spec, batch), Call(query, cache, output, lse=lse))
    expected = reference.attention(spec, batch, query, cache)
    assert torch.allclose(output.double(), expected.output, atol=5e-3)
    assert torch.allclose(lse.double(), expected.lse, atol=5e-3)


@pytest.mark.parametrize("name", ["turboquant_3bit_ub", "turboquant_4bit_nc", "turboquant_k8v4"])
def test_programs_of_many_rows_store_the_same_bytes(
    default: Registry, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    packed = packed_formats(default.vocabulary.words["kv_dtypes"])[name]
    generator = torch.Generator().manual_seed(5)
    key, value = (torch.randn(40, 2, n, generator=generator).half() for n in (128, 64))
    key[3], value[4] = 0.0, 2.0
    few = stored(packed, key, value, list(range(40)))[1]
    # one that 80 rows fill
    monkeypatch.setattr(storing, "target_of", lambda device: target_for("cuda", 90, 1))
    spec, many, *_ = stored(packed, key, value, list(range(40)))
    cache = Cache("NHD", 16, 128, 64, torch.uint8, packed)
    assert storing._code(spec, cache, 40, target_for("cuda", 90, 1)).rows == 64
    assert all(torch.equal(x, y) for x, y in zip(few, many, strict=True))
    invariant = replace(spec, features=spec.features | {"batch_invariant"})
    assert storing._code(invariant, cache, 40, target_for("cuda", 90, 1)).rows == 16


@pytest.mark.parametrize(("requests", "queries", "features", "rotates"), [
    (2, 1, {"lse"}, True), (33, 1, {"lse"}, False), (2, 20, {"lse"}, False), (2, 1, {"lse", "batch_invariant"}, False),
])  # fmt: skip
def test_queries_are_rotated_where_they_are_loaded_or_before(
    default: Registry, requests: int, queries: int, features: set[str], rotates: bool
) -> None:
    from attnreg.kernels.turboquant import attention as turboquant_attn

    packed = packed_formats(default.vocabulary.words["kv_dtypes"])["turboquant_4bit_nc"]
    generator = torch.Generator().manual_seed(5)
    key, value = (torch.randn(48, 2, n, generator=generator).half() for n in (40, 32))
    spec, cache, _, _ = stored(packed, key, value, [*range(48)])
    spec = replace(spec, features=frozenset(features))
    tables = torch.arange(3, dtype=torch.int32).repeat(requests, 1)
    batch = BatchMetadata.build([queries] * requests, [20 + at % 20 for at in range(requests)], block_table=tables)
    query = torch.randn(requests * queries, 4, 40, generator=generator).half()
    output, lse = torch.empty(len(query), 4, 32, dtype=torch.float16), torch.empty(4, len(query))
    plan = turboquant_attn.plan(spec, batch)
    assert plan.attention.rotates is rotates
    turboquant_attn.forward(spec, plan, Call(query, cache, output, lse=lse))
    expected = reference.attention(spec, batch, query, cache)
    assert torch.allclose(output.double(), expected.output, atol=5e-3)
    assert torch.allclose(lse.double(), expected.lse, atol=5e-3)


def test_slots_past_the_cache_are_skipped(default: Registry) -> None:
    packed = packed_formats(default.vocabulary.words["kv_dtypes"])["turboquant_4bit_nc"]
    key = torch.ones(4, 2, 32).half()
    *_, rows = stored(packed, key, key, [48, 10**9, -1, 5])
    for side in rows:
        assert (side != 0xFF).any(-1).any(-1).nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("kv_dtype", ["turboquant_k8v4", "turboquant_4bit_nc", "turboquant_3bit_ub"])
def test_rows_without_numbers_are_marked_and_seen(default: Registry, kv_dtype: str) -> None:
    packed = packed_formats(default.vocabulary.words["kv_dtypes"])[kv_dtype]
    generator = torch.Generator().manual_seed(3)
    key, value = (torch.randn(32, 2, 32, generator=generator).half() for _ in range(2))
    key[1, 0, 3], value[20, 1, 7] = torch.nan, torch.inf
    spec, cache, pages, rows = stored(packed, key, value, [*range(16, 32), *range(16)])
    for page, found, (token, head) in zip(pages, rows, ((1, 0), (20, 1)), strict=True):
        slot = token + 16 if token < 16 else token - 16
        assert codec.decode(page, found[slot, head]).isnan().all()
        assert codec.decode(page, found[slot, 1 - head]).isfinite().all()
    from attnreg.kernels.turboquant import attention as turboquant_attn

    # one request sees the marked key and value, in splits or not; the other, of the second block, sees the value alone
    query = torch.randn(2, 4, 32, generator=generator).half()
    tables = torch.tensor([[1, 0], [0, 0]], dtype=torch.int32)
    batch = BatchMetadata.build([1, 1], [32, 4], block_table=tables)
    output, lse = torch.empty(2, 4, 32, dtype=torch.float16), torch.empty(4, 2)
    turboquant_attn.forward(spec, turboquant_attn.plan(spec, batch), Call(query, cache, output, lse=lse))
    assert output[0, :2].isnan().all()
    assert lse[:2, 0].isnan().all()
    # of the value, one column or all
    assert output[0, 2:].isnan().any(-1).all()
    assert output[1].isfinite().all()


def test_a_cache_of_another_preset_is_refused_and_both_are_named(default: Registry) -> None:
    layer = Attention.from_selection(selected(default))
    other = Attention.from_selection(selected(default, kv_dtype="turboquant_3bit_nc"))
    cache = other.new_kv_cache(2)
    before = [x.clone() for x in cache]
    key = torch.ones(3, 2, 32, dtype=torch.float16)
    batch = BatchMetadata.build(
        [3], block_table=torch.zeros(1, 1, dtype=torch.int32), slot_mapping=torch.arange(3)
    )  # fmt: skip
    with pytest.raises(BatchError) as raised:
        layer.write_kv(key, key, cache, batch)
    assert raised.value.problems[-1] == (
        "the cache has 14 + 16 bytes for each token and KV head in blocks of 16; turboquant_4bit_nc takes 18 + 20 for "
        "this head size: allocate it with new_kv_cache of a layer of this kv_dtype"
    )
    assert all(torch.equal(a, b) for a, b in zip(cache, before, strict=True))
    wide = Attention.from_selection(selected(default, block_size=32)).new_kv_cache(2)
    with pytest.raises(BatchError) as raised:
        layer.write_kv(key, key, wide, batch)
    assert raised.value.problems[-1] == "the cache has blocks of 32 tokens of turboquant_4bit_nc; the layer's have 16"
    with pytest.raises(BatchError, match=r"kv_cache\.key"):
        layer.write_kv(key, key, KVCache(torch.empty(2, 16, 2, 32).half(), torch.empty(2, 16, 2, 32).half()), batch)


def test_no_two_formats_have_pages_of_one_size_and_other_codes(default: Registry) -> None:
    formats = packed_formats(default.vocabulary.words["kv_dtypes"])
    sizes = [size for size in range(1, 300) if selected(default, head_size=size).backend is not None]
    assert (sizes[0], sizes[-1]) == (32, 256)

    def codes(side: Side) -> tuple[Any, ...]:
        # the scale is chosen by the store alone
        return side.bits, side.rotation, side.group

    for size in sizes:
        seen: dict[tuple[int, int], Packed] = {}
        for packed in formats.values():
            other = seen.setdefault((packed.keys.row_bytes(size), packed.values.row_bytes(size)), packed)
            assert (codes(other.keys), codes(other.values)) == (codes(packed.keys), codes(packed.values)), size


@pytest.mark.parametrize(("number", "name", "row"), [(torch.nan, "key", 2), (torch.inf, "value", 0)])
def test_numbers_that_are_not_finite_are_refused_where_the_host_sees_them(
    default: Registry, number: float, name: str, row: int
) -> None:
    layer = Attention.from_selection(selected(default))
    cache = KVCache(*(x.fill_(0xFF) for x in layer.new_kv_cache(2)))
    given = {side: torch.ones(4, 2, 32, dtype=torch.float16) for side in ("key", "value")}
    given[name][row, 1, 7] = number
    # what has no slot is not stored
    given["key"][3] = torch.nan
    batch = BatchMetadata.build(
        [4], block_table=torch.zeros(1, 1, dtype=torch.int32), slot_mapping=torch.tensor([0, 1, 2, -1])
    )
    with pytest.raises(BatchError, match=rf"{name}\[{row}\] has a number that is not finite; turboquant_4bit_nc holds"):
        layer.write_kv(given["key"], given["value"], cache, batch)
    assert all((x == 0xFF).all() for x in cache)
    given[name][row] = 1.0
    layer.write_kv(given["key"], given["value"], cache, batch)
    assert not any((x == 0xFF).all() for x in cache)


def test_slots_that_the_host_knows_are_refused(default: Registry) -> None:
    layer = Attention.from_selection(selected(default))
    cache, key = layer.new_kv_cache(2), torch.ones(3, 2, 32, dtype=torch.float16)
    batch = BatchMetadata.build(
        [3], block_table=torch.zeros(1, 1, dtype=torch.int32), slot_mapping=torch.tensor([0, 1, 32])
    )
    with pytest.raises(BatchError, match="32"):
        layer.write_kv(key, key, cache, batch)


def test_what_the_format_cannot_hold_is_refused(default: Registry) -> None:
    reasons = [r.text for c in selected(default, block_size=24).candidates for r in c.reasons]
    assert reasons == ["block_size is 24; supported: multiples of 16"]
    reasons = [r.text for c in selected(default, head_size=320).candidates for r in c.reasons]
    assert "head_size is 320; supported: multiples of 4 from 32 to 256" in reasons
    spec = Attention.from_selection(selected(default)).spec
    with pytest.raises(SpecError, match="turboquant_4bit_nc holds blocks of a multiple of 16 tokens"):
        replace(spec, block_size=24)
    with pytest.raises(SpecError, match="they name one format"):
        replace(spec, kv_dtype="turboquant_3bit_nc")
    with pytest.raises(SpecError, match="or a packed format, which is given as packed"):
        replace(spec, packed=None)
    with pytest.raises(SpecError, match="has no scales"):
        Attention.from_selection(selected(default), k_scale=torch.ones(1))


def test_the_rows_claims_become_cases(default: Registry) -> None:
    claims = Claims("TURBOQUANT", SM89, default)
    cases = claims.cases("claims")
    assert {case.request.kv_dtype for case in cases} == set(packed_formats(default.vocabulary.words["kv_dtypes"]))
    assert {case.storage for case in cases} == {"NHD", "fused"}
    assert not claims.unproven


def test_both_views_of_one_tensor_hold_a_cache(default: Registry) -> None:
    case = replace(small(default, "turboquant_3bit_nc", 32, None, set(), "decode"), storage="fused")
    selection = evaluate(case.request, SM89, default, "TURBOQUANT")
    trial = prepare(case, selection, torch.device("cpu"), causal=True)
    assert trial.cache is not None
    assert trial.cache.key.stride() == trial.cache.value.stride()
    assert prove(case, selection).problem is None
    assert len(lengths_of("decode", 16, "decoder")) == trial.batch.num_reqs


def test_pages_that_do_not_begin_at_words_are_refused_in_any_call(default: Registry) -> None:
    """A GPU ends the process where a word is loaded from an address that is no multiple of it."""
    request = small(default, "turboquant_3bit_nc", 32, None, set(), "decode").request
    layer = Attention.from_selection(evaluate(request, SM89, default, "TURBOQUANT"))
    whole = layer.new_kv_cache(2, "cpu")
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    batch = BatchMetadata.build([1], [20], device="cpu", block_table=table)
    query = torch.zeros(1, request.num_heads, 32, dtype=torch.float16)

    def attend(offset: int, more: int) -> None:
        sides = []
        for side in whole:
            blocks, heads, page = side.shape
            memory = torch.zeros(side.numel() + 64 + blocks * more, dtype=torch.uint8)
            sides.append(memory.as_strided(side.shape, (heads * page + more, page, 1), offset))
        layer.attend(query, KVCache(*sides), batch, torch.empty_like(query))

    attend(4, 8)
    attend(0, 0)
    with pytest.raises(BatchError, match=r"kv_cache\.key begins 2 bytes past a multiple of 4"):
        attend(2, 0)
    with pytest.raises(BatchError, match=r"kv_cache\.value has strides .*begin at multiples of 4"):
        attend(0, 6)
    attend(0, 0)
