"""The pages that answer in the browser, and the data that they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from docs.registries import bundled
from markupsafe import Markup
from picker import runtime
from picker.models import RANKS, Reading, asks, model_document
from picker.registries import page_document

from attnreg.compile.inputs.bundled import bundled_configs, bundled_overlays
from docs_site.frame import Asset, Page, Site

# in the order in which each needs those before it
EVALUATOR = ("versions", "packages", "registry", "selector", "question", "likeness", "remedies", "explain")
PAGE = ("store", "python", "address", "answer", "form", "picker")
COMPARE = ("store", "python", "compare")
# where `make site` keeps Python for browsers; without it the site has pages that say so
RUNTIME = ".cache/python-in-browsers"
EXAMPLE = "#registry=default&arch=sm90&model=gpt-oss-120b"
WITHOUT_SCRIPT = (
    ("registries.html", "the registries: every backend, its claims and its orders"),
    ("guides/explain.html", "answers for well-known models, written out"),
)


def pages(site: Site) -> Iterator[Page | Asset]:
    """The picker, every bundled registry and overlay as a script, and every bundled model for each of them."""
    registries = {**site.bundled, **{name: bundled(name) for name in bundled_overlays()}}
    configs = {name: Reading(str(file)) for name, file in bundled_configs().items()}
    # what a model asks for depends on a registry's words for its KV cache: those that share them share its document
    first: dict[str, str] = {}
    models_of = {}
    for name, registry in registries.items():
        yield _data(f"{name}/registry", page_document(registry), name)
        models_of[name] = first.setdefault(asks(registry), name)
    for name in first.values():
        for model, reading in configs.items():
            key = f"{name}/models/{model}"
            yield _data(key, model_document(reading, registries[name]), key)
    picker = {
        "registries": list(registries),
        "models": list(configs),
        "modelsOf": models_of,
        "ranks": RANKS,
        # those that have pages, to which a line of data is a link
        "files": sorted({file for registry in site.bundled.values() for file in registry.files}),
        "example": EXAMPLE,
    }
    values = {"picker": _script(picker), "scripts": (*EVALUATOR, *PAGE), "without_script": WITHOUT_SCRIPT}
    yield from (Asset(f"data/python/{name}", data) for name, data in runtime.scripts(site.root / RUNTIME).items())
    yield Page("pick.html", "picker.html.j2", "Which kernel will my model get?", values, kind="tool")
    values = {"registries": list(registries), "architectures": _architectures(site), "scripts": COMPARE}
    values["without_script"] = WITHOUT_SCRIPT
    yield Page("compare.html", "compare.html.j2", "What does a change of data change?", values, kind="tool")


def _architectures(site: Site) -> list[str]:
    return [a.title for a in site.registries["default"].vocabulary.architectures.values()]


def _data(path: str, document: dict[str, Any], key: str) -> Asset:
    return Asset(f"data/{path}.js", f"attnregData[{json.dumps(key)}]={_script(document)};\n".encode())


def _script(value: object) -> Markup:
    """A value as JavaScript that may stand in a page."""
    return Markup(json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"))
