"""Pages of a whole registry: its contents, its orders, and its files with a link for every line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import docs.page
from docs.capabilities import link

from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.models.reader import requests_from_model
from attnreg.platforms import Platform
from attnreg.registry import Effect, Registry, Step
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import Selection
from docs_site.frame import Asset, Page, Site, yaml_lines
from docs_site.history import upgrades


def pages(site: Site) -> Iterator[Page | Asset]:
    """The list of registries, and for each registry its page, its orders and its files."""
    yield Page(
        "registries.html",
        "registries.html.j2",
        "Registries",
        {"titles": titles(site), "changes": upgrades(site), "holds": holds},
        kind="list",
    )
    files: dict[str, None] = {}
    for name, registry in site.bundled.items():
        title = titles(site)[name]
        above = above_registry(site, name)
        values: dict[str, Any] = {
            "holds": holds(registry),
            "changes": [pair for pair in upgrades(site) if name in pair],
        }
        yield Page(f"{name}/index.html", "registry.html.j2", title, values, "registry", name, above[:1])
        if registry.orders:
            values = {"platforms": platforms(registry)}
            yield Page(f"{name}/orders.html", "orders.html.j2", f"Orders of {title}", values, "orders", name, above)
        if registry.steps:
            values = {"effects": list(effects(registry))}
            yield Page(f"{name}/steps.html", "steps.html.j2", f"Steps of {title}", values, "steps", name, above)
        files |= dict.fromkeys(registry.files)
    for file in files:
        values = {"lines": yaml_lines(site.text(file))}
        yield Page(f"files/{file}.html", "file.html.j2", file, values, kind="file", searched=False)


def example(registry: Registry) -> tuple[str, Selection]:
    """The selection that the start page and README draw: the layers of a known model on an AMD GPU."""
    model = requests_from_model(str(bundled_configs()["gpt-oss-120b"]))
    request = next(group.request for group in model.groups if group.request is not None)
    arch = registry.vocabulary.architectures["gfx942"]
    title = f"{model.name} on {arch.title}: {model.groups[0].label}"
    return title, evaluate(request, Platform(platform=arch.platform, arch=arch.name), registry)


def titles(site: Site) -> dict[str, str]:
    """Name of each registry -> its title on pages."""
    return {name: "attnreg's own registry" if r.imports else _engine(name) for name, r in site.bundled.items()}


def holds(registry: Registry) -> str:
    """The contents of a registry in words: ``41 backends, 12 orders, 24 steps``."""
    counts = {
        "backend": len(registry.backends),
        "order": sum(map(len, registry.orders.values())),
        "step": len(registry.steps),
        "architecture": len(registry.vocabulary.architectures),
    }
    return ", ".join(f"{count} {noun}{'s' * (count != 1)}" for noun, count in counts.items() if count)


class StepEffect(NamedTuple):
    """An effect of a step of an engine's start, with its condition, as Markdown."""

    step: Step
    effect: Effect
    when: str
    does: str
    source: str


def effects(registry: Registry) -> Iterator[StepEffect]:
    """Every effect of every step, in their order."""
    for step in registry.steps:
        for effect in step.effects:
            conditions = [text for c in (step.when, effect.when) if (text := docs.page.in_words(c, ""))]
            when = " and ".join(conditions) or "always"
            yield StepEffect(step, effect, when, docs.page.effect_words(effect), link(registry, step.source))


def above_registry(site: Site, name: str) -> tuple[tuple[str, str], ...]:
    """The (title, path) of the pages that a page of a registry belongs to."""
    return (("Registries", "registries.html"), (titles(site)[name], f"{name}/index.html"))


def _engine(name: str) -> str:
    engine, _, version = name.rpartition("-")
    return f"{ {'vllm': 'vLLM', 'sglang': 'SGLang'}.get(engine, engine) } {version}"


def platforms(registry: Registry) -> list[tuple[str, str]]:
    """Name and legend of each platform that has orders."""
    words = registry.vocabulary.words["platforms"].values()
    return [(word.name, word.legend.rstrip(".")) for word in words if word.name in registry.orders]
