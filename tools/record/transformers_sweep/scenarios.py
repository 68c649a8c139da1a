"""What a model is asked in each scenario, and which of its outputs are compared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from attnreg.integrations.transformers.forms.releases import CACHE
from transformers_sweep.inputs import BATCH, TOKENS, Inputs

NEW = 6
# the second row of a padded batch has this many tokens
SHORT = 7
Outputs = dict[str, Tensor]


@dataclass
class Scenario:
    """One question to a model. tokens: [batch, tokens] false where a row is padding, None without padding."""

    name: str
    run: Callable[[PreTrainedModel], Outputs]
    tokens: Tensor | None = field(default=None)


def _parameters(model: PreTrainedModel) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def padding(kind: str) -> Tensor:
    """[BATCH, TOKENS] 0 and 1: the second row is shorter, and where it is so is the kind."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    if kind == "right":
        mask[1, SHORT:] = 0
    elif kind == "left":
        mask[1, : TOKENS - SHORT] = 0
    else:
        mask[1, 3:6] = 0
    return mask


def floats(found: Any, prefix: str = "") -> Outputs:
    """The tensors of numbers among a model's outputs, by name."""
    if isinstance(found, Tensor):
        return {prefix or "output": found} if found.is_floating_point() else {}
    if isinstance(found, ModelOutput | dict):
        items: Iterator[tuple[str, Any]] = iter(found.items())
    elif isinstance(found, tuple | list):
        items = ((str(i), v) for i, v in enumerate(found))
    else:
        return {}
    out: Outputs = {}
    for name, value in items:
        if name not in (CACHE, "attentions", "rope_deltas"):
            out |= floats(value, f"{prefix}.{name}" if prefix else name)
    return out


def _call(**given: Any) -> Callable[[PreTrainedModel], Outputs]:
    return lambda model: floats(model(**given))


def scenarios(model: PreTrainedModel, inputs: Inputs, outputs: Outputs) -> Iterator[Scenario]:
    """Every scenario that the model's forward has arguments for. inputs, outputs: those of a plain call."""
    known = _parameters(model)
    yield Scenario("plain", _call(**inputs))
    if "input_ids" not in inputs:
        yield from _frames(model, known, inputs)
        return
    paired = "decoder_input_ids" in inputs
    if inputs["input_ids"].shape != (BATCH, TOKENS):
        return
    if "attention_mask" in known:
        for kind in ("right", "left", "inner"):
            mask = padding(kind)
            yield Scenario(f"{kind} padding", _call(**inputs, attention_mask=mask), mask.bool())
        if not paired:
            whole = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(BATCH, 1, -1, -1).clone()
            whole[1, :, 8:, 2:4] = False
            yield Scenario("4D mask", _four(inputs, whole))
        if pooled(outputs):
            yield Scenario("pooled outputs", _pooled(inputs), padding("left").bool())
    if "position_ids" in known and not paired:
        packed = torch.cat([torch.arange(5), torch.arange(TOKENS - 5)]).expand(BATCH, -1)
        yield Scenario("packed position_ids", _call(**inputs, position_ids=packed, use_cache=False))
    if model.can_generate():
        yield from _generating(model, known, inputs, paired)


def pooled(outputs: Outputs) -> Outputs:
    """The outputs that have one row for a whole text, which models pool at a position."""
    return {name: x for name, x in outputs.items() if x.ndim == 2 and x.shape[0] == BATCH}


def _pooled(inputs: Inputs) -> Callable[[PreTrainedModel], Outputs]:
    def run(model: PreTrainedModel) -> Outputs:
        out: Outputs = {}
        for kind in ("right", "left"):
            found = pooled(floats(model(**inputs, attention_mask=padding(kind))))
            out |= {f"{name}, {kind}": x for name, x in found.items()}
        return out

    return run


def _four(inputs: Inputs, mask: Tensor) -> Callable[[PreTrainedModel], Outputs]:
    def run(model: PreTrainedModel) -> Outputs:
        # added to the scores, as every attention function of transformers takes it
        added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        return floats(model(**inputs, attention_mask=added))

    return run


def _frames(model: PreTrainedModel, known: set[str], inputs: Inputs) -> Iterator[Scenario]:
    """Sound whose second row is shorter, where a mask can say so; every frame that comes back is compared."""
    mask = _mask_of_frames(model, known, inputs)
    if mask is None:
        return
    name, length = mask
    shorter = torch.ones(BATCH, length, dtype=torch.long)
    shorter[1, length * 5 // 8 :] = 0
    masked = {**inputs, name: shorter}
    yield Scenario("right padding", _call(**masked), shorter.bool())
    if type(model).__name__.endswith("ForCTC"):
        # what batch_decode reads, frames of padding too
        symbols = lambda model: {"symbols": model(**masked).logits.argmax(-1).float()}  # noqa: E731
        yield Scenario("CTC symbols", symbols, shorter.bool())


def _mask_of_frames(model: PreTrainedModel, known: set[str], inputs: Inputs) -> tuple[str, int] | None:
    """The name of the mask of a model of sound, and its length; None where it has none."""
    frames = next((inputs[n] for n in ("input_values", "input_features") if n in inputs), None)
    if frames is None:
        return None
    for name in ("attention_mask", "input_features_mask", "padding_mask"):
        if name in inputs:
            return name, inputs[name].shape[1]
        for length in frames.shape[:0:-1] if name in known else ():
            try:
                model(**inputs, **{name: torch.ones(BATCH, length, dtype=torch.long)})
            except Exception:
                continue
            return name, length
    return None


def _generating(model: PreTrainedModel, known: set[str], inputs: Inputs, paired: bool) -> Iterator[Scenario]:
    prompt = {k: v for k, v in inputs.items() if k != "decoder_input_ids"}
    mask = padding("left")
    common = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0,
              "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}  # fmt: skip
    encodes = bool(getattr(model.config, "is_encoder_decoder", False))
    if encodes and getattr(model.generation_config, "decoder_start_token_id", None) is None:
        common["decoder_start_token_id"] = 0

    def generating(**more: Any) -> Callable[[PreTrainedModel], Outputs]:
        def run(model: PreTrainedModel) -> Outputs:
            found: Any = cast("Any", model).generate(**prompt, attention_mask=mask, **{**common, **more})
            logits = torch.stack(found.logits, 1) if found.logits else torch.zeros(0)
            return {"tokens": found.sequences.float(), "logits": logits}

        return run

    yield Scenario("greedy", generating())
    yield Scenario("beams", generating(num_beams=3, output_logits=False))
    yield Scenario("static cache", generating(cache_implementation="static", disable_compile=True))
    if CACHE in known and not encodes:
        yield Scenario("chunks", _chunks(inputs))


def _chunks(inputs: Inputs) -> Callable[[PreTrainedModel], Outputs]:
    def run(model: PreTrainedModel) -> Outputs:
        ids, cache, out = inputs["input_ids"], None, []
        for begin, end in ((0, 5), (5, 6), (6, TOKENS)):
            found = model(input_ids=ids[:, begin:end], use_cache=True, **{CACHE: cache})
            cache = getattr(found, CACHE)
            out.append(found[0] if "logits" not in found else found.logits)
        return {"logits": torch.cat(out, 1)}

    return run
