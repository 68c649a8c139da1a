"""attnreg as an attention backend of diffusers, against diffusers' own `native` backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnreg
from attnreg import Registry

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
from diffusers.models.attention_dispatch import (  # noqa: E402
    AttentionBackendName,
    attention_backend,
    dispatch_attention_fn,
)

import attnreg.integrations.diffusers as attention  # noqa: E402

INF = float("inf")


@pytest.fixture(autouse=True)
def registered(default: Registry) -> None:
    attention.register(registry=default)
    torch.manual_seed(0)


def tensors(queries: int = 7, keys: int = 7, heads: int = 4, kv_heads: int = 4, size_v: int = 16) -> list[Tensor]:
    q = torch.randn(2, queries, heads, 16)
    return [q, torch.randn(2, keys, kv_heads, 16), torch.randn(2, keys, kv_heads, size_v)]


def assert_native(given: list[Tensor], **more: Any) -> None:
    expected = dispatch_attention_fn(*given, backend="native", **more)
    found = dispatch_attention_fn(*given, backend="attnreg", **more)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "more"),
    [
        ({}, {}),
        ({}, {"is_causal": True}),
        ({}, {"scale": 0.3}),
        ({"keys": 3}, {}),
        ({"size_v": 8}, {}),
        ({"kv_heads": 2}, {"enable_gqa": True}),
    ],
)
def test_calls_are_what_native_attention_computes(shape: dict[str, int], more: dict[str, Any]) -> None:
    assert_native(tensors(**shape), **more)


@pytest.mark.parametrize("mask", [None, torch.tensor([True] * 4 + [False] * 3).expand(2, 7)])
def test_tensors_of_any_strides_are_what_native_attention_computes(mask: Tensor | None) -> None:
    # as of a projection whose heads come last, and of one size of head
    given = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in tensors()]
    assert_native(given, attn_mask=mask)
    assert_native([x.flip(1)[..., ::2] for x in given], attn_mask=mask)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float32, torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("causal", [True, False])
def test_autocast_casts_as_it_does_for_native_attention(dtypes: tuple[torch.dtype, ...], causal: bool) -> None:
    given = [x.to(dtype) for x, dtype in zip(tensors(), dtypes, strict=True)]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outs = [dispatch_attention_fn(*given, backend=name, is_causal=causal) for name in ("native", "attnreg")]
    assert outs[1].dtype == torch.bfloat16
    torch.testing.assert_close(outs[1], outs[0], atol=0.02, rtol=0.02)


def test_a_transform_is_refused() -> None:
    query, key, value = tensors()
    with pytest.raises(attnreg.UnclaimedError, match=r"has no memory of its own.*use another attention backend"):
        torch.func.vmap(lambda q: dispatch_attention_fn(q, key, value, backend="attnreg"))(query[None])
    with pytest.raises(attnreg.UnclaimedError, match="has no memory of its own"):
        torch.func.grad(lambda q: dispatch_attention_fn(q, key, value, backend="attnreg").sum())(query)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int8])
def test_a_dtype_that_no_backend_has_is_refused(dtype: torch.dtype) -> None:
    word = str(dtype).removeprefix("torch.")
    with pytest.raises(attnreg.UnclaimedError, match=f"cannot run this call: .* has no backend for {word}: it knows"):
        dispatch_attention_fn(*[x.to(dtype) for x in tensors()], backend="attnreg")


PADDED = torch.tensor([[True] * 7, [True] * 3 + [False] * 2 + [True] * 2])
ADDED = torch.zeros(2, 1, 1, 7).masked_fill(~PADDED[:, None, None], -INF)


@pytest.mark.parametrize("shape", [(2, 7), (7, 7), (1, 1, 7), (2, 1, 1, 7), (1, 4, 7, 7), (2, 4, 7, 7)])
@pytest.mark.parametrize("mask", [torch.ones, torch.zeros])
def test_a_mask_that_hides_nothing_is_no_mask(shape: tuple[int, ...], mask: Any) -> None:
    given = mask(shape, dtype=torch.bool if mask is torch.ones else torch.float32)
    attention.register()
    assert_native(tensors(), attn_mask=given)
    assert [s.request.attn_type for s in attention.selections()] == ["encoder_only"]


@pytest.mark.parametrize(
    "mask",
    [
        PADDED,
        PADDED[:, None, None],
        PADDED[:, None, None].expand(2, 4, 7, 7),
        ADDED,
        ADDED.clamp(min=-10000.0),
        ADDED.half(),
    ],
)
@pytest.mark.parametrize("host", [True, False])
def test_padding_is_left_out(mask: Tensor, host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors()
    mask = mask if mask.dtype != torch.float16 else mask.float()
    if not host:
        # as for a mask on a GPU
        monkeypatch.setattr(attention, "_version", lambda mask: mask._version)
    assert_native(given, attn_mask=mask)
    # the same mask again is not read again on a GPU, and one that was changed in place is
    assert_native(given, attn_mask=mask)
    changed = mask.clone()
    assert_native(given, attn_mask=changed)
    changed[:, ..., 6] = False if mask.dtype == torch.bool else -INF
    assert_native(given, attn_mask=changed)
    if host:
        # which PyTorch does not count
        changed.numpy()[..., 1] = False if mask.dtype == torch.bool else -INF
        assert_native(given, attn_mask=changed)


REFUSED = {
    "causal by mask": ({"attn_mask": torch.ones(7, 7).tril().bool()}, "hides other keys from some queries or heads"),
    "a mask for one head": (
        {"attn_mask": torch.arange(4)[:, None, None].expand(4, 7, 7) > 0},
        "hides other keys from some queries or heads",
    ),
    "a bias": ({"attn_mask": torch.full((7, 7), 0.5)}, "is a bias"),
    "not a number": ({"attn_mask": torch.full((7, 7), float("nan"))}, "is a bias"),
    "integers": ({"attn_mask": torch.ones(2, 7, dtype=torch.long)}, "a mask is boolean, or is added to the scores"),
    "another shape": ({"attn_mask": torch.ones(3, 7).bool()}, r"attn_mask is \[3, 7\], which does not become"),
    "nothing is left": ({"attn_mask": torch.zeros(2, 7).bool()}, "hides every key of a sequence"),
    "dropout": ({"dropout_p": 0.1}, "dropout_p is 0.1"),
    "both": ({"attn_mask": PADDED, "is_causal": True}, "is_causal and attn_mask are both given"),
    "an argument that it does not know": ({"attention_kwargs": {"window": 3}}, "it does not know window"),
    "a log-sum-exp": ({"attention_kwargs": {"return_lse": True}}, "it returns no log-sum-exp"),
    "context parallelism": ({"parallel_config": object()}, "it has no context parallelism"),
}


@pytest.mark.parametrize(("more", "why"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_dropped_is_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(attnreg.UnclaimedError, match=f"^attnreg cannot run this call: .*{why}"):
        dispatch_attention_fn(*tensors(), backend="attnreg", **more)


def test_heads_and_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(attnreg.UnclaimedError, match="4 query heads share 2 KV heads without enable_gqa"):
        dispatch_attention_fn(*tensors(kv_heads=2), backend="attnreg")
    with pytest.raises(attnreg.UnclaimedError, match="a causal call has 7 queries and 3 keys"):
        dispatch_attention_fn(*tensors(keys=3), backend="attnreg", is_causal=True)
    query, key, value = tensors()
    with pytest.raises(attnreg.UnclaimedError, match="queries are of 2 sequences, and keys of 1"):
        dispatch_attention_fn(query, key[:1], value[:1], backend="attnreg")


def test_a_request_that_no_backend_serves_says_why() -> None:
    attention.register(backend="FLASH_ATTN")
    with pytest.raises(attnreg.NoBackendError, match="FLASH_ATTN does not accept this request"):
        dispatch_attention_fn(*tensors(), backend="attnreg")


def test_gradients_are_refused_when_they_are_asked_for() -> None:
    given = [x.requires_grad_() for x in tensors()]
    out = dispatch_attention_fn(*given, backend="attnreg")
    with pytest.raises(RuntimeError, match="attnreg computes no gradients; train with another attention backend"):
        out.sum().backward()


def test_inference_tensors_and_other_names(default: Registry) -> None:
    attention.register("mine", default)
    with torch.inference_mode(), attention_backend("mine"):
        dispatch_attention_fn(*tensors(), attn_mask=PADDED.clone())
    assert [s.backend.name for s in attention.selections("mine") if s.backend] == ["CPU_ATTN"]
    assert AttentionBackendName("mine") in list(AttentionBackendName)
    assert isinstance(AttentionBackendName("mine"), AttentionBackendName)


@pytest.mark.parametrize("name", ["native", "flash", "Mine", "my name", ""])
def test_names_that_are_taken_or_cannot_be_looked_up(name: str) -> None:
    with pytest.raises(ValueError, match="diffusers"):
        attention.register(name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": None}, "name is None; expected a text"),
        ({"registry": "default"}, "registry is 'default'; expected a Registry"),
        ({"platform": "cpu"}, "platform is 'cpu'; expected a Platform"),
        ({"backend": "CPU_ATN"}, "unknown backend 'CPU_ATN'; did you mean `CPU_ATTN`"),
    ],
)
def test_what_means_nothing_is_refused_when_it_is_registered(given: dict[str, Any], message: str) -> None:
    with pytest.raises(attnreg.RequestError, match=message):
        attention.register(**given)


def test_a_name_that_is_not_registered() -> None:
    with pytest.raises(ValueError, match="'other' is not registered"):
        attention.selections("other")


def outputs(model: Any, **inputs: Any) -> dict[str, Tensor]:
    found = {}
    with torch.no_grad():
        for name in ("native", "attnreg"):
            model.set_attention_backend(name)
            out = model(**inputs, return_dict=False)[0]
            found[name] = torch.stack(out) if isinstance(out, list) else out
    model.reset_attention_backend()
    return found


@pytest.mark.slow(reason="builds models")
@pytest.mark.parametrize("text", [[7, 7], [7, 4]])
def test_a_model_that_masks_its_prompt(text: list[int]) -> None:
    """Qwen-Image masks the padding of a prompt; a prompt without padding is a mask of ones."""
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, guidance_embeds=False, axes_dims_rope=(8, 4, 4),
    ).eval()  # fmt: skip
    mask = torch.arange(7) < torch.tensor(text)[:, None]
    found = outputs(
        model,
        hidden_states=torch.randn(2, 16, 16),
        encoder_hidden_states=torch.randn(2, 7, 16),
        encoder_hidden_states_mask=mask,
        timestep=torch.ones(2),
        img_shapes=[(1, 4, 4)] * 2,
    )
    torch.testing.assert_close(found["attnreg"], found["native"], atol=1e-5, rtol=1e-4)
    assert found["native"].abs().max() > 0.1


@pytest.mark.slow(reason="builds models")
@pytest.mark.parametrize("text", [[5, 5], [5, 40]])
def test_a_model_whose_mask_of_ones_was_an_error(text: list[int]) -> None:
    model = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=16, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2,
        n_kv_heads=2, qk_norm=True, cap_feat_dim=16, rope_theta=256.0, t_scale=1000.0, axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    ).eval()  # fmt: skip
    images, prompts = [torch.randn(16, 1, 8, 8) for _ in text], [torch.randn(n, 16) for n in text]
    found = outputs(model, x=images, cap_feats=prompts, t=torch.zeros(len(text)))
    torch.testing.assert_close(found["attnreg"], found["native"], atol=1e-5, rtol=1e-4)
    assert found["native"].abs().max() > 0.1
