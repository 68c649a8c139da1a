"""Pages of an engine whose steps name the backend of a server: its registry has neither orders nor claims."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docs.capabilities import link

from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.language.conditions import Clause, Condition
from attnreg.models.questions import ModelOptions, model_layers, phases_of, questions_of
from attnreg.registry import Backend, Registry
from attnreg.selection.question import Question
from docs_site.answers import Answer, on
from docs_site.architectures import every
from docs_site.backends import follows, yaml_of
from docs_site.frame import Asset, Page, Site
from docs_site.gets import getting
from docs_site.registries import StepEffect, above_registry, effects, titles


def pages(site: Site) -> Iterator[Page | Asset]:
    """The pages of the backends and the architectures of every such engine."""
    for name, registry in site.bundled.items():
        if registry.orders:
            continue
        above = above_registry(site, name)
        asked = _answers(site, name, registry)
        for row in registry.backends.values():
            values = _backend(site, name, row)
            path = f"{name}/backends/{row.name}.html"
            yield Page(path, "resolved_backend.html.j2", row.name, values, "backend", name, above)
        for arch in registry.vocabulary.architectures.values():
            answers = [(model, question, on[arch.name]) for model, question, on in asked]
            values = every(site, name, arch) | {"answers": answers, "plain": [], "chart": None, "lines": []}
            path = f"{name}/architectures/{arch.name}.html"
            yield Page(path, "architecture.html.j2", arch.title, values, "architecture", name, above)


def _answers(site: Site, name: str, registry: Registry) -> list[tuple[str, Question, dict[str, Answer | None]]]:
    """Each question about each bundled model, with its answers by architecture."""
    out = []
    for model, config in bundled_configs().items():
        layers = model_layers(str(config), ModelOptions(), registry)
        for question in questions_of(layers, ModelOptions(), phases=phases_of(registry)):
            asked = question.request
            archs = registry.vocabulary.architectures.values()
            out.append((model, question, {a.name: on(site, name, asked, a) if asked else None for a in archs}))
    return out


def _backend(site: Site, name: str, row: Backend) -> dict[str, Any]:
    registry = site.bundled[name]
    taken = list(effects(registry))
    facets = _of_backends(registry)
    naming = [at for at in taken if any(at.effect.sets.get(facet) == row.name for facet in facets)]
    return {
        "row": row,
        "engine": titles(site)[name],
        "getting": getting(site, name, row.name),
        "naming": naming,
        "looking": [at for at in taken if at not in naming and _looks_at(registry, at, facets, row.name)],
        "follows": follows(registry, row),
        "yaml": yaml_of(site, row.where),
        "source": link(registry, row.source),
    }


def _of_backends(registry: Registry) -> list[str]:
    """The facets whose values are backends. The kernels inside a backend have facets with words of the same names."""
    facets = registry.vocabulary.facets.values()
    return [f.name for f in facets if {*registry.backends} <= {str(word) for word in f.words}]


def _looks_at(registry: Registry, at: StepEffect, facets: list[str], backend: str) -> bool:
    """Whether the condition of an effect tests for a backend, directly or through a derived facet.

    facets: those whose values are backends.
    """

    def tests(condition: Condition) -> bool:
        return any(_mentions(clause, facets, backend) or tested(clause.facet) for clause in condition.walk())

    def tested(facet: str) -> bool:
        derived = registry.derived.get(facet)
        return derived is not None and any(tests(when) for when, _, _ in derived.cases)

    return tests(at.step.when) or tests(at.effect.when)


def _mentions(clause: Clause, facets: list[str], backend: str) -> bool:
    return clause.facet in facets and backend in clause.matcher.mentions
