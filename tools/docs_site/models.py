"""A page for each bundled model and each model family: its layers, their KV cache, and the backend of each group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from docs.changes import ARCHS
from docs.releases import versions

from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.models.groups import describe_indices
from attnreg.models.kv_memory import GroupMemory, kv_memory, total
from attnreg.models.questions import ModelOptions, model_layers, phases_of, questions_of
from attnreg.models.reader import ConfigError, ModelLayers, bundled_families, requests_from_model
from attnreg.platforms import Platform
from attnreg.registry import Registry
from attnreg.selection.question import Question
from attnreg.selection.selector import evaluate
from docs_site.answers import sold_as, table
from docs_site.charts import Chart, Line, lines
from docs_site.frame import Asset, Page, Site, yaml_lines
from docs_site.registries import titles
from docs_site.timelines import answers_of, of_model, titled
from docs_site.ways import Stop, way

# the lengths in tokens at which pages count the KV cache
_LENGTHS = (8192, 131072)
# the architectures on which pages of models draw the selection
_DRAWN = ("sm90", "gfx942")


@dataclass(frozen=True)
class Table:
    """A registry's answers to some questions on its architectures; ``releases``: all registries with these answers."""

    name: str
    registry: str
    questions: Sequence[Question]
    rows: Any
    releases: list[str]

    def alike(self, other: Table) -> bool:
        """Whether a release of the same engine has the same answers to the same questions."""
        engines = {name.rpartition("-")[0] for name in (self.name, other.name)}
        asked = [[(q.layers, q.label) for q in table.questions] for table in (self, other)]
        return len(engines) == 1 and asked[0] == asked[1] and self.rows == other.rows

    @property
    def title(self) -> str:
        """``vLLM 0.33.0, 0.32.0``: the registries with these answers."""
        return ", ".join([self.registry, *(name.rpartition("-")[2] for name in self.releases[1:])])


@dataclass(frozen=True)
class Known:
    """A model's layers, and the contents of its page; ``config`` is the path of its config.json, "" for a family."""

    model: ModelLayers
    site: Site
    config: str = ""

    def questions(self, registry: Registry) -> Sequence[Question]:
        """The questions of `attnreg explain` to a registry: each group of layers, by phase if the phase matters."""
        model = model_layers(self.config, ModelOptions(), registry) if self.config else self.model
        return questions_of(model, ModelOptions(), phases=phases_of(registry))

    @cached_property
    def memory(self) -> list[tuple[GroupMemory, str, list[str]]]:
        """For each group: its memory, its layers in words, and the bytes at some lengths."""
        words = self.site.registries["default"].vocabulary.words
        groups = kv_memory(self.model, "auto", words).groups
        return [(g, describe_indices(g.group.layers), g.words(_LENGTHS)[1:]) for g in groups]

    @property
    def token_bytes(self) -> str:
        """The bytes of the first token in words."""
        return total(group.first for group, _, _ in self.memory).words(lambda size: f"{size:,}")

    def tables(self) -> list[Table]:
        """The answers of the registries: attnreg's own, then each engine's, the last release first.

        Releases with the same answers share a table. A family has the tables of the last releases alone: more would
        take most of the build. It has none of an engine that resolves the backend of a server from a config.
        """
        bundled = self.site.bundled
        engines = versions(bundled).values()
        out = [self._table(name) for name in bundled if name not in {*chain(*engines)}]
        for names in engines:
            asked = names if self.config else [name for name in names[-1:] if bundled[name].orders]
            for name in reversed(asked):
                made = self._table(name)
                if out[-1].alike(made):
                    out[-1].releases.append(name)
                else:
                    out.append(made)
        return out

    def _table(self, name: str) -> Table:
        questions = self.questions(self.site.bundled[name])
        rows = table(self.site, name, [question.request for question in questions])
        return Table(name, titles(self.site)[name], questions, rows, [name])


def pages(site: Site) -> Iterator[Page | Asset]:
    """The pages of the models and of the families, and their lists."""
    configs = {name: requests_from_model(str(file)) for name, file in bundled_configs().items()}
    families = bundled_families()
    defaults = {name: _default(name) for name in families}
    of_family: dict[str, list[str]] = {}
    for name, model in configs.items():
        of_family.setdefault(model.model_type, []).append(name)
    above = (("Models", "models/index.html"),)
    values: dict[str, Any] = {"configs": configs, "families": list(families), "defaults": defaults}
    yield Page("models/index.html", "models.html.j2", "Models", values, "list")
    for name, model in configs.items():
        known = Known(model, site, str(bundled_configs()[name]))
        values = _values(known) | {"family": model.model_type, "config": name} | _first_screen(known, name)
        yield Page(f"models/{name}.html", "model.html.j2", name, values, "model", above=above)
        if values["chart"]:
            yield values["chart"].file()
    for name in families:
        layers = defaults[name]
        values = {
            "name": name,
            "like": families.like(name),
            "lineage": [(base, site.at(families.where(base))) for base in families.lineage(name)[1:]],
            "note": families.note(name),
            "source": families.source(name),
            "configs": of_family.get(name, []),
            "lines": yaml_lines(families.text(name)),
            **(_values(Known(layers, site)) if layers else {"known": None}),
        }
        yield Page(f"families/{name}.html", "family.html.j2", name, values, "model family", above=above)
    for base in families.files:
        if base.startswith("_"):
            file = families.where(base).file
            values = {"lines": yaml_lines(site.text(file))}
            yield Page(f"files/{file}.html", "file.html.j2", file, values, kind="file", searched=False)


def _default(name: str) -> ModelLayers | None:
    """The layers of a family by the defaults of its class; None if only its configs tell them."""
    try:
        return requests_from_model({"model_type": name})
    except ConfigError:
        return None


def _values(known: Known) -> dict[str, Any]:
    return {"known": known, "lengths": [f"{n:,} tokens" for n in _LENGTHS], "sold_as": sold_as}


def _first_screen(known: Known, name: str) -> dict[str, Any]:
    """What the page of a bundled model begins with: the newest answers, the way to one, the releases, the KV cache."""
    site = known.site
    newest = {engine: names[-1] for engine, names in versions(site.bundled).items()}
    shown = [*reversed(newest.values()), "default"]
    archs = site.registries["default"].vocabulary.architectures
    answers = [
        (archs[arch], [(at, answers_of(site, at, name, arch)) for at in shown]) for arch in ARCHS if arch in archs
    ]
    return {
        "shown": [(at, titles(site)[at]) for at in shown],
        "answers": answers,
        "ways": _ways(known, newest["vllm"]),
        "timelines": [(engine, of_model(site, engine, name)) for engine in reversed(newest)],
        "titled": titled,
        "chart": memory_chart(known, name),
    }


def _ways(known: Known, name: str) -> list[tuple[str, str, list[Stop]]]:
    """The ways of the layers through the order of an engine, on some architectures; equal ways stand together."""
    registry = known.site.bundled[name]
    found: dict[str, tuple[list[str], str, list[Stop]]] = {}
    for arch in (registry.vocabulary.architectures[name] for name in _DRAWN):
        for question in known.questions(registry):
            if question.request is None:
                continue
            stops = way(evaluate(question.request, Platform(platform=arch.platform, arch=arch.name), registry))
            layers = question.layers + ("" if question.request.phase == "any" else f", {question.request.phase}")
            found.setdefault(f"{arch.name} {stops!r}", ([], arch.title, stops))[0].append(layers)
    return [(title, ", ".join(dict.fromkeys(layers)), stops) for layers, title, stops in found.values()]


def memory_chart(known: Known, name: str) -> Chart | None:
    """The bytes of the KV cache of one request against its length; None if they are not known, or there are none."""
    groups = [(g, words) for g, words, _ in known.memory if g.token_bytes and not g.what]
    if not groups or not all(g.first.known for g, _ in groups):
        return None
    lengths = [2**power for power in range(9, 18)]
    of = [Line("all layers", [(n, sum(g.at(n).counted for g, _ in groups)) for n in lengths])]
    if len(groups) > 1:
        of += [Line(f"{len(g.group.layers)} layers ({w})", [(n, g.at(n).counted) for n in lengths]) for g, w in groups]
    note = f"In {known.model.dtype}, on one GPU. Layers with a window keep its tokens alone."
    title = "KV cache of one request"
    return lines(f"kv-{name}", title, note, ("tokens", "bytes"), of)
