"""What is selected for a model's layers, what says so, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import small_models as models
from support.models.small_models import by, close, tokens
from support.models.transformers_calls import Layer
from torch import Tensor
from transformers import AttentionInterface

import attnreg.integrations.transformers as attention
from attnreg import NoBackendError, Platform, Registry, UnclaimedError, load_registry, select
from attnreg.machine.detect import detect_all
from attnreg.models.reader import requests_from_model
from attnreg.selection.wording import arch_words

# TORCH_SDPA, which has neither sinks nor a softcap, before CPU_ATTN
PREFER = {"prefer": "TORCH_SDPA"}
# a mask that no batch can express
HIDING = torch.zeros(1, 1, 3, 3).masked_fill(~torch.ones(3, 3, dtype=torch.bool).tril(), -1e4)


def logits(**inputs: Any) -> Callable[[Any], Tensor]:
    return lambda model: model(**inputs).logits


@pytest.mark.parametrize(
    "make", [models.llama, models.gpt_oss, models.gemma2, models.gemma3_both_ways, models.modern_bert]
)
def test_what_ran_is_what_the_config_asks_for(make: Callable[[], Any], default: Registry) -> None:
    model = make()
    by("attnreg", model, lambda model: model(**tokens(11)))
    ran = {run.layer_idx: run for run in attention.runs(model)}
    here = detect_all(default.vocabulary)[-1]
    described = requests_from_model(model.config, dtype="float32")
    assert len(ran) == models.LAYERS
    for group in described.groups:
        assert group.request is not None
        chosen = select(group.request, here, default, to_run=True).backend
        for index in group.layers:
            assert ran[index].asked.request == group.request
            assert chosen is not None
            assert ran[index].backend == chosen.name


def test_the_explanation_before_and_after(default: Registry) -> None:
    attention.register(registry=load_registry("default", [{"choices": [PREFER]}]))
    model = models.gpt_oss()
    model.set_attn_implementation("attnreg")
    before = attention.explanation(model)
    assert "note: the model has not run yet: this is what its config asks for" in before
    by("attnreg", model, logits(**tokens(5)))
    after = attention.explanation(model)
    title = arch_words(detect_all(default.vocabulary)[-1].arch, default.vocabulary)
    assert " ".join(after.split()).startswith(
        f"GptOssForCausalLM · this machine, CPU {title} · packages as installed here: "
    )
    for text in (before, after):
        # the window of every other layer is no reason for or against a backend
        assert text.count("▸ CPU_ATTN") == 1
        assert "TORCH_SDPA/gathered  sinks is not supported" in text
    assert "layer 0   4/2 heads of 16 · float32 · KV cache auto · sliding window 4 · sinks · 1 call" in after


def test_a_layer_that_no_backend_serves_raises_with_the_reasons() -> None:
    registry = load_registry("default", [{"choices": [PREFER, {"deny": ["CPU_ATTN"], "because": "not trusted"}]}])
    attention.register("strict", registry=registry)
    model = models.llama()
    by("strict", model, logits(**tokens(5)))
    assert {run.backend for run in attention.runs(model, name="strict")} == {"TORCH_SDPA"}
    with pytest.raises(NoBackendError) as e:
        by("strict", models.gpt_oss(), logits(**tokens(5)))
    assert "CPU_ATTN" in str(e.value)
    assert "sinks is not supported" in str(e.value)
    assert "not trusted" in str(e.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool])
def test_a_dtype_that_no_backend_has_is_refused(dtype: torch.dtype) -> None:
    query, word = torch.zeros(1, 4, 3, 16).to(dtype), str(dtype).removeprefix("torch.")
    attend = AttentionInterface()["attnreg"]  # type: ignore[no-untyped-call]
    said = f"has no backend for {word}" if dtype.is_floating_point else rf"query of Layer is torch\.{word}; expected"
    with pytest.raises(UnclaimedError, match=said):
        attend(Layer(), query, query, query, None, is_causal=True)
    if not dtype.is_floating_point:
        with pytest.raises(UnclaimedError, match=said):
            attend(Layer(), query, query, query, HIDING, is_causal=True)


def test_float64_is_exact_where_no_backend_is_asked() -> None:
    query, interface = torch.randn(1, 4, 3, 16).double(), AttentionInterface()  # type: ignore[no-untyped-call]
    mask = HIDING.double()
    expected, found = (interface[name](Layer(), query, query, query, mask)[0] for name in ("sdpa", "attnreg"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("make", [models.llama, models.gpt_oss, models.deepseek_v3])
def test_a_model_of_float64_is_refused_and_explained(make: Callable[[], Any], default: Registry) -> None:
    attention.register("packed", default, kv_dtype="turboquant_4bit_nc")
    model, said = make().double(), f"{default.title} has no backend for float64: it knows float16, bfloat16, float32"
    for name in ("attnreg", "packed"):
        with pytest.raises(UnclaimedError, match=f'{said}; use attn_implementation="eager" or "sdpa"'):
            by(name, model, logits(**tokens(5)))
        assert f"note: {said}; calls that no batch can express" in " ".join(
            attention.explanation(model, name=name).split()
        )


def test_a_backend_by_name(default: Registry) -> None:
    attention.register("by_name", registry=default, backend="TORCH_SDPA")
    model, inputs = models.gemma3(), tokens(11, 6)
    rows = inputs["attention_mask"].bool()
    expected, found = by("eager", model, logits(**inputs)), by("by_name", model, logits(**inputs))
    close(found[rows], expected[rows])
    assert {run.backend for run in attention.runs(model, name="by_name")} == {"TORCH_SDPA"}
    with pytest.raises(NoBackendError, match="TORCH_SDPA does not accept this request"):
        by("by_name", models.gemma2(), logits(**inputs))


def test_with_a_gpu_it_is_triton(default: Registry) -> None:
    attention.register(registry=default, platform=Platform(platform="cuda", arch="sm90"))
    model = models.gpt_oss(head_dim=32)
    model.set_attn_implementation("attnreg")
    model.to(torch.bfloat16)
    # what leads on Hopper has no kernel module here
    assert attention.explanation(model).count("▸ TRITON_ATTN") == 1
    model.to(torch.float32)
    if torch.cuda.is_available():
        pytest.skip("a GPU's kernels cannot run on the processor here: TRITON_INTERPRET is off")
    # its logic, in Triton's interpreter; keys of one request are a view of transformers' cache, those of two are not
    for lengths in ((7,), (7, 3)):
        inputs = tokens(*lengths)
        rows = inputs["attention_mask"].bool()
        close(by("attnreg", model, logits(**inputs))[rows], by("eager", model, logits(**inputs))[rows])
        generate = functools.partial(type(model).generate, **inputs, max_new_tokens=3, do_sample=False)
        assert torch.equal(by("attnreg", model, generate), by("eager", model, generate))
    assert {run.backend for run in attention.runs(model)} == {"TRITON_ATTN"}
