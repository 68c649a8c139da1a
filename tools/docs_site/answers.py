"""A registry's answers to a request on each of its architectures, in the words of a table's cell."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnreg.analysis.value_classes import Variable
from attnreg.language.computed import taken_from
from attnreg.language.vocabulary import Architecture
from attnreg.platforms import Platform
from attnreg.registry import Registry
from attnreg.request import AttentionRequest
from attnreg.selection.selector import evaluate
from attnreg.selection.steps import Start, Taken
from attnreg.selection.trace import Selection
from docs_site.frame import Site

_MLA: dict[str, Any] = {"head_size": 576, "head_size_v": 512, "kv_lora_rank": 512, "num_heads": 128, "num_kv_heads": 1}
_MLA |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# plain layers in words -> their requests
PLAIN = {
    "32/8 heads of 128": AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8),
    "MLA as in DeepSeek-V3": AttentionRequest(attention="mla", **_MLA),
    "sparse MLA as in DeepSeek-V3.2": AttentionRequest(attention="mla_sparse", index_topk=2048, **_MLA),
}


@dataclass(frozen=True)
class Answer:
    """The chosen backend with its variant, "" if there is none; and a remark on it, or the reason for "none".

    ``by``: the step of an engine's start that set the backend, if one did. Answers that differ in it alone are equal.
    """

    name: str
    title: str
    but: str = ""
    by: Taken | None = field(default=None, compare=False)


def answer(request: AttentionRequest, platform: Platform, registry: Registry) -> Answer:
    """A registry's answer without flags, as if every package were installed."""
    return answer_of(evaluate(request, platform, registry))


def answer_of(selection: Selection) -> Answer:
    """A selection in the words of a table's cell."""
    chosen = selection.chosen
    if chosen is None:
        refusal = selection.start.refusal if selection.start else None
        if refusal:
            return Answer("", "not known" if selection.unknown else "refused", refusal.text)
        # a registry of a release whose code for processors was not read has no order for them
        return Answer("", "not stated" if selection.silence else "none")
    but = [f"slowly: {', '.join(chosen.emulates)}"] if chosen.emulates else []
    said = "; ".join([*but, *(["then fails"] if selection.fails else [])])
    return Answer(chosen.name, chosen.title, said, _set_by(selection.start, chosen.name))


def _set_by(start: Start | None, backend: str) -> Taken | None:
    """The step that set a facet to the backend which a later step then names; None if no step names the backend."""
    if start is None or start.named is None:
        return None
    setting = (
        taken
        for taken in reversed(start.taken)
        if taken is not start.named and backend in (after for _, after in taken.changes.values())
    )
    return next(setting, start.named)


def table(
    site: Site, name: str, requests: Sequence[AttentionRequest | None]
) -> list[tuple[list[Architecture], list[Answer | None]]]:
    """Groups of architectures with equal answers, each with its answers to the requests; None for no attention."""
    registry = site.bundled[name]
    rows: list[tuple[list[Architecture], list[Answer | None]]] = []
    for arch in registry.vocabulary.architectures.values():
        answers = [on(site, name, request, arch) if request else None for request in requests]
        if rows and rows[-1][1] == answers and rows[-1][0][0].platform == arch.platform:
            rows[-1][0].append(arch)
        else:
            rows.append(([arch], answers))
    return rows


def on(site: Site, name: str, request: AttentionRequest, arch: Architecture) -> Answer:
    """A registry's answer to a request on an architecture, kept for all requests that the registry answers alike.

    Many families ask for the same.
    """
    # a refusal names the architecture, by which no condition tells requests apart
    named = dict(request.extra).get("architecture")
    key = (name, _classes(site, name, request), _classes_of_arch(site, name, arch), named)
    kept = site.kept.get(key)
    if kept is None:
        platform = Platform(platform=arch.platform, arch=arch.name)
        kept = site.kept[key] = answer(request, platform, site.bundled[name])
    assert isinstance(kept, Answer)
    return kept


def _classes(site: Site, name: str, request: AttentionRequest) -> Hashable:
    """The same for all requests that a registry answers alike on a plain platform."""
    kept = site.kept.get(("classes", name, request))
    if kept is None:
        facts, classes = request.facts(), []
        for variable, known in _asked(site, name):
            value = variable.value_in(facts)
            if value not in known:
                known[value] = variable.signature(value)
            classes.append(known[value])
        # computations with a page, and rows for a kind of attention, are no conditions
        kept = site.kept["classes", name, request] = (
            tuple(classes),
            request.block_size,
            request.attention,
            request.attn_type,
            *(facts.get(facet) for facet in _divided(site, name)),
        )
    return kept


def _asked(site: Site, name: str) -> list[tuple[Variable, dict[Any, Hashable]]]:
    """The variables by which a registry tells requests apart, each with its known signatures: the values are few."""
    if ("asked", name) not in site.kept:
        of_platform = ("arch", "device", "flags", "packages")
        site.kept["asked", name] = [(v, {}) for v in site.space(name).variables if v.facet not in of_platform]
    kept: list[tuple[Variable, dict[Any, Hashable]]] = site.kept["asked", name]
    return kept


def _divided(site: Site, name: str) -> list[str]:
    """The facets whose exact values the quotients and remainders of a registry depend on."""
    if ("divided", name) not in site.kept:
        registry = site.bundled[name]
        quotients = [facet for facet in registry.vocabulary.facets.values() if facet.divides]
        cases = [case for facet in quotients for case in registry.derived[facet.name].cases]
        read = [facet for when, value, _ in cases for facet in (*when.facets, *taken_from(value))]
        site.kept["divided", name] = [*dict.fromkeys(read)]
    kept: list[str] = site.kept["divided", name]
    return kept


def _classes_of_arch(site: Site, name: str, arch: Architecture) -> Hashable:
    key = ("classes", name, arch.name)
    if key not in site.kept:
        space = site.space(name)
        site.kept[key] = space.variables[space.level["arch", None]].signature((arch.platform, arch.name))
    kept: Hashable = site.kept[key]
    return kept


def sold_as(archs: Iterable[Architecture]) -> str:
    """``H100, H200, GH200``: the products of some architectures."""
    return ", ".join(dict.fromkeys(product for arch in archs for product in arch.products))
