"""What the lists of the picker's form offer for a registry, and the option by which the command takes each facet."""

from __future__ import annotations

from typing import Any

from attnreg.analysis.value_classes import every_clause
from attnreg.cli.answers import explain
from attnreg.language.vocabulary import Facet
from attnreg.registry import Registry

# facets that have a control of their own, and the type of a model, which its config states
_ELSEWHERE = ("kv_dtype", "features", "model")


def lists(registry: Registry) -> dict[str, Any]:
    """The lists of a registry as JSON-ready values."""
    vocabulary = registry.vocabulary
    asked = [f for f in vocabulary.facets.values() if f.of == "request"]
    option_of = {str(p.name): p.opts[0] for p in explain.params}
    rows = registry.backends.values()
    return {
        "name": registry.name,
        "fingerprint": registry.fingerprint,
        "title": registry.title,
        "architectures": [
            {"name": a.name, "platform": a.platform, "products": list(a.products)}
            for a in vocabulary.architectures.values()
        ],
        # those that some condition tells apart
        "devices": list(vocabulary.words_of("device")) if _tells_devices(registry) else [],
        "kv_dtypes": list(vocabulary.words["kv_dtypes"]),
        "backends": [[row.name, *(f"{row.name}/{v}" for v in row.variant_names)] for row in rows],
        "facets": [_facet(facet) for facet in asked if facet.name not in _ELSEWHERE],
        "features": _legends(registry, "features"),
        "flags": _legends(registry, "flags"),
        "packages": [[name, word.legend] for name, word in vocabulary.packages.items()],
        "steps": bool(registry.steps),
        # facet -> its option; any other is given by --set
        "options": {f.name: option_of[f.name] for f in asked if f.name in option_of},
    }


def _facet(facet: Facet) -> dict[str, Any]:
    return {"name": facet.name, "kind": facet.kind, "legend": facet.legend, "words": [str(w) for w in facet.words]}


def _legends(registry: Registry, facet: str) -> list[list[str]]:
    return [[name, word.legend] for name, word in registry.vocabulary.words_of(facet).items()]


def _tells_devices(registry: Registry) -> bool:
    """Whether a condition of the registry asks for the device: an answer then depends on it."""
    following = (c.when for row in registry.backends.values() for v in row.variants for c in v.consequences)
    more = (clause for when in (*following, *(f.when for f in registry.fallbacks)) for clause in when.walk())
    return any(clause.facet == "device" for clause in (*every_clause(registry), *more))
