"""What a registry answers to a request on each of its architectures, in the words of a table's cell."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attnreg.analysis.value_classes import every_clause
from attnreg.language.computed import taken_from
from attnreg.language.matchers import Matcher
from attnreg.language.vocabulary import Architecture
from attnreg.platforms import Platform
from attnreg.registry import Registry
from attnreg.request import AttentionRequest
from attnreg.selection.selector import evaluate
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
    """The backend that is chosen, "" where there is none, with its variant; what is said of it, or of a refusal."""

    name: str
    title: str
    but: str = ""


def answer(request: AttentionRequest, platform: Platform, registry: Registry) -> Answer:
    """What a registry answers without flags, with every package taken as installed."""
    selection = evaluate(request, platform, registry)
    chosen = selection.chosen
    if chosen is None:
        refusal = selection.start.refusal if selection.start else None
        if refusal:
            return Answer("", "refused", refusal.text)
        # a release whose processors nobody has read has no order for them
        return Answer("", "none" if selection.order or not registry.orders else "not stated")
    but = [f"slowly: {', '.join(chosen.emulates)}"] if chosen.emulates else []
    return Answer(chosen.name, chosen.title, "; ".join([*but, *(["then fails"] if selection.fails else [])]))


def table(
    site: Site, name: str, requests: Sequence[AttentionRequest | None]
) -> list[tuple[list[Architecture], list[Answer | None]]]:
    """For groups of architectures that agree, the answers to some requests; None for what is no attention."""
    registry = site.bundled[name]
    rows: list[tuple[list[Architecture], list[Answer | None]]] = []
    for arch in registry.vocabulary.architectures.values():
        answers = [_on(site, name, request, arch) if request else None for request in requests]
        if rows and rows[-1][1] == answers and rows[-1][0][0].platform == arch.platform:
            rows[-1][0].append(arch)
        else:
            rows.append(([arch], answers))
    return rows


def _on(site: Site, name: str, request: AttentionRequest, arch: Architecture) -> Answer:
    """An answer, kept: families ask for much the same, and few rows look at the model's type."""
    if request.model is not None and not _matters(site, name, request.model):
        request = dataclasses.replace(request, model=None)
    key = (name, request, arch.name)
    kept = site.kept.get(key)
    if kept is None:
        platform = Platform(platform=arch.platform, arch=arch.name)
        kept = site.kept[key] = answer(request, platform, site.bundled[name])
    assert isinstance(kept, Answer)
    return kept


def _matters(site: Site, name: str, model: str) -> bool:
    """Whether some condition of a registry tells a model's type from none."""
    matchers = site.kept.get(("model", name))
    if matchers is None:
        matchers = site.kept["model", name] = _about_models(site.bundled[name])
    return any(matcher.matches(model) != matcher.matches(None) for matcher in matchers)


def _about_models(registry: Registry) -> list[Matcher]:
    """Whatever a registry tests a model's type with; one that tells every two apart, where a facet may copy it."""
    written = [value for step in registry.steps for effect in step.effects for value in effect.sets.values()]
    written += [value for derived in registry.derived.values() for _, value, _ in derived.cases]
    if any("model" in taken_from(value) for value in written):
        return [Matcher("given", lambda value: value is not None)]
    follows = [known.when for row in registry.backends.values() for v in row.variants for known in v.consequences]
    clauses = [*every_clause(registry), *(clause for when in follows for clause in when.walk())]
    return [clause.matcher for clause in clauses if clause.facet == "model"]


def sold_as(archs: Iterable[Architecture]) -> str:
    """``H100, H200, GH200``: the products of some architectures."""
    return ", ".join(dict.fromkeys(product for arch in archs for product in arch.products))
