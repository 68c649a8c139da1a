"""Variables: the dimensions of the space. A class of a variable has values that no registry can distinguish."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attnreg.language.computed import Computed, From, operand_tests, taken_from
from attnreg.language.conditions import Clause, Condition
from attnreg.language.facets import CORE, ordinary, partner_of
from attnreg.language.matchers import Matcher, Requirement, integer_range
from attnreg.language.vocabulary import NAMED, Facet
from attnreg.registry import Registry

Signature = Callable[[Any], Hashable]
_MOST_VALUES = 4096


@dataclass(frozen=True, slots=True)
class Variable:
    """One dimension of the space: a facet, or one word of a set facet.

    ``classes`` lists the values of each class; values with equal ``signature`` are in one class. Integers are listed up
    to ``top``; past it the classes repeat.
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
        usual = "" if self.facet == "packages" else _ordinary(self.facet)
        return next((i for i, c in enumerate(self.classes) if usual in c), 0)

    def class_of(self, value: Any) -> int:
        """The class of any value, listed or not. Raises KeyError for a value that no request has."""
        index = self.index.get(self.signature(value))
        if index is None:
            raise KeyError(f"{self.name} {value!r}")
        return index

    def usual(self, index: int) -> list[Any]:
        """The values of a class, the ordinary one first."""
        values, usual = self.classes[index], _ordinary(self.facet)
        return [usual, *(v for v in values if v != usual)] if usual in values else list(values)

    def value_in(self, facts: Mapping[str, Any]) -> Any:
        """This variable's value in the facets of a request and a platform."""
        if self.facet == "arch":
            return facts["platform"], facts["arch"]
        if self.facet == "packages":
            # "" is a version that meets every requirement, as None meets them all
            return "" if facts["packages"] is None else dict(facts["packages"]).get(str(self.word))
        return facts.get(self.facet) if self.word is None else self.word in facts[self.facet]


def _ordinary(facet: str) -> Any:
    # platform and architecture are one variable
    return (ordinary("platform"), ordinary("arch")) if facet == "arch" else ordinary(facet)


def variables(registries: tuple[Registry, ...], more: Iterable[Condition] = ()) -> Iterator[Variable]:
    """Every dimension in which one of the registries distinguishes values, platform and architecture first.

    more: further conditions that distinguish values.
    """
    matchers: dict[str, list[Matcher]] = {}
    clauses = (clause for registry in registries for clause in every_clause(registry))
    for clause in (*clauses, *(clause for condition in more for clause in condition.walk())):
        matchers.setdefault(clause.facet, []).append(clause.matcher)
    exact = _linked(registries, matchers)
    distinct = {name: list({id(m): m for m in each}.values()) for name, each in matchers.items()}
    facets = _beside(_facets(registries), registries)
    yield _devices(registries, distinct)
    for facet in facets:
        yield from _of_one_value(facet, distinct, registries, facet.name in exact)
    for facet in facets:
        yield from _of_a_set(facet, distinct.get(facet.name, []))


def _beside(facets: dict[str, Facet], registries: tuple[Registry, ...]) -> list[Facet]:
    """The facets in an order that keeps diagrams small: a facet stands before the one that it is related to.

    A facet that a step writes is related to what the step reads: the facets of a model's config, and those with the
    same words, such as ``run_kv_dtype`` to ``kv_dtype``. So is ``model`` to ``head_size``.
    """
    beside = {"model": "head_size"} if "model" in facets else {}
    for step in (step for registry in registries for step in registry.steps):
        read = dict.fromkeys((*step.when.facets, *(f for e in step.effects for f in e.when.facets)))
        copied = (f for e in step.effects for v in e.sets.values() for f in taken_from(v))
        written = next((f for e in step.effects for f in e.sets if f in CORE), None)
        words = facets[written].words if written in facets else ()
        given = (f for f in (*read, *copied) if f in facets and f not in CORE)
        stated = [f for f in given if facets[f].config or (words and facets[f].words == words)]
        beside |= {f: written for f in stated if written is not None and f not in beside}
    return [
        facet
        for name, first in facets.items()
        if name not in beside
        for facet in (*(facets[f] for f, written in beside.items() if written == name), first)
    ]


def _linked(registries: tuple[Registry, ...], matchers: dict[str, list[Matcher]]) -> set[str]:
    """Add to each facet the matchers of facets that are computed from it. Returns the facets that name a backend."""
    # keeps the order of the data, which decides the order of the classes
    copies = dict.fromkeys(
        (value, source, name)
        for registry in registries
        for name, value in (
            *((facet, v) for step in registry.steps for effect in step.effects for facet, v in effect.sets.items()),
            *((d.name, v) for d in registry.derived.values() for _, v, _ in d.cases),
        )
        if isinstance(value, From | Computed)
        for source in value.facets
    )
    exact = {NAMED}
    # a copy may be copied again
    for _ in copies:
        for value, source, target in copies:
            own = matchers.setdefault(source, [])
            tests = (t for m in matchers.get(target, []) for t in operand_tests(value, m))
            own += [t for t in dict.fromkeys(tests) if not any(t is o for o in own)]
            exact |= {source} if target in exact else set()
    return exact


def _of_one_value(
    facet: Facet, matchers: Mapping[str, list[Matcher]], registries: tuple[Registry, ...], exact: bool
) -> Iterator[Variable]:
    """The dimension of a single-valued facet, if it has one; ``exact``: each value is a class of its own."""
    # no dimensions: derived facets are computed, steps set those of the start, and `Model` sets those of the selection
    if facet.of in ("derived", "selection", "start") or facet.name in ("platform", "arch"):
        return
    tests, required = matchers.get(facet.name, []), facet.name in CORE and CORE[facet.name].required
    if facet.kind == "integer":
        linked = matchers.get(partner_of(facet.name) or "", [])
        if tests or (required and linked):
            yield _integers(facet.name, tests, linked)
    elif (tests or exact) and facet.kind not in ("words", "packages"):
        values = _texts(tests) if facet.kind == "text" else sorted(facet.words, key=str)
        signature = _word_signature(facet, tests, registries)
        alone: Signature = lambda value: (value, signature(value))  # noqa: E731
        yield _split(facet.name, None, values if required else [None, *values], alone if exact else signature)


def _of_a_set(facet: Facet, asked: list[Matcher]) -> Iterator[Variable]:
    """The dimensions of a set facet: one for each word or package that a registry mentions."""
    if facet.kind == "words":
        # every feature matters, because rows without it refuse it
        every = facet.name == "features" or any(m.form == "only" for m in asked)
        words = sorted(facet.words) if every else sorted({w for m in asked for w in m.mentions})
        yield from (_split(facet.name, word, (False, True), lambda value: value) for word in words)
    elif facet.kind == "packages":
        wanted = {r for m in asked for r in m.mentions}
        for package in sorted({r.package for r in wanted}):
            yield _package(package, [r for r in wanted if r.package == package])


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
    for step in registry.steps:
        yield from step.when.walk()
        for effect in step.effects:
            yield from effect.when.walk()
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
            words = (*facet.words, *facets[name].words) if name in facets else facet.words
            words = tuple(dict.fromkeys(words))
            # a facet of a run with a draft is taken as not given, as those are that steps alone set
            of = "start" if facet.of_run else facet.of
            facets[name] = Facet(name, of, facet.kind, facet.legend, facet.where, words, config=facet.config)
    return facets


def _split(
    facet: str,
    word: str | None,
    values: Collection[Any],
    signature: Signature,
    top: int | None = None,
    signatures: Iterable[Hashable] | None = None,
) -> Variable:
    """The variable of some values. signatures: the signatures of the values, if they are known."""
    groups: dict[Hashable, list[Any]] = {}
    for value, key in zip(values, map(signature, values) if signatures is None else signatures, strict=True):
        groups.setdefault(key, []).append(value)
    index = {key: i for i, key in enumerate(groups)}
    return Variable(facet, word, tuple(map(tuple, groups.values())), signature, index, top)


def _devices(registries: tuple[Registry, ...], matchers: Mapping[str, list[Matcher]]) -> Variable:
    """The variable of platform and architecture together, because the architecture determines the platform."""
    vocabularies = [r.vocabulary for r in registries]
    devices = {(a.platform, a.name): None for v in vocabularies for a in v.architectures.values()}
    by_platform, by_arch, by_device = (matchers.get(name, ()) for name in ("platform", "arch", "device"))
    named = [(v.arch_of(d), d) for v in vocabularies if v.facet("device") for d in v.words_of("device")]
    # conditions on devices distinguish architectures: with and without a device that they name
    kinds = {a: frozenset(tuple(m.matches(d) for m in by_device) for arch, d in named if arch == a) for a, _ in named}

    def signature(device: tuple[str, str]) -> Hashable:
        platform, arch = device
        known = tuple(arch in v.architectures for v in vocabularies)
        its_devices = kinds.get(arch, frozenset()) if by_device else None
        return (
            platform,
            known,
            its_devices,
            *(m.matches(platform) for m in by_platform),
            *(m.matches(arch) for m in by_arch),
        )

    return _split("arch", None, devices, signature)


def _word_signature(facet: Facet, asked: list[Matcher], registries: tuple[Registry, ...]) -> Signature:
    vocabularies = [f.known for r in registries if (f := r.vocabulary.facets.get(facet.name))]

    def signature(value: Any) -> Hashable:
        # None passes every claim, so it is always a class of its own
        known = tuple(facet.kind == "text" or value in words for words in vocabularies)
        return value is None, known, *(m.matches(value) for m in asked)

    return signature


def _integers(name: str, asked: list[Matcher], linked: list[Matcher]) -> Variable:
    core, usual = CORE.get(name), ordinary(name)
    # twice the range, so that it has each repeating period twice
    stop = 2 * integer_range([*asked, *linked]).stop
    if asked and linked and name in ("num_heads", "num_kv_heads"):
        # large enough for a multiple of each class of KV heads in each class of query heads, if there is one
        stop = min(stop * stop, _MOST_VALUES)
    optional = [] if core and core.required else [None]
    beyond = [usual] if usual is not None and usual >= stop else []
    values = [*optional, *range(core.least if core else 0, stop), *beyond]
    # thousands of values: each predicate is called directly, so that no matcher caches them
    signatures = zip((v is None for v in values), *(map(m.predicate, values) for m in asked), strict=True)
    return _split(name, None, values, lambda v: (v is None, *(m.matches(v) for m in asked)), stop - 1, signatures)


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
    """A text that no matcher names, then the texts that matchers name."""
    named = sorted(word for word in {w for m in matchers for w in m.mentions} if word is not None)
    another = "(another)"
    while another in named:
        another += "'"
    return [another, *named]
