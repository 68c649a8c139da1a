"""Classes of values that some registries cannot tell apart: what each dimension of their space is made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attnreg.language.conditions import Clause
from attnreg.language.matchers import Matcher, Requirement, integer_range
from attnreg.language.vocabulary import Facet
from attnreg.registry import Registry

Signature = Callable[[Any], Hashable]
# what an ordinary request looks like: a counterexample differs from it in as little as possible
ORDINARY: dict[str, Any] = {
    "arch": ("cuda", "sm90"),
    "attention": "mha",
    "attn_type": "decoder",
    "dtype": "bfloat16",
    "kv_dtype": "auto",
    "head_size": 128,
    "role": "target",
    "phase": "any",
}
_REQUIRED = ("head_size", "attention", "attn_type", "dtype", "role", "phase")
_FROM_ONE = ("head_size", "head_size_v", "num_heads", "num_kv_heads", "block_size", "index_topk")
# pairs of facets of which a request refuses some values together, and what it takes
LINKED: tuple[tuple[str, str, Callable[[int, int], bool]], ...] = (
    ("head_size", "head_size_v", lambda size, size_v: size != size_v),
    ("num_heads", "num_kv_heads", lambda heads, kv_heads: heads % kv_heads == 0),
)
_MOST_VALUES = 4096


@dataclass(frozen=True, slots=True)
class Variable:
    """One dimension of the space: a facet, or one word of a set facet.

    ``classes`` lists each class's values; two values are in one class where their ``signature`` is equal. Integers are
    listed up to ``top``, past which they repeat.
    """

    facet: str
    word: str | None
    classes: tuple[tuple[Any, ...], ...]
    signature: Signature
    index: Mapping[Hashable, int]
    top: int | None = None

    @property
    def name(self) -> str:
        return self.word or self.facet

    @property
    def ordinary(self) -> int:
        """The class of an ordinary request; packages are installed."""
        usual = "" if self.facet == "packages" else ORDINARY.get(self.facet)
        return next((i for i, c in enumerate(self.classes) if usual in c), 0)

    def class_of(self, value: Any) -> int:
        """The class of any value, listed or not. Raises KeyError for one that no request has."""
        found = self.index.get(self.signature(value))
        if found is None:
            raise KeyError(f"{self.name} {value!r}")
        return found

    def usual(self, index: int) -> list[Any]:
        """The values of a class, the ordinary one first."""
        values, usual = self.classes[index], ORDINARY.get(self.facet)
        return [usual, *(v for v in values if v != usual)] if usual in values else list(values)

    def value_in(self, facts: Mapping[str, Any]) -> Any:
        """This variable's value among the facets of a request and a platform."""
        if self.facet == "arch":
            return facts["platform"], facts["arch"]
        if self.facet == "packages":
            # "" is a version that meets every requirement, as None meets them all
            return "" if facts["packages"] is None else dict(facts["packages"]).get(str(self.word))
        return facts.get(self.facet) if self.word is None else self.word in facts[self.facet]


def variables(registries: tuple[Registry, ...]) -> Iterator[Variable]:
    """Every dimension in which some of the registries tell values apart, platform and architecture first."""
    matchers: dict[str, list[Matcher]] = {}
    for registry in registries:
        for clause in every_clause(registry):
            matchers.setdefault(clause.facet, []).append(clause.matcher)
    facets = _facets(registries)
    yield _devices(registries, matchers)
    sets: list[Variable] = []
    for name, facet in facets.items():
        asked = list({id(m): m for m in matchers.get(name, ())}.values())
        if facet.kind == "words":
            # a feature that no row serves is one that every row refuses
            every = name == "features" or any(m.form == "only" for m in asked)
            words = sorted(facet.words) if every else sorted({w for m in asked for w in m.mentions})
            sets += [_split(name, word, (False, True), lambda value: value) for word in words]
        elif facet.kind == "packages":
            wanted = {r for m in asked for r in m.mentions}
            sets += [_package(p, [r for r in wanted if r.package == p]) for p in sorted({r.package for r in wanted})]
        elif facet.of == "selection":
            # which of its values is meant is a matter of the model, not of a request
            continue
        elif facet.kind == "integer":
            partner = next((b if name == a else a for a, b, _ in LINKED if name in (a, b)), "")
            if asked or (name in _REQUIRED and partner in matchers):
                yield _integers(name, asked, matchers.get(partner, []))
        elif asked and facet.kind != "derived" and name not in ("platform", "arch"):
            values = _texts(asked) if facet.kind == "text" else sorted(facet.words, key=str)
            optional = [] if name in _REQUIRED else [None]
            yield _split(name, None, [*optional, *values], _word_signature(name, facet, asked, registries))
    yield from sets


def every_clause(registry: Registry) -> Iterator[Clause]:
    """Every clause that any part of a registry evaluates, claims included."""
    for derived in registry.derived.values():
        for condition, _, _ in derived.cases:
            yield from condition.walk()
    for row in registry.backends.values():
        for variant in row.variants:
            for claim in variant.claims:
                yield Clause(claim.facet, claim.matcher, claim.where)
            yield from variant.when.walk()
            yield from variant.requires.walk()
            for rule in variant.rules:
                yield from rule.when.walk()
    for orders in registry.orders.values():
        for order in orders:
            yield from order.when.walk()
            for entry in order.entries:
                yield from entry.condition.walk()
    for choice in registry.choices:
        yield from choice.when.walk()
    for waiver in registry.waivers:
        yield from waiver.when.walk()
    for invariant in registry.invariants:
        yield from invariant.when.walk()


def _facets(registries: Iterable[Registry]) -> dict[str, Facet]:
    """The facets of all registries, with the words of each."""
    facets: dict[str, Facet] = {}
    for registry in registries:
        for name, facet in registry.vocabulary.facets.items():
            words = facet.words | facets[name].words if name in facets else facet.words
            facets[name] = Facet(name, facet.of, facet.kind, facet.legend, facet.where, words)
    return facets


def _split(
    facet: str, word: str | None, values: Iterable[Any], signature: Signature, top: int | None = None
) -> Variable:
    groups: dict[Hashable, list[Any]] = {}
    for value in values:
        groups.setdefault(signature(value), []).append(value)
    index = {found: i for i, found in enumerate(groups)}
    return Variable(facet, word, tuple(map(tuple, groups.values())), signature, index, top)


def _devices(registries: tuple[Registry, ...], matchers: Mapping[str, list[Matcher]]) -> Variable:
    """Platform and architecture are one variable: the second determines the first."""
    vocabularies = [r.vocabulary for r in registries]
    devices = {(a.platform, a.name): None for v in vocabularies for a in v.architectures.values()}
    by_platform, by_arch = matchers.get("platform", ()), matchers.get("arch", ())

    def signature(device: tuple[str, str]) -> Hashable:
        platform, arch = device
        known = tuple(arch in v.architectures for v in vocabularies)
        return platform, known, *(m.matches(platform) for m in by_platform), *(m.matches(arch) for m in by_arch)

    return _split("arch", None, devices, signature)


def _word_signature(name: str, facet: Facet, asked: list[Matcher], registries: tuple[Registry, ...]) -> Signature:
    vocabularies = [r.vocabulary.facets[name].words for r in registries if name in r.vocabulary.facets]

    def signature(value: Any) -> Hashable:
        # a value that is not given passes every claim, so it is always a class of its own
        known = tuple(facet.kind == "text" or value in words for words in vocabularies)
        return value is None, known, *(m.matches(value) for m in asked)

    return signature


def _integers(name: str, asked: list[Matcher], linked: list[Matcher]) -> Variable:
    first = 1 if name in _FROM_ONE else 0
    # twice the range, so that what repeats is seen to do so
    stop = 2 * integer_range([*asked, *linked]).stop
    if asked and linked and name in ("num_heads", "num_kv_heads"):
        # far enough to hold, for each class of the one, a multiple in each class of the other that has one
        stop = min(stop * stop, _MOST_VALUES)
    optional = [] if name in _REQUIRED else [None]
    usual = [ORDINARY[name]] if ORDINARY.get(name, 0) >= stop else []
    values = [*optional, *range(first, stop), *usual]
    return _split(name, None, values, lambda v: (v is None, *(m.matches(v) for m in asked)), stop - 1)


def _package(package: str, wanted: list[Requirement]) -> Variable:
    versions = []
    for requirement in sorted(wanted, key=str):
        for part in filter(None, requirement.versions.split(",")):
            version = part.lstrip("<>=!~ ").removesuffix(".*").strip()
            versions += [version, f"{version}.1", f"{version}.0.0.1", f"{version}.dev0"]

    def signature(version: str | None) -> Hashable:
        installed = () if version is None else ((package, version),)
        return version is None, *(r.met_by(installed) for r in wanted)

    return _split("packages", package, (None, "", *versions, "0", "99999"), signature)


def _texts(matchers: list[Matcher]) -> list[str]:
    """Texts that show every way in which patterns can match: a walk over all of them at once, the shortest first."""
    patterns = sorted({str(w) for m in matchers for w in m.mentions if w is not None})
    named = {c for p in patterns for c in p} - set("*?")
    alphabet = [next(c for c in "abcdefghijklmnopqrstuvwxyz" + "".join(map(chr, range(192, 512))) if c not in named)]
    alphabet += sorted(named)
    found: dict[tuple[bool, ...], str] = {}
    queue = deque([("", tuple(_after(p, frozenset({0}), "") for p in patterns))])
    seen: set[tuple[frozenset[int], ...]] = set()
    while queue:
        text, states = queue.popleft()
        if text:
            found.setdefault(tuple(len(p) in s for p, s in zip(patterns, states, strict=True)), text)
        for letter in alphabet:
            following = tuple(_after(p, s, letter) for p, s in zip(patterns, states, strict=True))
            if following not in seen:
                seen.add(following)
                queue.append((text + letter, following))
    return ["(another)", *found.values()]


def _after(pattern: str, places: frozenset[int], letter: str) -> frozenset[int]:
    """The places in a pattern where its match can stand after one more letter ("": after none)."""
    out = set(places) if not letter else set[int]()
    for place in places if letter else ():
        if pattern[place : place + 1] == "*":
            out.add(place)
        elif pattern[place : place + 1] in ("?", letter):
            out.add(place + 1)
    # a star may also stand for nothing
    for place in sorted(out):
        while pattern[place : place + 1] == "*":
            place += 1
            out.add(place)
    return frozenset(out)
