"""Timelines: the backend that each bundled release of an engine takes, with the reasons where the choice changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from docs.changes import ARCHS, compared
from docs.releases import versions

from attnreg.analysis.moves import Move
from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.explain.changes import MoveGroup, grouped
from attnreg.language.vocabulary import Architecture
from attnreg.models.questions import ModelOptions, model_layers, phases_of, questions_of
from docs_site.answers import Answer, on
from docs_site.frame import Site


class Span(NamedTuple):
    """Successive releases with the same answers: their first and last version, their number, and the answers.

    Each answer has its layers, "" for all. ``moved``: the release before them answers otherwise.
    """

    first: str
    last: str
    releases: int
    answers: tuple[tuple[str, str], ...]
    moved: bool

    @property
    def title(self) -> str:
        return self.first if self.releases == 1 else f"{self.first} – {self.last}"


class Lane(NamedTuple):
    """What some architectures or models get in the releases of an engine; for each change its release and reasons."""

    names: tuple[str, ...]
    spans: tuple[Span, ...]
    whys: tuple[tuple[str, str], ...]


class Flow(NamedTuple):
    """Moves from one backend to another for the same reasons, and how many groups of layers move."""

    group: MoveGroup
    layers: int


def of_model(site: Site, engine: str, model: str) -> list[Lane]:
    """The lanes of a model on the architectures that pages compare; those with equal answers stand together."""
    return _together((arch, *_lane(site, engine, model, arch)) for arch in _known(site, engine, ARCHS))


def of_architecture(site: Site, engine: str, arch: str) -> list[Lane]:
    """The lanes of the well-known models on an architecture."""
    found = _known(site, engine, [arch])
    return _together((model, *_lane(site, engine, model, arch)) for model in bundled_configs()) if found else []


def flows(before: str, after: str) -> list[Flow]:
    """The moves of well-known models from one release to another, the most first."""
    moves = compared(before, after).moves["models"]
    return sorted((Flow(group, _count(group)) for group in grouped(moves)), key=lambda flow: -flow.layers)


def _count(group: MoveGroup) -> int:
    return sum(len(archs) * len(models) for archs, models in group.rows)


def _known(site: Site, engine: str, archs: Sequence[str]) -> list[str]:
    newest = site.bundled[versions(site.bundled)[engine][-1]]
    return [arch for arch in archs if arch in newest.vocabulary.architectures]


def _together(lanes: Iterable[tuple[str, tuple[Span, ...], tuple[tuple[str, str], ...]]]) -> list[Lane]:
    alike: dict[tuple[tuple[Span, ...], tuple[tuple[str, str], ...]], list[str]] = {}
    for name, spans, whys in lanes:
        alike.setdefault((spans, whys), []).append(name)
    return [Lane(tuple(names), *key) for key, names in alike.items()]


def _lane(site: Site, engine: str, model: str, arch: str) -> tuple[tuple[Span, ...], tuple[tuple[str, str], ...]]:
    names = versions(site.bundled)[engine]
    said = [(name, answers_of(site, name, model, arch)) for name in names]
    spans: list[Span] = []
    whys = []
    for answers, some in itertools.groupby(said, key=lambda pair: pair[1]):
        releases = [name for name, _ in some]
        first, last = (name.rpartition("-")[2].removesuffix(".0") for name in (releases[0], releases[-1]))
        moved = bool(spans)
        if spans:
            before = names[names.index(releases[0]) - 1]
            why, moved = _why(before, releases[0], model, arch)
            whys.append((first, why))
        spans.append(Span(first, last, len(releases), answers, moved))
    return tuple(spans), tuple((version, why) for version, why in whys if why)


def answers_of(site: Site, name: str, model: str, arch: str) -> tuple[tuple[str, str], ...]:
    """Each distinct answer of a release, with the layers that get it; "" where all do."""
    by_answer: dict[str, list[str]] = {}
    for layers, answer in asked(site, name, model).get(arch, []):
        if answer is not None:
            by_answer.setdefault(answer.title, []).append(layers)
    if len(by_answer) <= 1:
        return tuple((title, "") for title in by_answer) or (("no data", ""),)
    return tuple((title, ", ".join(dict.fromkeys(layers))) for title, layers in by_answer.items())


def asked(site: Site, name: str, model: str) -> dict[str, list[tuple[str, Answer | None]]]:
    """Architecture -> each question about a model, as layers and phase, with a registry's answer."""
    key = ("timeline", name, model)
    if key not in site.kept:
        registry = site.bundled[name]
        layers = model_layers(str(bundled_configs()[model]), ModelOptions(), registry)
        questions = questions_of(layers, ModelOptions(), phases=phases_of(registry))
        labels = [_label(q.layers, q.request.phase if q.request else "any") for q in questions]
        site.kept[key] = {
            arch.name: [
                (label, on(site, name, q.request, arch) if q.request else None)
                for label, q in zip(labels, questions, strict=True)
            ]
            for arch in registry.vocabulary.architectures.values()
        }
    kept: dict[str, list[tuple[str, Answer | None]]] = site.kept[key]
    return kept


def _label(layers: str, phase: str) -> str:
    return layers.partition(" (")[0] + ("" if phase == "any" else f", {phase}")


def _why(before: str, after: str, model: str, arch: str) -> tuple[str, bool]:
    """The reasons for the changes of a model's layers on an architecture, and whether another kernel runs.

    The reasons are "" on an architecture that pages do not compare.
    """
    found = compared(before, after).moves["models"]
    moves, renamed = (
        [move for move in some if move.asked.model == model and move.platform.arch == arch]
        for some in (found.moves, found.renamed)
    )
    if renamed and not moves:
        return "the same kernel under another name", False
    return ". ".join(dict.fromkeys(text for move in moves for text in _reasons(move))), True


def _reasons(move: Move) -> list[str]:
    return [*move.changes, *map(str, move.why)] if move.why else [*move.changes, *move.how[1:]]


def titled(site: Site, names: Iterable[str]) -> str:
    """``sm90 (H100), sm100 (B200)``: architectures by their titles; other names as they are."""
    known: dict[str, Architecture] = {**site.registries["default"].vocabulary.architectures}
    return ", ".join(known[name].title if name in known else name for name in names)
