"""Point: a request on a platform as a dict from facet to value, with every word checked against the registry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnreg.errors import RequestError, did_you_mean
from attnreg.language.computed import taken_from
from attnreg.language.facets import ordinary
from attnreg.language.frozen import FrozenDict
from attnreg.language.vocabulary import ASKED, AUTOMATIC, BY_NAME, NAMED
from attnreg.platforms import refuse_other

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest


class Point(dict[str, Any]):
    """Facet -> value; None if it is not given. A derived facet is computed when a condition first reads it."""

    __slots__ = ("registry",)

    def __init__(self, facts: Mapping[str, Any], registry: Registry) -> None:
        super().__init__(facts)
        self.registry = registry

    def __missing__(self, facet: str) -> Any:
        derived = self.registry.derived.get(facet)
        value = self[facet] = derived.value(self) if derived is not None else None
        return value

    def by_name(self, name: str) -> Point:
        """The point for a backend that a user named; this point if the registry has neither facet, ASKED nor NAMED."""
        facets = self.registry.vocabulary.facets
        named = {ASKED: BY_NAME, NAMED: name.partition("/")[0]}
        return (
            self.changed({f: v for f, v in named.items() if f in facets}) if ASKED in self or NAMED in facets else self
        )

    def automatic(self) -> Point:
        """The point for a backend that an order tries."""
        return self.changed({f: v for f, v in ((ASKED, AUTOMATIC), (NAMED, None)) if f in self})

    def facts(self) -> FrozenDict[str, Any]:
        """The values of the facets that are not derived."""
        derived = self.registry.derived
        return FrozenDict({f: v for f, v in self.items() if f not in derived})

    def changed(self, facts: Mapping[str, Any]) -> Point:
        """A copy with some values replaced; derived facets are computed again."""
        return Point({**self.facts(), **facts}, self.registry)


def placed(platform: Platform, registry: Registry) -> Platform:
    """The platform in the registry's own words: the name of a product becomes an architecture and a device.

    Raises `RequestError` for a word that names no architecture, and for an architecture of another platform.
    """
    vocabulary = registry.vocabulary
    own = vocabulary.architectures.get(platform.arch)
    if own is not None and own.platform == platform.platform:
        return platform
    found = vocabulary.architecture(platform.arch)
    if found is None:
        if platform.arch in vocabulary.words["platforms"]:
            archs = [arch.name for arch in vocabulary.architectures_of(platform.arch)]
            message = f"{platform.arch} is a platform, and none of its architectures is named"
            raise RequestError(message, f"name one of {', '.join(archs)}")
        raise _unknown(platform.arch, "arch", registry)
    if platform.platform:
        if platform.platform not in vocabulary.words["platforms"]:
            raise _unknown(platform.platform, "platform", registry)
        refuse_other(found.name, found.platform, platform.platform)
    product = platform.product or vocabulary.product(platform.arch)
    device = platform.device or (vocabulary.device_of(product) if product else None)
    return replace(platform, platform=found.platform, arch=found.name, device=device, product=product)


def point_of(request: AttentionRequest, platform: Platform, registry: Registry) -> Point:
    """The point of a request as an order sees it. Raises `RequestError` for an unknown word or facet."""
    facets = registry.vocabulary.facets
    facts = request.facts()
    platform_facts = platform.facts()
    for name, value in request.extra:
        facts[name] = _extra(name, value, platform_facts, registry)
    facts.update(platform_facts)
    if "device" not in facets:
        del facts["device"]
    for name in [name for name in facts if name not in facets]:
        if facts.pop(name) != ordinary(name):
            raise RequestError(f"{name} is given, and {registry.title} has no such facet", f"leave {name} out")
    for name, value in facts.items():
        facet = facets[name]
        if facet.kind == "word" or facet.kind == "arch":
            if value is not None and value not in facet.known:
                raise _unknown(value, name, registry)
        elif facet.kind == "words" and not value <= facet.known:
            raise _unknown(min(value - facet.known), name, registry)
    architecture = registry.vocabulary.architectures[platform.arch]
    refuse_other(platform.arch, architecture.platform, platform.platform)
    if platform.device is not None and "device" in facets:
        arch = registry.vocabulary.arch_of(platform.device)
        if arch != platform.arch:
            raise RequestError(f"device is {platform.device}, which is {arch}, not {platform.arch}")
    if ASKED in facets:
        facts[ASKED] = AUTOMATIC
    return Point(facts, registry)


def _extra(name: str, value: Any, platform: Mapping[str, Any], registry: Registry) -> Any:
    """The value of an extra facet, validated against the registry's vocabulary."""
    facet = registry.vocabulary.facets.get(name)
    if facet is None:
        known = [f for f, about in registry.vocabulary.facets.items() if about.of == "request"]
        raise RequestError(f"{name} is no facet of {registry.title}", did_you_mean(name, known))
    if name in platform or facet.of in ("derived", "selection", "start"):
        why = {"derived": "is derived from others", "start": "is set by steps alone"}.get(facet.of)
        why = why or f"belongs to the {facet.of}"
        sources = ", ".join(_sources(name, registry)) if facet.of == "derived" else ""
        help_ = f"give what it follows from: {sources}" if sources else ""
        raise RequestError(f"extra names {name!r}, which {why} and cannot be given", help_)
    if value is None:
        return None
    if facet.kind == "integer":
        # True is an int to Python
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise RequestError(f"{name} is {value!r}; expected an integer of at least 0")
        return int(value)
    if facet.kind == "text":
        if not isinstance(value, str):
            raise RequestError(f"{name} is {value!r}; expected text")
        return value
    if value not in facet.known:
        raise _unknown(value, name, registry)
    # 1 and True are equal, also as keys of the cache of selections
    return bool(value) if facet.kind == "boolean" else value


def _sources(name: str, registry: Registry) -> list[str]:
    """The facets that can be given and that decide a derived facet, itself or through others."""
    found, queue = dict[str, None](), [name]
    for facet in queue:
        for when, value, _ in registry.derived[facet].cases if facet in registry.derived else ():
            queue += [f for f in (*when.facets, *taken_from(value)) if f not in queue]
        if registry.vocabulary.facets[facet].of in ("request", "platform"):
            found[facet] = None
    return sorted(found)


def refuse_unknown_kv_dtype(options: Iterable[Mapping[str, Any]], registry: Registry) -> None:
    """Raise `RequestError` for a KV dtype of a run or of its draft that the registry does not have."""
    facet = registry.vocabulary.facets.get("kv_dtype")
    for word in (given.get("kv_dtype") for given in options):
        if facet is not None and word is not None and word not in facet.known:
            raise _unknown(word, "kv_dtype", registry)


def _unknown(word: Any, facet: str, registry: Registry) -> RequestError:
    message = f"{facet} names {word!r}, which {registry.title} does not know"
    return RequestError(message, registry.vocabulary.help_for(facet, str(word)))
