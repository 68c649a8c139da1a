"""The pages that answer in the browser, and the data that they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from docs.registries import bundled
from docs.releases import versions
from markupsafe import Markup
from picker import asking, browser, runtime
from picker.lists import lists

from attnreg.compile.inputs.bundled import bundled_configs, bundled_overlays
from attnreg.language.vocabulary import Architecture
from attnreg.registry import Registry
from docs_site.frame import Asset, Page, Site

# the scripts of the page; each needs those before it
PAGE = ("store", "python", "address", "answer", "form", "picker")
COMPARE = ("store", "python", "compare")
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
    picker = {
        "registries": list(registries),
        "models": list(bundled_configs()),
        "answered": answered,
        "ranks": RANKS,
        # the files with pages, which lines of data link to
        "files": sorted({file for registry in site.bundled.values() for file in registry.files}),
        "example": EXAMPLE.format(versions(site.bundled)["vllm"][-1]),
    }
    values: dict[str, Any] = {"picker": script(picker), "scripts": PAGE, "without_script": WITHOUT_SCRIPT}
    yield Page("pick.html", "picker.html.j2", "Which kernel will my model get?", values, kind="tool")
    releases = versions(site.bundled)["vllm"]
    compared = ("diff", releases[0], releases[-1])
    yield data("compare", json.loads(browser.command(*compared)))
    values = {"registries": list(registries), "architectures": _architectures(site), "scripts": COMPARE}
    values |= {"before": releases[0], "after": releases[-1], "built": " ".join(compared)}
    values["without_script"] = WITHOUT_SCRIPT
    yield Page("compare.html", "compare.html.j2", "What does a change of data change?", values, kind="tool")


def models_answered(site: Site) -> dict[str, list[str]]:
    """Registry -> the models whose answers the build computes, "" for one request without a model.

    attnreg's own registry and the newest release of each engine have every bundled model. Every registry has the
    request, because the pages of architectures lead to it.
    """
    newest = {"default", *(names[-1] for names in versions(site.bundled).values())}
    return {name: ["", *bundled_configs()] if name in newest else [""] for name in (*site.bundled, *bundled_overlays())}


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


def _architectures(site: Site) -> list[str]:
    return [a.title for a in site.registries["default"].vocabulary.architectures.values()]


def data(path: str, value: object) -> Asset:
    """A file of data as a script, by its path below data/: a page from a disk may load a script alone."""
    return Asset(f"data/{path}.js", f"attnregData[{json.dumps(path)}]={script(value)};\n".encode())


def script(value: object) -> Markup:
    """A value as JavaScript that is safe inside a page."""
    return Markup(json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"))
