"""The start page: one question with its answer, how to install, the tasks, and what is proven."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docs.releases import versions

from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.language.vocabulary import Architecture
from docs_site.frame import Asset, Page, Site
from docs_site.history import upgrades
from docs_site.measured import proofs
from docs_site.picker import answers, data
from docs_site.registries import titles

# the first question: engine, model, architecture
_FIRST = ("vllm", "gpt-oss-120b", "sm90")
# the architectures that the page names first, by the product that most people have
_USUAL = ("sm90", "sm100", "sm103", "sm120", "sm89", "sm80", "gfx942", "gfx950")
_LINE = re.compile(r".*/(.*:\d+)$")
# an answer in short: title, kind, and for each set of layers its label, its winner, how it won, and the refused before
Short = list[Any]


def pages(site: Site) -> Iterator[Page | Asset]:
    """The start page, and for each engine that it offers a file with the answers for every model."""
    newest = {engine: names[-1] for engine, names in versions(site.bundled).items()}
    for name in newest.values():
        yield data(f"live/{name}", _live(site, name))
    before, after = upgrades(site)[-1]
    engine, model, arch = newest[_FIRST[0]], *_FIRST[1:]
    values = {
        "engines": [(name, titles(site)[name]) for name in reversed(newest.values())],
        "models": list(bundled_configs()),
        "archs": _architectures(site),
        "first": {"engine": engine, "model": model, "arch": arch},
        "answer": short(answers(site, site.bundled[engine], model)[arch]),
        "upgrade": (f"changes/{before}-to-{after}.html", titles(site)[before], titles(site)[after].rpartition(" ")[2]),
        "proof": proven(site),
        "titles": titles(site),
    }
    yield Page("index.html", "index.html.j2", "attnreg", values, kind="start")


def _architectures(site: Site) -> list[tuple[str, str]]:
    """Name and label of each architecture, the usual ones first."""
    known = site.registries["default"].vocabulary.architectures
    names = [name for name in _USUAL if name in known]
    return [(name, _label(known[name])) for name in (*names, *(name for name in known if name not in names))]


def _label(arch: Architecture) -> str:
    return " · ".join(filter(None, (", ".join(arch.products[:2]), arch.name)))


def _live(site: Site, name: str) -> dict[str, Any]:
    """Model -> the place of its answer on each architecture in a list of answers: many architectures answer alike."""
    archs = list(site.bundled[name].vocabulary.architectures)
    distinct: dict[str, int] = {}
    known: list[Short] = []
    models = {}
    for model in bundled_configs():
        views = answers(site, site.bundled[name], model)
        places = []
        for arch in archs:
            view = short(views[arch])
            if (key := repr(view)) not in distinct:
                distinct[key] = len(known)
                known.append(view)
            places.append(distinct[key])
        models[model] = places
    return {"archs": archs, "models": models, "answers": known}


def short(view: dict[str, Any]) -> Short:
    """What the start page shows of an answer: layers with one winner stand together."""
    groups: dict[str, list[Any]] = {}
    for answer in view["answers"]:
        label = answer["heading"].partition(" · ")[0]
        for verdict in answer["verdicts"]:
            rank = next((o["rank"] for o in verdict["others"] if "ranked lower" in str(o["reasons"])), 99)
            refused = [[o["name"], _first(o)] for o in verdict["others"] if o["rank"] < rank][:4]
            group = groups.setdefault(verdict["name"], [[], verdict["kind"], verdict["name"], verdict["how"], refused])
            group[0].append(label)
    if len(groups) == 1 and len(view["answers"]) > 1:
        return [["every layer", *rest] for _, *rest in groups.values()]
    return [[", ".join(dict.fromkeys(labels)), *rest] for labels, *rest in groups.values()]


def _first(other: dict[str, Any]) -> str:
    """The first reason against a candidate, with its line in short."""
    reasons = [r for r in other["reasons"] if not r[0].startswith("only for")] or other["reasons"]
    text, where = reasons[0]
    line = _LINE.match(where)
    return f"{text} ({line[1]})" if line else str(text)


def proven(site: Site) -> dict[str, Any]:
    """What the records prove: the cases of today's kernels, their backends and devices, and the worst error."""
    current = [proof for some in proofs().values() for proof in some if not proof.earlier]
    rows = site.registries["default"].backends.values()
    return {
        "cases": sum(proof.result["cases"] for proof in current),
        "backends": len({proof.record.title.partition("/")[0] for proof in current}),
        "kernels": sum(bool(row.modules) for row in rows),
        "devices": list(dict.fromkeys(proof.record.device for proof in current)),
        "worst": max((proof.worst for proof in current), default=0.0),
        "lines": sum(len(site.text(file).splitlines()) for file in _files(site)),
        "registries": len(site.bundled),
    }


def _files(site: Site) -> set[str]:
    return {file for registry in site.bundled.values() for file in registry.files}
