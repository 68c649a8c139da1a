"""What a model is asked in each scenario, and which of its outputs are compared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput
from transformers_sweep.tiny import TEXT_TOKENS

BATCH, TOKENS, NEW = 2, 12, 6
# the second row of a padded batch has this many tokens
SHORT = 7
Outputs = dict[str, Tensor]


@dataclass
class Scenario:
    """One question to a model: what it is given, and which rows of what comes back mean something."""

    name: str
    run: Callable[[PreTrainedModel], Outputs]
    # rows that are padding, [batch, tokens] false: left out of the comparison where attention is causal
    tokens: Tensor | None = field(default=None)


def _parameters(model: PreTrainedModel) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def text(rows: int = BATCH, length: int = TOKENS, seed: int = 1) -> Tensor:
    """[rows, length] tokens of plain text."""
    return torch.randint(*TEXT_TOKENS, (rows, length), generator=torch.Generator().manual_seed(seed))


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
        if name not in ("past_key_values", "attentions", "rope_deltas"):
            out |= floats(value, f"{prefix}.{name}" if prefix else name)
    return out


def _call(**given: Any) -> Callable[[PreTrainedModel], Outputs]:
    return lambda model: floats(model(**given))


def scenarios(model: PreTrainedModel, inputs: dict[str, Any]) -> Iterator[Scenario]:
    """Every scenario that the model's forward has arguments for. ``inputs`` are those of a plain call."""
    known = _parameters(model)
    yield Scenario("plain", _call(**inputs))
    if "input_ids" not in inputs:
        yield from _frames(known, inputs)
        return
    paired = "decoder_input_ids" in inputs
    ids = inputs["input_ids"]
    if "attention_mask" in known and ids.shape == (BATCH, TOKENS):
        for kind in ("right", "left", "inner"):
            mask = padding(kind)
            yield Scenario(f"{kind} padding", _call(**inputs, attention_mask=mask), mask.bool())
        if not paired:
            whole = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(BATCH, 1, -1, -1).clone()
            whole[1, :, 8:, 2:4] = False
            yield Scenario("4D mask", _four(inputs, whole))
    if "position_ids" in known and not paired and ids.shape == (BATCH, TOKENS):
        packed = torch.cat([torch.arange(5), torch.arange(TOKENS - 5)]).expand(BATCH, -1)
        yield Scenario("packed position_ids", _call(**inputs, position_ids=packed, use_cache=False))
    if model.can_generate() and ids.shape == (BATCH, TOKENS):
        yield from _generating(known, inputs, paired)


def _four(inputs: dict[str, Any], mask: Tensor) -> Callable[[PreTrainedModel], Outputs]:
    def run(model: PreTrainedModel) -> Outputs:
        # added to the scores, as every attention function of transformers takes it
        added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        return floats(model(**inputs, attention_mask=added))

    return run


def _frames(known: set[str], inputs: dict[str, Any]) -> Iterator[Scenario]:
    """Audio and images: a shorter second row, where a mask can say so; every frame that comes back is compared."""
    name = next((n for n in ("input_values", "input_features") if n in inputs), None)
    if name is None or "attention_mask" not in known:
        return
    length = inputs[name].shape[-1] if name == "input_values" else None
    if length is None:
        return
    mask = torch.ones(inputs[name].shape[0], length, dtype=torch.long)
    mask[1, length * 5 // 8 :] = 0
    yield Scenario("right padding", _call(**inputs, attention_mask=mask))


def _generating(known: set[str], inputs: dict[str, Any], paired: bool) -> Iterator[Scenario]:
    prompt = {k: v for k, v in inputs.items() if k != "decoder_input_ids"}
    mask = padding("left")
    common = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0,
              "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}  # fmt: skip

    def generating(**more: Any) -> Callable[[PreTrainedModel], Outputs]:
        def run(model: PreTrainedModel) -> Outputs:
            found = model.generate(**prompt, attention_mask=mask, **{**common, **more})
            logits = torch.stack(found.logits, 1) if found.logits else torch.zeros(0)
            return {"tokens": found.sequences.float(), "logits": logits}

        return run

    yield Scenario("greedy", generating())
    yield Scenario("beams", generating(num_beams=3, output_logits=False))
    yield Scenario("static cache", generating(cache_implementation="static", disable_compile=True))
    if "past_key_values" in known and not paired:
        yield Scenario("chunks", _chunks(inputs))


def _chunks(inputs: dict[str, Any]) -> Callable[[PreTrainedModel], Outputs]:
    def run(model: PreTrainedModel) -> Outputs:
        ids, cache, out = inputs["input_ids"], None, []
        for begin, end in ((0, 5), (5, 6), (6, TOKENS)):
            found = model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            out.append(found[0] if "logits" not in found else found.logits)
        return {"logits": torch.cat(out, 1)}

    return run
