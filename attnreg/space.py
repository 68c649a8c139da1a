"""The space of configurations of one or more registries, and selection as an exact function over it.

Each facet is collapsed to the classes of values that the data cannot tell apart; the product of the classes is the
space. Every condition, row and order becomes a decision diagram over it, so that a statement about all configurations
is decided, not sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attnreg.conditions import Clause, Condition
from attnreg.diagram import Diagrams, Node
from attnreg.matchers import Matcher, Requirement, integer_range
from attnreg.platforms import Platform
from attnreg.registry import Backend, Choice, Entry, Order, Registry, Variant
from attnreg.request import AttentionRequest
from attnreg.vocabulary import Facet

_DIMENSIONS_FROM_ZERO = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
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


@dataclass(frozen=True, slots=True)
class Variable:
    """One dimension of the space: a facet, or one word of a set facet. ``classes`` lists each class's values."""

    facet: str
    word: str | None
    classes: tuple[tuple[Any, ...], ...]

    @property
    def name(self) -> str:
        return self.word or self.facet


class Space:
    """The product of the classes that some registries distinguish, with a store of decision diagrams over it."""

    def __init__(self, registries: Iterable[Registry]) -> None:
        self.registries = tuple(registries)
        self.variables = tuple(self._variables())
        self.diagrams = Diagrams([len(v.classes) for v in self.variables])
        self.level = {(v.facet, v.word): i for i, v in enumerate(self.variables)}
        self.ordinary = tuple(_ordinary_class(v) for v in self.variables)

    @property
    def size(self) -> int:
        """How many configurations can be told apart."""
        return self.diagrams.count(self.diagrams.true)

    # classes ---------------------------------------------------------------------------------------------------------

    def _variables(self) -> Iterator[Variable]:
        matchers: dict[str, dict[int, Matcher]] = {}
        for registry in self.registries:
            for clause in every_clause(registry):
                matchers.setdefault(clause.facet, {})[id(clause.matcher)] = clause.matcher
        sets: list[Variable] = []
        yield self._devices(matchers)
        for name, facet in self._facets():
            asked = list(matchers.get(name, {}).values())
            if facet.kind == "words":
                words = sorted({w for m in asked for w in _relevant(m, facet)})
                sets += [Variable(name, word, ((False,), (True,))) for word in words]
            elif facet.kind == "packages":
                packages = sorted({r.package for m in asked for r in m.mentions})
                sets += [Variable(name, package, _package_classes(package, asked)) for package in packages]
            elif asked and facet.kind not in ("derived", "arch") and name != "platform":
                yield Variable(name, None, _split(_values(name, facet, asked), asked))
        yield from sets

    def _devices(self, matchers: Mapping[str, dict[int, Matcher]]) -> Variable:
        """Platform and architecture are one variable: the second determines the first."""
        archs: dict[str, str] = {}
        for registry in self.registries:
            archs |= {a.name: a.platform for a in registry.vocabulary.architectures.values()}
        by_platform, by_arch = (list(matchers.get(f, {}).values()) for f in ("platform", "arch"))
        groups: dict[Any, list[Any]] = {}
        for arch, platform in archs.items():
            signature = (
                platform,
                tuple(m.matches(platform) for m in by_platform),
                tuple(m.matches(arch) for m in by_arch),
            )
            groups.setdefault(signature, []).append((platform, arch))
        return Variable("arch", None, tuple(map(tuple, groups.values())))

    def _facets(self) -> list[tuple[str, Facet]]:
        facets: dict[str, Facet] = {}
        for registry in self.registries:
            for name, facet in registry.vocabulary.facets.items():
                old = facets.get(name)
                words = facet.words | old.words if old else facet.words
                facets[name] = Facet(name, facet.of, facet.kind, facet.legend, facet.where, words)
        return list(facets.items())

    # points ----------------------------------------------------------------------------------------------------------

    def point(self, request: AttentionRequest, platform: Platform) -> list[int]:
        """The classes in which a configuration falls."""
        facts = {**request.facts(), **platform.facts()}
        out = []
        for variable in self.variables:
            value = _value_of(variable, facts)
            out.append(next(i for i, c in enumerate(variable.classes) if _in_class(value, c, variable, self)))
        return out

    def example(self, point: Iterable[int]) -> tuple[AttentionRequest, Platform]:
        """A configuration that falls in these classes; the ordinary value of a class where it has one."""
        fields: dict[str, Any] = {"head_size": 128}
        extra: dict[str, Any] = {}
        sets: dict[str, set[str]] = {"features": set(), "flags": set()}
        packages: dict[str, str] = {}
        platform, arch = ORDINARY["arch"]
        for variable, index in zip(self.variables, point, strict=True):
            values = variable.classes[index]
            value = ORDINARY[variable.facet] if ORDINARY.get(variable.facet, values) in values else values[0]
            if variable.facet == "arch":
                platform, arch = value
            elif variable.facet == "packages":
                if value is not None:
                    packages[str(variable.word)] = value
            elif variable.word is not None:
                if value:
                    sets[variable.facet].add(variable.word)
            elif variable.facet in AttentionRequest.__dataclass_fields__:
                fields[variable.facet] = value
            else:
                extra[variable.facet] = value
        named = any(v.facet == "packages" for v in self.variables)
        heads, kv_heads = fields.get("num_heads"), fields.get("num_kv_heads")
        if heads and kv_heads and heads % kv_heads:
            fields["num_kv_heads"] = None
        request = AttentionRequest(**fields, features=frozenset(sets["features"]), extra=tuple(extra.items()))
        installed = packages if named else None
        return request, Platform(platform=platform, arch=arch, flags=frozenset(sets["flags"]), packages=installed)  # type: ignore[arg-type]

    def cheapest(self, region: Node) -> list[int] | None:
        """The point of a region that differs from the ordinary in the fewest facets; None where the region is empty."""
        return self.diagrams.cheapest(region, lambda level, c: int(c != self.ordinary[level]), self.ordinary)


class Model:
    """One registry's selection as functions over a space."""

    def __init__(self, space: Space, registry: Registry) -> None:
        self.space = space
        self.registry = registry
        self.d = space.diagrams
        self._conditions: dict[int, Node] = {}
        self._derived: dict[str, Node] = {}
        self._variants: dict[tuple[str, int], tuple[Node, Node]] = {}
        self._rows: dict[str, tuple[Node, Node]] = {}

    # conditions ------------------------------------------------------------------------------------------------------

    def condition(self, condition: Condition) -> Node:
        """Where a condition holds."""
        found = self._conditions.get(id(condition))
        if found is None:
            parts = [self.clause(clause) for clause in condition.clauses]
            parts += [self.d.unite(self.condition(c) for c in group) for group in condition.any_of]
            parts += [self.d.negate(self.condition(c)) for c in condition.none_of]
            found = self._conditions[id(condition)] = self.d.conjoin(parts)
        return found

    def clause(self, clause: Clause) -> Node:
        return self.matches(clause.facet, clause.matcher)

    def matches(self, facet: str, matcher: Matcher) -> Node:
        """Where a facet has a value that a matcher accepts."""
        d, space = self.d, self.space
        if facet in self.registry.derived:
            return d.apply(lambda value: bool(matcher.matches(value)), self.derived(facet))
        kind = self.registry.vocabulary.facets[facet].kind
        if kind == "words":
            return self._set_matches(facet, matcher)
        if kind == "packages":
            return d.conjoin(self._package(requirement) for requirement in matcher.mentions)
        name = "arch" if facet == "platform" else facet
        level = space.level.get((name, None))
        if level is None:
            # nothing distinguishes the facet's values: one of them answers for all
            return d.true if matcher.matches(None) else d.false
        part = {"platform": 0, "arch": 1}.get(facet)
        first = [c[0] if part is None else c[0][part] for c in space.variables[level].classes]
        return d.among(level, [i for i, value in enumerate(first) if matcher.matches(value)])

    def _set_matches(self, facet: str, matcher: Matcher) -> Node:
        d = self.d
        on = {v.word: d.among(i, [1]) for i, v in enumerate(self.space.variables) if v.facet == facet}
        if matcher.form == "all":
            return d.conjoin(on[w] for w in matcher.mentions)
        if matcher.form == "none":
            return d.conjoin(d.negate(on[w]) for w in matcher.mentions)
        return d.conjoin(d.negate(node) for word, node in on.items() if word not in matcher.mentions)

    def _package(self, requirement: Requirement) -> Node:
        level = self.space.level["packages", requirement.package]
        classes = self.space.variables[level].classes
        met = [i for i, c in enumerate(classes) if requirement.met_by(_one_package(requirement.package, c[0]))]
        return self.d.among(level, met)

    def derived(self, name: str) -> Node:
        """A derived facet's value everywhere."""
        found = self._derived.get(name)
        if found is None:
            found = self.d.terminal(None)
            for condition, value, _ in reversed(self.registry.derived[name].cases):
                found = self.d.ite(self.condition(condition), self.d.terminal(value), found)
            self._derived[name] = found
        return found

    # rows ------------------------------------------------------------------------------------------------------------

    def without_rules(self, variant: Variant) -> Node:
        """Where a variant's own claims and requirements accept, its rules left aside."""
        d = self.d
        parts = [self.condition(variant.when), self.condition(variant.requires)]
        for claim in variant.claims:
            absent = self._absent(claim.facet)
            parts.append(d.unite([absent, self.matches(claim.facet, claim.matcher)]))
        for level, variable in enumerate(self.space.variables):
            if variable.facet == "features" and variable.word not in variant.served:
                parts.append(d.among(level, [0]))
        return d.conjoin(parts)

    def _absent(self, facet: str) -> Node:
        if facet in self.registry.derived:
            return self.d.apply(lambda value: value is None, self.derived(facet))
        level = self.space.level.get((facet, None))
        if level is None or facet == "arch":
            return self.d.false
        classes = self.space.variables[level].classes
        return self.d.among(level, [i for i, c in enumerate(classes) if c[0] is None])

    def variant(self, row: Backend, index: int) -> tuple[Node, Node]:
        """Where a variant accepts, and where it does so natively."""
        key = (row.name, index)
        if key not in self._variants:
            variant, d = row.variants[index], self.d
            refused = d.unite(self.condition(rule.when) for rule in variant.rules)
            accepts = d.ite(refused, d.false, self.without_rules(variant))
            slow = [self.space.level[("features", f)] for f in variant.emulated if ("features", f) in self.space.level]
            native = d.conjoin([accepts, *(d.among(level, [0]) for level in slow)])
            self._variants[key] = accepts, native
        return self._variants[key]

    def row(self, name: str) -> tuple[Node, Node]:
        """Where a backend accepts, and where it does so natively."""
        if name not in self._rows:
            row = self.registry.backends[name]
            both = [self.variant(row, i) for i in range(len(row.variants))]
            self._rows[name] = self.d.unite(a for a, _ in both), self.d.unite(n for _, n in both)
        return self._rows[name]

    # selection -------------------------------------------------------------------------------------------------------

    def chosen(self) -> Node:
        """The name of the selected backend everywhere; None where there is none."""
        d = self.d
        out = self._walk(None)
        for choice in self.registry.choices:
            if choice.strength == "require":
                out = d.ite(self.condition(choice.when), self._pick([self._entry(choice.backends[0])]), out)
            elif choice.strength == "prefer":
                out = d.ite(self.condition(choice.when), self._walk(choice), out)
        return out

    def native(self) -> Node:
        """Where some candidate of the order serves the request natively."""
        regions = self.regions()
        return self.d.unite(
            self.d.conjoin([region, native])
            for order, region in regions
            for _, native in map(self._order_entry, _allowed(order.entries, self.registry))
        )

    def regions(self) -> list[tuple[Order, Node]]:
        """Each order with the part of the space that it decides."""
        d = self.d
        out = []
        for platform, orders in self.registry.orders.items():
            left = self._platform(platform)
            for order in orders:
                when = self.condition(order.when)
                out.append((order, d.conjoin([left, when])))
                left = d.ite(when, d.false, left)
        return out

    def _platform(self, name: str) -> Node:
        classes = self.space.variables[0].classes
        return self.d.among(0, [i for i, c in enumerate(classes) if c[0][0] == name])

    def _walk(self, preferred: Choice | None) -> Node:
        out = self.d.terminal(None)
        first = [] if preferred is None else [self._entry(preferred.backends[0])]
        if first:
            out = self._pick(first)
        for order, region in self.regions():
            name = preferred.backends[0] if preferred else None
            rest = [self._order_named(e) for e in _allowed(order.entries, self.registry) if e.backend != name]
            out = self.d.ite(region, self._pick([*first, *rest]), out)
        return out

    def _pick(self, entries: list[tuple[str, Node, Node]]) -> Node:
        """The first entry that serves natively, else the first that accepts."""
        out = self.d.terminal(None)
        for name, accepts, _ in reversed(entries):
            out = self.d.ite(accepts, self.d.terminal(name), out)
        for name, _, native in reversed(entries):
            out = self.d.ite(native, self.d.terminal(name), out)
        return out

    def _order_named(self, entry: Entry) -> tuple[str, Node, Node]:
        return entry.backend, *self._order_entry(entry)

    def _order_entry(self, entry: Entry) -> tuple[Node, Node]:
        _, accepts, native = self._entry(entry.backend)
        condition = self.condition(entry.condition)
        return self.d.conjoin([accepts, condition]), self.d.conjoin([native, condition])

    def _entry(self, name: str) -> tuple[str, Node, Node]:
        accepts, native = self.row(name)
        denials = [c.when for c in self.registry.choices if c.strength == "deny" and name in c.backends]
        if denials:
            denied = self.d.unite(map(self.condition, denials))
            accepts, native = (self.d.ite(denied, self.d.false, node) for node in (accepts, native))
        return name, accepts, native


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
            for feature, where in variant.features.items():
                yield _feature_clause(feature, where)
            for feature, (_, where) in variant.emulated.items():
                yield _feature_clause(feature, where)
    for orders in registry.orders.values():
        for order in orders:
            yield from order.when.walk()
            for entry in order.entries:
                yield from entry.condition.walk()
    for choice in registry.choices:
        yield from choice.when.walk()
    for invariant in registry.invariants:
        yield from invariant.when.walk()


def _feature_clause(feature: str, where: Any) -> Clause:
    return Clause(
        "features", Matcher(feature, lambda v: feature in v, mentions=frozenset({feature}), form="all"), where
    )


def _allowed(entries: Iterable[Entry], registry: Registry) -> list[Entry]:
    return [e for e in entries if registry.backends[e.backend].status != "experimental"]


def _relevant(matcher: Matcher, facet: Facet) -> frozenset[Any]:
    return facet.words if matcher.form == "only" else matcher.mentions


def _values(name: str, facet: Facet, matchers: list[Matcher]) -> list[Any]:
    """Values of a facet that show every way in which its matchers can answer."""
    optional = [] if name in ("head_size", "attention", "attn_type", "dtype", "role", "phase") else [None]
    if facet.kind == "integer":
        first = 0 if name in _DIMENSIONS_FROM_ZERO else 1
        return [*optional, *(v for v in integer_range(matchers) if v >= first)]
    if facet.kind == "text":
        words = sorted({str(w) for m in matchers for w in m.mentions if w is not None and not set("*?") & set(str(w))})
        return [*optional, *words, "(another)"]
    return [*optional, *sorted(facet.words, key=str)]


def _split(values: list[Any], matchers: list[Matcher]) -> tuple[tuple[Any, ...], ...]:
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for value in values:
        # a value that is not given passes every claim, so it is always a class of its own
        signature = (value is None, *(m.matches(value) for m in matchers))
        groups.setdefault(signature, []).append(value)
    return tuple(map(tuple, groups.values()))


def _package_classes(package: str, matchers: list[Matcher]) -> tuple[tuple[Any, ...], ...]:
    wanted = sorted({r for m in matchers for r in m.mentions if r.package == package}, key=str)
    versions = ["0", "99999"]
    for requirement in wanted:
        for part in filter(None, requirement.versions.split(",")):
            version = part.lstrip("<>=!~ ").removesuffix(".*").strip()
            versions += [version, f"{version}.1", f"{version}.dev0"]
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for version in (None, *versions):
        signature = (version is None, *(r.met_by(_one_package(package, version)) for r in wanted))
        groups.setdefault(signature, []).append(version)
    return tuple(map(tuple, groups.values()))


def _one_package(package: str, version: str | None) -> tuple[tuple[str, str], ...]:
    return () if version is None else ((package, version),)


def _ordinary_class(variable: Variable) -> int:
    if variable.facet == "packages":
        return next(i for i, c in enumerate(variable.classes) if c[0] is not None)
    wanted = ORDINARY.get(variable.facet)
    return next((i for i, c in enumerate(variable.classes) if wanted in c), 0)


def _value_of(variable: Variable, facts: Mapping[str, Any]) -> Any:
    if variable.facet == "arch":
        return facts["platform"], facts["arch"]
    if variable.facet == "packages":
        packages = facts["packages"]
        return "99999" if packages is None else dict(packages).get(str(variable.word))
    value = facts.get(variable.facet)
    return value if variable.word is None else variable.word in (value or ())


def _in_class(value: Any, values: tuple[Any, ...], variable: Variable, space: Space) -> bool:
    if value in values:
        return True
    if variable.word is not None and variable.facet != "packages":
        return False
    if (value is None) != (values[0] is None) or variable.facet == "arch":
        return False
    matchers = [c.matcher for r in space.registries for c in every_clause(r) if c.facet == variable.facet]
    if variable.facet == "packages":
        wanted = [r for m in matchers for r in m.mentions if r.package == variable.word]
        package = str(variable.word)
        return all(r.met_by(_one_package(package, value)) == r.met_by(_one_package(package, values[0])) for r in wanted)
    return all(m.matches(value) == m.matches(values[0]) for m in matchers)
