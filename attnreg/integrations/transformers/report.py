"""Explanations of the backends that ran, or will run, a model's layers, in the form of `attnreg explain`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from attnreg.explain.answers import Answer, Explanation, Verdict, title_of
from attnreg.integrations.tensors import unknown_dtype
from attnreg.integrations.transformers.call_cache import LayerRun
from attnreg.integrations.transformers.engine import Engine
from attnreg.models.groups import describe_indices
from attnreg.models.reader import requests_from_model
from attnreg.selection.question import Question
from attnreg.selection.wording import request_words


def explain_runs(engine: Engine, model: Any) -> Explanation:
    """The explanation of a model's runs, with a group for each kind of layer."""
    groups: dict[Any, list[LayerRun]] = {}
    for run in engine.runs_of(model):
        groups.setdefault((run.asked, id(run.selection), run.dense), []).append(run)
    answers, notes = [], []
    for same in groups.values():
        first = same[0]
        label = _label(first) + (" · dense" if first.dense else "")
        if first.dense:
            notes.append(f"{_layers(same)}: dense attention, through PyTorch, because {first.dense}")
        verdicts = (Verdict((first.selection,)),) if first.selection else ()
        answers.append(Answer(Question(first.asked.request, label, _layers(same)), verdicts))
    for why, modules in engine.latent_layers.reasons_in(model).items():
        layers = [getattr(module, "layer_idx", 0) for module in modules]
        word = "layer" if len(layers) == 1 else "layers"
        notes.append(f"{word} {describe_indices(layers)}: keys are expanded from their latents, because {why}")
    notes += _others(engine, model)
    return Explanation(engine.registry, _title(engine, model), tuple(answers), tuple(notes))


def plan_of(engine: Engine, model: Any) -> Explanation:
    """The explanation of the layers in a model's config, on the model's device."""
    others = _others(engine, model)
    if model.config._attn_implementation != engine.name:
        return Explanation(engine.registry, _title(engine, model), (), tuple(others))
    device, dtype = model.device, str(model.dtype).removeprefix("torch.")
    unknown = unknown_dtype(dtype, engine.registry)
    if unknown is not None:
        note = f"{unknown}; calls that no batch can express run densely, through PyTorch, and others are refused"
        return Explanation(engine.registry, _title(engine, model), (), (note, *others))
    packed = engine.compressed
    kv_dtype, skip_layers = ("auto", ()) if packed is None else (packed.kv_dtype, packed.skip_layers)
    layers = requests_from_model(model.config, dtype=dtype, kv_dtype=kv_dtype, skip_layers=skip_layers)
    answers = []
    for group in layers.groups:
        numbers = f"layers {describe_indices(group.layers)}"
        phases = [(group.request, group.label)]
        if group.request is not None:
            asked = [engine.of_phase(group.request, phase, device) for phase in ("prefill", "decode")]
            phases = [
                (r, f"{group.label} · {r.phase}" if r.phase != "any" else group.label) for r in dict.fromkeys(asked)
            ]
        # prompts too attend in the latent form to keys that an indexer chose
        if group.prefill is not None and group.request is not None and group.request.attention == "mla":
            phases.append(group.prefill)
        for request, label in phases:
            verdicts = () if request is None else (Verdict((engine.evaluate(request, device),)),)
            answers.append(Answer(Question(request, label, numbers), verdicts))
    notes = ("the model has not run yet: this is what its config asks for", *layers.assumptions, *others)
    return Explanation(engine.registry, _title(engine, model), tuple(answers), notes)


def _others(engine: Engine, model: Any) -> list[str]:
    """A note for each other implementation of a model, or of a part of it, that has no run through the engine."""
    names: dict[str, list[str]] = {}
    for part in model.modules():
        other = isinstance(part, PreTrainedModel) and part.config._attn_implementation not in (engine.name, None)
        if other and not engine.runs_of(part):
            names.setdefault(part.config._attn_implementation, []).append(type(part).__name__)
    return [
        f"{' and '.join(dict.fromkeys(classes))} runs by attn_implementation {name!r}: attnreg decides nothing for it"
        for name, classes in names.items()
    ]


def _title(engine: Engine, model: Any) -> str:
    device: torch.device = model.device
    here = engine.detects
    return title_of([engine.platform(device)], engine.registry, type(model).__name__, here=here, installed=here)


def _layers(same: list[LayerRun]) -> str:
    indices = [run.layer_idx for run in same if run.layer_idx is not None]
    if len(indices) == len(same):
        return f"{'layer' if len(set(indices)) == 1 else 'layers'} {describe_indices(indices)}"
    return same[0].module + (f" and {len(same) - 1} more" if len(same) > 1 else "")


def _label(run: LayerRun) -> str:
    asked = run.asked
    numbers = {"sliding_window": asked.window, "softcap": asked.softcap}
    # without the model, which the title names
    words = request_words(asked.request, numbers, without=("model",))
    return " · ".join([*words, f"{run.calls} call{'s' * (run.calls != 1)}"])
