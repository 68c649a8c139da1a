"""Which well-known models get each backend of a registry, on which architectures, and by which step of a start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from docs.changes import ARCHS

from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.language.vocabulary import Architecture
from attnreg.selection.steps import Taken
from docs_site.answers import Answer
from docs_site.frame import Site
from docs_site.timelines import asked


class Model(NamedTuple):
    """A model, and the layers that get an answer; "" for all of them."""

    name: str
    layers: str


class Getting(NamedTuple):
    """Architectures on which the same models get a backend, these models, and the steps that set it."""

    archs: list[Architecture]
    models: list[Model]
    steps: list[Taken]


class Group(NamedTuple):
    """Models with one answer on an architecture; a step of the engine's start that set it is the same."""

    answer: Answer
    models: list[Model]


def getting(site: Site, name: str, row: str) -> list[Getting]:
    """Who gets a backend on the architectures that pages compare, or on every one if the registry has no orders."""
    archs = site.bundled[name].vocabulary.architectures
    out: list[Getting] = []
    for arch in archs if not site.bundled[name].orders else [arch for arch in ARCHS if arch in archs]:
        groups = [group for group in on_architecture(site, name, arch) if group.answer.name == row]
        models = _merged(model for group in groups for model in group.models)
        steps = [group.answer.by for group in groups if group.answer.by]
        if models and out and (out[-1].models, out[-1].steps) == (models, steps):
            out[-1].archs.append(archs[arch])
        elif models:
            out.append(Getting([archs[arch]], models, steps))
    return out


def _merged(models: Iterable[Model]) -> list[Model]:
    """Models of several groups in the order of their names, each once."""
    layers: dict[str, list[str]] = {}
    for model in models:
        layers.setdefault(model.name, []).append(model.layers)
    return [Model(name, ", ".join(filter(None, layers[name]))) for name in bundled_configs() if name in layers]


def on_architecture(site: Site, name: str, arch: str) -> list[Group]:
    """The well-known models on an architecture by their answers, those with a backend and most models first."""
    key = ("groups", name, arch)
    if key not in site.kept:
        groups: dict[tuple[Answer, object], list[Model]] = {}
        for model in bundled_configs():
            answers: dict[tuple[Answer, object], list[str]] = {}
            every = [(layers, answer) for layers, answer in asked(site, name, model).get(arch, []) if answer]
            for layers, answer in every:
                answers.setdefault((answer, answer.by and answer.by.where), []).append(layers)
            for alike, some in answers.items():
                layers = _words(some, [layers for layers, _ in every]) if len(answers) > 1 else ""
                groups.setdefault(alike, []).append(Model(model, layers))
        made = [Group(answer, models) for (answer, _), models in groups.items()]
        # answers before reasons why there is none
        site.kept[key] = sorted(made, key=lambda group: (not group.answer.name, -len(group.models)))
    kept: list[Group] = site.kept[key]
    return kept


def _words(some: Sequence[str], every: Sequence[str]) -> str:
    """``52 layers, 10 layers``: the labels of layers; with its phase where another phase of them is not among these."""
    out: dict[str, None] = {}
    for label in some:
        layers = label.partition(", ")[0]
        whole = {at for at in every if at.partition(", ")[0] == layers} <= {*some}
        out.setdefault(layers if whole else label)
    return ", ".join(out)
