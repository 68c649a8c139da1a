"""The pages that answer in the browser, and the data that they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from docs.changes import ARCHS, compared
from docs.registries import bundled
from docs.releases import versions
from markupsafe import Markup
from picker import asking, runtime
from picker.lists import lists

from attnreg.compile.inputs.bundled import bundled_configs, bundled_overlays
from attnreg.explain.changes import grouped
from attnreg.language.vocabulary import Architecture
from attnreg.registry import Registry
from docs_site.frame import Asset, Page, Site
from docs_site.history import upgrades
from docs_site.registries import titles

# the scripts of the page; each needs those before it
PAGE = ("store", "python", "address", "words", "answer", "form", "picker", "plan")
COMPARE = ("store", "python", "answer", "compare")
# the folder where `make site` keeps Python for browsers; without it, the site's pages say that it is missing
RUNTIME = ".cache/python-in-browsers"
# the first question of the picker, to the newest release of vLLM
EXAMPLE = "#registry={}&arch=sm90&model=gpt-oss-120b"
# the numbers of ranks that the form offers
RANKS = (1, 2, 4, 8, 16)
WITHOUT_SCRIPT = (
    ("registries.html", "the registries: every backend, its claims and its orders"),
    ("guides/explain.html", "answers for well-known models, written out"),
)


def pages(site: Site) -> Iterator[Page | Asset]:
    """The picker and the comparison, with the files that they load: lists of the form, computed answers, and Python."""
    registries = {**site.bundled, **{name: bundled(name) for name in bundled_overlays()}}
    answered = models_answered(site)
    for name, registry in registries.items():
        yield data(f"{name}/lists", lists(registry))
        for model in answered[name]:
            yield data(f"answers/{name}/{model or 'request'}", answers(site, registry, model))
    yield from (Asset(f"data/python/{name}", packed) for name, packed in runtime.scripts(site.root / RUNTIME).items())
    releases = versions(site.bundled)
    picker = {
        "registries": list(registries),
        "newest": {engine: names[-1] for engine, names in releases.items()},
        "products": products(site),
        "kv_dtypes": list(site.registries["default"].vocabulary.words_of("kv_dtype")),
        "models": list(bundled_configs()),
        "answered": answered,
        "ranks": RANKS,
        # the files with pages, which lines of data link to
        "files": sorted({file for registry in site.bundled.values() for file in registry.files}),
        "example": EXAMPLE.format(releases["vllm"][-1]),
    }
    values: dict[str, Any] = {"picker": script(picker), "scripts": PAGE, "without_script": WITHOUT_SCRIPT}
    yield Page("pick.html", "picker.html.j2", "Which kernel will my model get?", values, kind="tool")
    for before, after in upgrades(site):
        yield data(f"compare/{before}-to-{after}", moved(before, after))
    values = {
        "registries": list(registries),
        "architectures": [(arch.name, arch.title) for arch in _architectures(site)],
        "scripts": COMPARE,
        "before": releases["vllm"][0],
        "after": releases["vllm"][-1],
        "pairs": upgrades(site),
        "titles": titles(site),
        "compare": script({"models": " ".join(bundled_configs()), "pairs": [f"{a}-to-{b}" for a, b in upgrades(site)]}),
        "without_script": WITHOUT_SCRIPT,
    }
    yield Page("compare.html", "compare.html.j2", "What does a change of data change?", values, kind="tool")


def products(site: Site) -> dict[str, str]:
    """Every name of a product and of an architecture -> the architecture."""
    archs = _architectures(site)
    names = {name: arch.name for arch in archs for name in (*arch.aliases, *arch.products)}
    return names | {arch.name: arch.name for arch in archs}


def moved(before: str, after: str) -> dict[str, Any]:
    """What the page of the comparison shows of two releases at once: the moves of well-known models on some GPUs."""
    groups = grouped(compared(before, after).moves["models"])
    rows = [[g.before, g.after, [*map(list, g.rows)], [*g.changes, *g.why]] for g in groups]
    return {"archs": list(ARCHS), "rows": rows, "notes": list(compared(before, after).moves["models"].notes)}


def models_answered(site: Site) -> dict[str, list[str]]:
    """Registry -> the models whose answers the build computes, "" for one request without a model.

    attnreg's own registry and the newest release of each engine have every model that the site asks about. Every
    registry has the request, because the pages of architectures lead to it.
    """
    newest = {"default", *(names[-1] for names in versions(site.bundled).values())}
    models = ["", *(site.asked or bundled_configs())]
    return {name: models if name in newest else [""] for name in (*site.bundled, *bundled_overlays())}


def answers(site: Site, registry: Registry, model: str) -> dict[str, dict[str, Any]]:
    """Architecture -> the page's answer for a bundled model on it, without further options; "" is one request."""
    key = ("answers", registry.name, model)
    if key not in site.kept:
        asking.load_with(bundled)
        architectures = registry.vocabulary.architectures.values()
        site.kept[key] = {arch.name: asking.answer(words(registry.name, arch, model)) for arch in architectures}
    kept: dict[str, dict[str, Any]] = site.kept[key]
    return kept


def words(registry: str, arch: Architecture, model: str) -> list[str]:
    """The options with which the command answers the same question."""
    asked = ["--platform", arch.platform, "--arch", arch.name]
    asked += ["--model", str(bundled_configs()[model])] if model else []
    return asked + (["--engine", registry] if registry != "default" else [])


def _architectures(site: Site) -> list[Architecture]:
    return list(site.registries["default"].vocabulary.architectures.values())


def data(path: str, value: object) -> Asset:
    """A file of data as a script, by its path below data/: a page from a disk may load a script alone."""
    return Asset(f"data/{path}.js", f"attnregData[{json.dumps(path)}]={script(value)};\n".encode())


def script(value: object) -> Markup:
    """A value as JavaScript that is safe inside a page."""
    return Markup(json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"))
