"""Generation over a packed KV cache: what a float64 reference over the decoded keys and values gives, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.models import small_models as models
from support.models.small_models import tokens
from support.models.transformers_calls import Layer
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

import attnreg
import attnreg.integrations.transformers as attention
from attnreg import Platform, Registry, UnclaimedError
from attnreg.integrations.transformers.compressed.cache import PackedLayer
from attnreg.integrations.transformers.forms.releases import CACHE
from attnreg.integrations.transformers.forms.stand_ins import StandIn
from attnreg.language.packed import packed_formats
from attnreg.runtime.turboquant import codec
from attnreg.runtime.turboquant.cache_bytes import PackedBlock

FORMATS = ("turboquant_4bit_nc", "turboquant_k8v4", "turboquant_3bit_ub")
# the steps of a matrix product round differently, and then a key may get the code beside its own: of 14 models the
# logits of one moved by 0.02, and a request that begins a token early moves them by 4 or more
BESIDE = 0.1
L40S = Platform(platform="cuda", arch="sm89")
# five layers: the first two and the last two keep a plain cache
WIDE = {"head_dim": 32, "num_hidden_layers": 5, "dtype": torch.float16}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def register(default: Registry, kv_dtype: str = FORMATS[0], **more: Any) -> None:
    attention.register("packed", default, platform=L40S, kv_dtype=kv_dtype, **more)


def made(kv_dtype: str = FORMATS[0]) -> Any:
    model = models.qwen3(**WIDE).to(torch.float16).eval()
    model.set_attn_implementation("packed")
    return model


class Recorded:
    """transformers' eager attention with keys and values as a format keeps them, in float64."""

    def __init__(self, registry: Registry, kv_dtype: str, packs: dict[int, bool]) -> None:
        self.packed = packed_formats(registry.vocabulary.words["kv_dtypes"])[kv_dtype]
        self.packs = packs

    def kept(self, side: Any, x: Tensor) -> Tensor:
        page = PackedBlock(side, x.shape[-1], 16)
        rows = codec.decode(page, codec.encode(page, x.double()))
        return codec.unrotated(rows, x.shape[-1]) if side.code == "levels" else rows

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
        exact = key.double(), value.double()
        if self.packs[module.layer_idx]:
            exact = self.kept(self.packed.keys, key), self.kept(self.packed.values, value)
        k, v = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in exact)
        scores = query.double() @ k.mT * more["scaling"]
        scores = scores.masked_fill(~mask, float("-inf")) if mask is not None else scores
        out = scores.softmax(-1).nan_to_num() @ v
        return out.to(query.dtype).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_padded_batch_in_steps_is_attention_over_the_decoded_keys(kv_dtype: str, default: Registry) -> None:
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    register(default, kv_dtype)
    model, inputs = made(), tokens(21, 9)
    cache = attention.new_cache(model, name="packed")
    assert [isinstance(layer, PackedLayer) for layer in cache.layers] == [False, False, True, False, False]

    def steps(cache: Any) -> list[Tensor]:
        ids, mask, found = inputs["input_ids"], inputs["attention_mask"], []
        for begin, end in ((0, 19), (19, 20), (20, 21)):
            out = model(ids[:, begin:end], attention_mask=mask[:, :end], **{CACHE: cache})
            found.append(out.logits[:, -1].float())
        return found

    found = steps(cache)
    assert cache.get_seq_length() == 21
    packs = {i: isinstance(layer, PackedLayer) for i, layer in enumerate(cache.layers)}
    AttentionInterface.register("decoded", Recorded(default, kv_dtype, packs))
    AttentionMaskInterface.register("decoded", sdpa_mask)
    model.set_attn_implementation("decoded")
    for ours, exact in zip(found, steps(DynamicCache(config=model.config)), strict=True):
        # float16 between attention and logits rounds otherwise
        assert float((ours - exact).abs().max()) <= 0.03 * float(exact.abs().max())
    runs = {run.layer_idx: run.backend for run in attention.runs(model, name="packed")}
    assert runs[2] == "TURBOQUANT"
    assert runs[0] == runs[4] != "TURBOQUANT"


def test_generate_keeps_the_packed_format_and_its_bytes(default: Registry) -> None:
    register(default)
    model, inputs = made(), tokens(18, 7)
    out = model.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    layers = out[CACHE].layers
    assert out.sequences.shape == (2, 22)
    kept = [layer for layer in layers if isinstance(layer, PackedLayer)]
    per_token = packed_formats(default.vocabulary.words["kv_dtypes"])[FORMATS[0]].token_bytes(32)
    # two requests of up to two blocks of 16 tokens, two KV heads
    assert [layer.bytes for layer in kept] == [2 * 2 * 16 * 2 * per_token]
    assert "KV cache turboquant_4bit_nc" in attention.explanation(model, name="packed", width=200)


def test_autocast_stores_what_it_attends_to(default: Registry) -> None:
    # of float32 weights the class passes keys and values of two dtypes, and no packed format is kept from float32
    register(default)
    model, inputs = made(), tokens(18, 7)
    expected = model(**inputs, **{CACHE: attention.new_cache(model, name="packed")}).logits
    cache = attention.new_cache(model.float(), name="packed")
    with torch.autocast("cpu", torch.float16):
        found = model(**inputs, **{CACHE: cache}).logits
    rows = inputs["attention_mask"].bool()
    assert cache.layers[2].dtype == torch.float16
    assert float((found - expected)[rows].abs().max()) <= 0.03 * float(expected[rows].abs().max())


def test_beams_and_a_cropped_cache(default: Registry) -> None:
    register(default)
    model, inputs = made(), tokens(18, 7)
    out = model.generate(**inputs, max_new_tokens=3, do_sample=False, num_beams=2, return_dict_in_generate=True)
    assert out.sequences.shape == (2, 21)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    cache = attention.new_cache(model, name="packed")
    model(ids, attention_mask=mask, **{CACHE: cache})
    cache.crop(-3)
    again = model(ids[:, 15:], attention_mask=mask, **{CACHE: cache}).logits[:, -1]
    whole = model(ids, attention_mask=mask, **{CACHE: attention.new_cache(model, name="packed")}).logits[:, -1]
    torch.testing.assert_close(again, whole, atol=0.02, rtol=0.02)


def test_an_assistant_takes_back_what_it_proposed_from_windows_too(default: Registry) -> None:
    register(default)
    # of six layers, three have a window of 4 tokens and a plain cache, and one of the others is packed
    layers = ["sliding_attention", "full_attention"] * 3
    model = models.gemma2(**WIDE | {"num_hidden_layers": 6, "layer_types": layers}).to(torch.float16).eval()
    model.set_attn_implementation("packed")
    more: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ids = tokens(9)["input_ids"]
    alone = model.generate(ids, **more)
    other = copy.deepcopy(model)
    # its logits are negative, so that it proposes other tokens
    other.model.norm.weight.fill_(-2)
    assert torch.equal(model.generate(ids, assistant_model=other, **more), alone)


def test_a_request_begins_where_its_first_token_comes(default: Registry) -> None:
    register(default)
    model, inputs = made(), tokens(18, 7)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    whole = model(**inputs, **{CACHE: attention.new_cache(model, name="packed")}).logits
    cache, found = attention.new_cache(model, name="packed"), []
    # the first two steps are padding alone in the second request
    for begin, end in ((0, 6), (6, 9), (9, 15), (15, 18)):
        found.append(model(ids[:, begin:end], attention_mask=mask[:, :end], **{CACHE: cache}).logits)
    torch.testing.assert_close(torch.cat(found, 1)[mask.bool()], whole[mask.bool()], atol=BESIDE, rtol=0.0)
    # its tokens are gone again, and others begin elsewhere, but not at a column that was padding when it was stored
    cache.crop(-9)
    early = copy.deepcopy(cache)
    with pytest.raises(UnclaimedError, match=r"its requests begin at \[0, 2\], and those of the cache at \[0, 11\]"):
        model(ids[:, 9:], attention_mask=mask.index_fill(1, torch.arange(2, 11), 1), **{CACHE: early})
    mask[1, 9:] = torch.tensor([0] * 4 + [1] * 5)
    again = model(ids[:, 9:], attention_mask=mask, **{CACHE: cache}).logits[:, -5:]
    whole = model(ids, attention_mask=mask, **{CACHE: attention.new_cache(model, name="packed")}).logits[:, -5:]
    torch.testing.assert_close(again, whole, atol=BESIDE, rtol=0.0)
    with pytest.raises(UnclaimedError, match=r"its requests begin at \[0, 0\], and those of the cache at \[0, 13\]"):
        model(ids[:, :1], **{CACHE: cache})


@pytest.mark.parametrize("indices", [[False, True], [-1]])
def test_requests_are_chosen_as_tensors_are_indexed(default: Registry, indices: list[int]) -> None:
    register(default)
    model, ids = made(), tokens(5, 5)["input_ids"]
    both, second = (attention.new_cache(model, name="packed") for _ in range(2))
    model(ids, **{CACHE: both})
    both.batch_select_indices(torch.tensor(indices))
    model(ids[1:], **{CACHE: second})
    found, expected = (model(ids[1:, :1], **{CACHE: cache}).logits for cache in (both, second))
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_what_is_no_packed_cache_is_refused(default: Registry) -> None:
    register(default)
    model, inputs = made(), tokens(18, 7)
    with pytest.raises(UnclaimedError, match="cache_implementation is 'static'"):
        model.generate(**inputs, max_new_tokens=2, cache_implementation="static")
    plain = DynamicCache(config=model.config)
    model(**inputs, **{CACHE: plain})
    one = {"input_ids": inputs["input_ids"][:, :1]}
    with pytest.raises(UnclaimedError, match="has a cache of transformers' own"):
        model(**one, **{CACHE: plain})
    with pytest.raises(UnclaimedError, match="continuous batching"):
        attention.continuous_batching(model, name="packed")
    with pytest.raises(
        ValueError, match=r"kv_dtype is 'turboquant_5bit'; expected a packed format.*turboquant_4bit_nc"
    ):
        attention.register("packed", default, kv_dtype="turboquant_5bit")
    with pytest.raises(ValueError, match="registered without kv_dtype"):
        attention.new_cache(model)


def test_a_cache_of_another_format_or_model_is_refused(default: Registry) -> None:
    register(default)
    model, ids = made(), tokens(18, 18)["input_ids"]
    cache = attention.new_cache(model, name="packed")
    model(ids[:, :17], **{CACHE: cache})
    before = [x.clone() for x in cache.layers[2]._pages]
    register(default, FORMATS[2])
    with pytest.raises(
        UnclaimedError, match=r"cache keeps turboquant_4bit_nc, and 'packed' is registered.*'turboquant_3bit_ub'"
    ):
        model(ids[:, 17:], **{CACHE: cache})
    assert all(torch.equal(a, b) for a, b in zip(before, cache.layers[2]._pages, strict=True))
    request = attnreg.AttentionRequest(
        head_size=64, num_heads=4, num_kv_heads=2, block_size=16, kv_dtype=FORMATS[0], dtype="float16"
    )
    wider = attnreg.Attention.from_selection(attnreg.select(request, L40S, default))
    with pytest.raises(UnclaimedError, match=r"\[2, 288\] and \[2, 320\], of another layer; this one keeps \[2, 544"):
        cache.layers[2]._grown(wider, 2, 9)
    register(default)
    narrow = models.qwen3(**{**WIDE, "head_dim": 16}).to(torch.float16).eval()
    narrow.set_attn_implementation("packed")
    with pytest.raises(attnreg.NoBackendError, match="head_size is 16; supported: multiples of 4 from 32 to 256"):
        narrow(ids, **{CACHE: attention.new_cache(narrow, name="packed")})


def test_padding_behind_tokens_and_other_readers_are_refused_before_anything_is_stored(default: Registry) -> None:
    register(default)
    model, inputs = made(), tokens(18, 7, left=False)
    cache = attention.new_cache(model, name="packed")
    with pytest.raises(UnclaimedError, match="its padding lies between or behind tokens"):
        model(**inputs, **{CACHE: cache})
    assert cache.layers[2].bytes == 0
    key = torch.zeros(1, 2, 3, 32)
    first, _ = PackedLayer(FORMATS[0]).update(key, key)
    assert isinstance(first, StandIn)
    with pytest.raises(UnclaimedError, match="reads keys or values of a packed KV cache"):
        first + 1
    # two sequences, one behind the other
    attend, layer = AttentionInterface()["packed"], PackedLayer(FORMATS[0])  # type: ignore[no-untyped-call]
    more = {"is_causal": True, "cu_seq_lens_q": torch.tensor([0, 1, 3])}
    with pytest.raises(UnclaimedError, match="passes cu_seq_lens_q of 2 sequences"):
        attend(Layer(), key.half(), *layer.update(key.half(), key.half()), None, **more)
    assert layer.bytes == 0


def test_a_platform_without_a_backend_says_so_and_stores_nothing(default: Registry) -> None:
    attention.register("packed", default, kv_dtype=FORMATS[0])
    model, inputs = made(), tokens(5)
    cache = attention.new_cache(model, name="packed")
    with pytest.raises(attnreg.NoBackendError, match="turboquant_4bit_nc"):
        model(**inputs, **{CACHE: cache})
    assert cache.layers[2].bytes == 0
