"""Conditions as decision diagrams over a space: each holds somewhere, given the facets that steps have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnreg.analysis.diagram import Node
from attnreg.analysis.space import Space
from attnreg.language.computed import Computed, From, taken_from
from attnreg.language.conditions import Clause, Condition
from attnreg.language.matchers import Matcher, Requirement
from attnreg.registry import Registry

# (facet, None), or (facet, word of a set) -> its value at every point
State = Mapping[tuple[str, str | None], Node]


class Conditions:
    """The conditions of a registry as functions over a space.

    ``state`` has the facets whose value is not that of a dimension of the space: those that a step wrote, and those
    that say who asks for a backend. The first value of a class of indistinguishable values represents the class.
    """

    def __init__(self, space: Space, registry: Registry, state: State) -> None:
        self.space = space
        self.registry = registry
        self.state = state
        self.d = space.diagrams
        # id of a condition -> the condition (kept alive, so that its id stays unique), its function, its facets
        self._conditions: dict[int, tuple[Condition, Node, frozenset[str]]] = {}
        self._derived: dict[str, Node] = {}
        self._read_by: dict[str, set[str]] = {}

    def changed(self, changes: State) -> Conditions:
        """The conditions after a step has written some facets."""
        out = Conditions(self.space, self.registry, {**self.state, **changes})
        out._read_by = self._read_by
        written = {facet for facet, _ in changes}
        reading = {name for name in self.registry.derived if written & self._reads(name)} | written
        out._derived = {name: node for name, node in self._derived.items() if name not in reading}
        out._conditions = {k: known for k, known in self._conditions.items() if reading.isdisjoint(known[2])}
        return out

    def _reads(self, name: str) -> set[str]:
        """The facets that a derived facet is computed from, directly or through others."""
        if name not in self._read_by:
            derived = self.registry.derived
            out: set[str] = set()
            for condition, value, _ in derived[name].cases:
                for facet in (*condition.facets, *taken_from(value)):
                    out |= {facet} | (self._reads(facet) if facet in derived else set())
            self._read_by[name] = out
        return self._read_by[name]

    def condition(self, condition: Condition) -> Node:
        """Where a condition holds."""
        known = self._conditions.get(id(condition))
        if known is None:
            parts = [self.clause(clause) for clause in condition.clauses]
            parts += [self.d.unite(self.condition(c) for c in group) for group in condition.any_of]
            parts += [self.d.negate(self.condition(c)) for c in condition.none_of]
            node = self.d.conjoin(parts)
            known = self._conditions[id(condition)] = condition, node, frozenset(condition.facets)
        return known[1]

    def clause(self, clause: Clause) -> Node:
        return self.matches(clause.facet, clause.matcher)

    def matches(self, facet: str, matcher: Matcher) -> Node:
        """Where a facet has a value that a matcher accepts."""
        d, space = self.d, self.space
        if facet in self.registry.derived:
            return d.accepted(self.derived(facet), matcher.matches)
        if (facet, None) in self.state:
            return d.accepted(self.state[facet, None], matcher.matches)
        kind = self.registry.vocabulary.facets[facet].kind
        if kind == "words":
            return self._set_matches(facet, matcher)
        if kind == "packages":
            return d.conjoin(self._package(requirement) for requirement in matcher.mentions)
        name = "arch" if facet == "platform" else facet
        level = space.level[name, None]
        part = {"platform": 0, "arch": 1}.get(facet)
        first = [c[0] if part is None else c[0][part] for c in space.variables[level].classes]
        return d.among(level, [i for i, value in enumerate(first) if matcher.matches(value)])

    def _set_matches(self, facet: str, matcher: Matcher) -> Node:
        d = self.d
        on = {v.word: self.has(facet, str(v.word)) for v in self.space.variables if v.facet == facet}
        if matcher.form == "all":
            return d.conjoin(on[w] for w in matcher.mentions)
        if matcher.form == "any":
            return d.unite(on[w] for w in matcher.mentions)
        if matcher.form == "none":
            return d.conjoin(d.negate(on[w]) for w in matcher.mentions)
        return d.conjoin(d.negate(node) for word, node in on.items() if word not in matcher.mentions)

    def has(self, facet: str, word: str) -> Node:
        """Where a set has a word."""
        written = self.state.get((facet, word))
        return self.d.among(self.space.level[facet, word], [1]) if written is None else written

    def value(self, facet: str) -> Node:
        """The value of a facet at every point."""
        written, level = self.state.get((facet, None)), self.space.level.get((facet, None))
        if facet in self.registry.derived:
            return self.derived(facet)
        if written is not None:
            return written
        # no condition distinguishes its values
        if level is None:
            return self.d.terminal(None)
        return self.d.node(level, [self.d.terminal(c[0]) for c in self.space.variables[level].classes])

    def taken(self, value: Any) -> Node:
        """The value of a case or of a step at every point: a constant, or computed from other facets."""
        if isinstance(value, From):
            return self.value(value.facet)
        if isinstance(value, Computed):
            left, right = (self.value(o) if isinstance(o, str) else self.d.terminal(o) for o in value.operands)
            return self.d.apply(value.of, left, right)
        return self.d.terminal(value)

    def _package(self, requirement: Requirement) -> Node:
        level = self.space.level["packages", requirement.package]
        classes = self.space.variables[level].classes
        package = requirement.package
        met = [i for i, c in enumerate(classes) if requirement.met_by(() if c[0] is None else ((package, c[0]),))]
        return self.d.among(level, met)

    def derived(self, name: str) -> Node:
        """A derived facet's value at every point."""
        node = self._derived.get(name)
        if node is None:
            node = self.d.terminal(None)
            for condition, value, _ in reversed(self.registry.derived[name].cases):
                node = self.d.ite(self.condition(condition), self.taken(value), node)
            self._derived[name] = node
        return node
