"""Models with latents on a GPU: the caches of transformers, and the kernels that decode from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models.latent_models import attentions, both, phases, v3, v32
from support.models.small_models import tokens
from torch import Tensor
from transformers.cache_utils import Cache

import attnreg.integrations.transformers as attention
from attnreg import Registry
from attnreg.integrations.transformers.forms.releases import CACHE
from attnreg.integrations.transformers.latent.lazy import METHOD

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"),
    # what compilers have to say of a device is no fault of a backend
    pytest.mark.filterwarnings("default"),
]

SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_head_dim": 128}
WIDE = {**SIZES, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 1}
# transformers cannot offload the keys of an indexer
CASES = pytest.mark.parametrize(
    ("make", "kind", "cache"),
    [
        (v3, "mla", None),
        (v3, "mla", "static"),
        (v3, "mla", "offloaded"),
        (v32, "mla_sparse", None),
        (v32, "mla_sparse", "static"),
    ],
)


@pytest.fixture(autouse=True)
def always_latent(default: Registry) -> None:
    attention.register(registry=default, latent=True)


def generating(cache: str | None, *lengths: int) -> Callable[[Any], Tensor]:
    inputs = {name: x.cuda() for name, x in tokens(*lengths).items()}

    def run(model: Any) -> Tensor:
        out = model.generate(
            **inputs, max_new_tokens=16, do_sample=False, cache_implementation=cache, disable_compile=True,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        # the first logits are of one prompt, whatever tokens were chosen then
        return out.logits[0] if model.dtype != torch.float32 else torch.stack(out.logits)  # type: ignore[no-any-return]

    return run


@CASES
def test_float32(make: Callable[..., Any], kind: str, cache: str | None) -> None:
    # sparse MLA has no kernel in float32 on GPUs: its keys are expanded there
    attention.register(latent=None if kind == "mla_sparse" else True)
    # until 5.19, transformers copies a layer's cache back before the copy to the processor has ended: wrong logits by
    # transformers' own attention too
    if cache == "offloaded" and "prefetch_stream.wait_stream" not in inspect.getsource(Cache.update):
        pytest.skip("this transformers prefetches an offloaded cache while it is still being copied away")
    model = make().cuda()
    expected, found = both(model, generating(cache, 70, 9))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@CASES
def test_the_sizes_of_deepseek_v3(make: Callable[..., Any], kind: str, cache: str | None) -> None:
    model = make(**WIDE, dtype=torch.bfloat16).cuda()
    forward = inspect.getsource(type(attentions(model)[0]).forward)
    expands, caches = forward.find(f".{METHOD}("), forward.find(f"{CACHE}.update(")
    if expands < caches or expands < 0:
        pytest.skip(f"this transformers caches expanded keys of {type(model).__name__}, not its latents")
    expected, found = both(model, generating(cache, 200, 70))
    assert float((found - expected).square().mean().sqrt()) < 0.01 * float(expected.abs().max())
    assert (kind, "decode") in phases(model)
    backends = {run.backend for run in attention.runs(model)}
    assert not backends & {"TORCH_MLA", "TORCH_MLA_SPARSE"}
