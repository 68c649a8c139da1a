"""Model: a registry's selection as decision diagrams over the space, from conditions to the backend chosen."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cached_property

from attnreg.analysis.diagram import Node
from attnreg.analysis.space import Space
from attnreg.language.conditions import Clause, Condition
from attnreg.language.matchers import Matcher, Requirement
from attnreg.language.vocabulary import ASKED, AUTOMATIC, BY_NAME
from attnreg.registry import Backend, Order, Registry, Variant


class Model:
    """One registry's selection as functions over a space.

    Where the space has words that the registry does not know (those of another registry, in a comparison), no backend
    is chosen; a flag or a facet that it does not know changes nothing. ``asked`` says whether rows are judged for the
    order or for a user who names one. It is no dimension of the space, because one selection may do both.
    """

    def __init__(self, space: Space, registry: Registry, asked: str = AUTOMATIC) -> None:
        self.space = space
        self.registry = registry
        self.asked = asked
        self.d = space.diagrams
        self._conditions: dict[int, Node] = {}
        self._derived: dict[str, Node] = {}
        self._variants: dict[tuple[str, str | None], tuple[Node, Node]] = {}
        self._rows: dict[str, tuple[Node, Node]] = {}
        self._orders: dict[str | None, Node] = {}
        self._regions: list[tuple[Order, Node]] | None = None

    @cached_property
    def by_name(self) -> Model:
        """The model of rows that a user names; this model where the registry has no facet `asked`."""
        return Model(self.space, self.registry, BY_NAME) if ASKED in self.registry.vocabulary.facets else self

    @property
    def both(self) -> tuple[Model, ...]:
        """This model and, if it is another, that of rows that a user names."""
        return (self,) if self.by_name is self else (self, self.by_name)

    def condition(self, condition: Condition) -> Node:
        """Where a condition holds."""
        node = self._conditions.get(id(condition))
        if node is None:
            parts = [self.clause(clause) for clause in condition.clauses]
            parts += [self.d.unite(self.condition(c) for c in group) for group in condition.any_of]
            parts += [self.d.negate(self.condition(c)) for c in condition.none_of]
            node = self._conditions[id(condition)] = self.d.conjoin(parts)
        return node

    def clause(self, clause: Clause) -> Node:
        return self.matches(clause.facet, clause.matcher)

    def matches(self, facet: str, matcher: Matcher) -> Node:
        """Where a facet has a value that a matcher accepts."""
        d, space = self.d, self.space
        if facet in self.registry.derived:
            return d.apply(lambda value: bool(matcher.matches(value)), self.derived(facet))
        if facet == ASKED:
            return d.true if matcher.matches(self.asked) else d.false
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
        on = {v.word: d.among(i, [1]) for i, v in enumerate(self.space.variables) if v.facet == facet}
        if matcher.form == "all":
            return d.conjoin(on[w] for w in matcher.mentions)
        if matcher.form == "any":
            return d.unite(on[w] for w in matcher.mentions)
        if matcher.form == "none":
            return d.conjoin(d.negate(on[w]) for w in matcher.mentions)
        return d.conjoin(d.negate(node) for word, node in on.items() if word not in matcher.mentions)

    def _package(self, requirement: Requirement) -> Node:
        level = self.space.level["packages", requirement.package]
        classes = self.space.variables[level].classes
        package = requirement.package
        met = [i for i, c in enumerate(classes) if requirement.met_by(() if c[0] is None else ((package, c[0]),))]
        return self.d.among(level, met)

    def derived(self, name: str) -> Node:
        """A derived facet's value everywhere."""
        node = self._derived.get(name)
        if node is None:
            node = self.d.terminal(None)
            for condition, value, _ in reversed(self.registry.derived[name].cases):
                node = self.d.ite(self.condition(condition), self.d.terminal(value), node)
            self._derived[name] = node
        return node

    def without_rules(self, variant: Variant) -> Node:
        """Where a variant would accept without its rules."""
        d = self.d
        parts = [self.space.possible, self.condition(variant.when), self.condition(variant.requires)]
        for claim in variant.claims:
            waived = [self.condition(w.when) for w in self.registry.waivers if claim.facet in w.facets]
            parts.append(d.unite([self._absent(claim.facet), self.matches(claim.facet, claim.matcher), *waived]))
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
        variant, d = row.variants[index], self.d
        key = (row.name, variant.name)
        if key not in self._variants:
            refused = d.unite(self.condition(rule.when) for rule in variant.rules)
            accepts = d.ite(refused, d.false, self.without_rules(variant))
            slow = [self.space.level[("features", f)] for f in variant.emulated if ("features", f) in self.space.level]
            native = d.conjoin([accepts, *(d.among(level, [0]) for level in slow)])
            self._variants[key] = accepts, native
        return self._variants[key]

    def row(self, name: str) -> tuple[Node, Node]:
        """Where a backend or a variant accepts, and where it does so natively."""
        if name not in self._rows:
            row = self.named(name)
            both = [self.variant(row, i) for i in range(len(row.variants))]
            self._rows[name] = self.d.unite(a for a, _ in both), self.d.unite(n for _, n in both)
        return self._rows[name]

    def named(self, name: str) -> Backend:
        """The row that a choice or an order names; one variant alone for ``FLASH_ATTN/FA3``."""
        row = self.registry.row(name)
        assert row is not None, name
        return row

    def chosen(self) -> Node:
        """The name of the selected backend everywhere; None where there is none."""
        return self._names

    def titles(self) -> Node:
        """The selected backend everywhere, with its variant and what it emulates; None where there is none.

        The values are texts: ``FLASH_ATTN/FA3``, ``ROCM_ATTN (emulates sinks)``.
        """
        return self._titles

    @cached_property
    def _names(self) -> Node:
        return self.d.apply(lambda winner: winner and self.named(winner[0]).name, self._winner)

    @cached_property
    def _titles(self) -> Node:
        d, winner = self.d, self._winner
        out = d.terminal(None)
        for pair in d.terminals(winner) - {None}:
            name, named = pair
            region = d.apply(lambda value, p=pair: value == p, winner)
            out = d.ite(region, self._title(name, self.by_name if named else self), out)
        return out

    def _title(self, name: str, model: Model) -> Node:
        """The title of what is named, wherever ``model`` accepts it."""
        d, row = self.d, self.named(name)
        picked = self.pick(enumerate(self._accepting(name, model)))
        out = d.terminal(None)
        for index, variant in enumerate(row.variants):
            title = d.terminal(f"{row.name}/{variant.name}" if variant.name else row.name)
            for feature in sorted(f for f in variant.emulated if ("features", f) in self.space.level):
                more = d.apply(lambda text, f=feature: _emulating(text, f), title)
                title = d.ite(d.among(self.space.level["features", feature], [1]), more, title)
            out = d.ite(d.apply(lambda i, n=index: i == n, picked), title, out)
        return out

    @cached_property
    def _winner(self) -> Node:
        """The selected backend everywhere, as it is named and whether a user names it; None where there is none."""
        d, out = self.d, self._by_order(None)
        for choice in self.registry.choices:
            name = choice.backends[0]
            if choice.strength == "require":
                candidate = (name, True), self._undenied(name, self.by_name)
                out = d.ite(self.condition(choice.when), self.pick([candidate]), out)
            elif choice.strength == "prefer":
                out = d.ite(self.condition(choice.when), self._by_order(name), out)
        return d.ite(self._known(), out, d.terminal(None))

    def _known(self) -> Node:
        """Where the registry knows every word."""
        vocabulary, parts = self.registry.vocabulary, []
        for level, variable in enumerate(self.space.variables):
            facet = vocabulary.facets.get(variable.facet)
            if facet is not None and facet.kind in ("word", "arch"):
                words = [c[0][1] if variable.facet == "arch" else c[0] for c in variable.classes]
                classes = [i for i, word in enumerate(words) if word is None or word in facet.known]
                parts.append(self.d.among(level, classes))
        return self.d.conjoin(parts)

    def native(self) -> Node:
        """Where some candidate of the order serves the request natively."""
        d = self.d
        return d.unite(d.conjoin([at, native]) for order, at in self.regions() for _, native in self.entries(order))

    def regions(self) -> list[tuple[Order, Node]]:
        """Each order with the part of the space that it decides."""
        d = self.d
        if self._regions is None:
            self._regions = []
            for platform, orders in self.registry.orders.items():
                left = self._platform(platform)
                for order in orders:
                    when = self.condition(order.when)
                    self._regions.append((order, d.conjoin([left, when])))
                    left = d.ite(when, d.false, left)
        return self._regions

    def _platform(self, name: str) -> Node:
        classes = self.space.variables[0].classes
        return self.d.among(0, [i for i, c in enumerate(classes) if c[0][0] == name])

    def entries(self, order: Order) -> list[tuple[Node, Node]]:
        """For each entry of an order, where the automatic choice may take it, and where it does so natively."""
        d, out = self.d, []
        for entry in order.entries:
            experimental = self.registry.backends[entry.backend].status == "experimental"
            condition = d.false if experimental else self.condition(entry.condition)
            accepts, native = self._undenied(entry.backend)
            out.append((d.conjoin([accepts, condition]), d.conjoin([native, condition])))
        return out

    def pick(self, candidates: Iterable[tuple[Hashable, tuple[Node, Node]]]) -> Node:
        """The name of the first candidate that serves natively, else of the first that accepts."""
        candidates, out = list(candidates), self.d.terminal(None)
        for name, (accepts, _) in reversed(candidates):
            out = self.d.ite(accepts, self.d.terminal(name), out)
        for name, (_, native) in reversed(candidates):
            out = self.d.ite(native, self.d.terminal(name), out)
        return out

    def _by_order(self, preferred: str | None) -> Node:
        """The name of the selected backend without a choice but that to prefer one, if any."""
        if preferred not in self._orders:
            self._orders[preferred] = self._decided(preferred)
        return self._orders[preferred]

    def _decided(self, preferred: str | None) -> Node:
        first = [((preferred, True), self._undenied(preferred, self.by_name))] if preferred else []
        out = self.pick(first)
        for order, region in self.regions():
            rest = [(e.backend, where) for e, where in zip(order.entries, self.entries(order), strict=True)]
            candidates = self.pick([*first, *(((name, False), where) for name, where in rest if name != preferred)])
            out = self.d.ite(region, candidates, out)
        return out

    def _undenied(self, name: str, model: Model | None = None) -> tuple[Node, Node]:
        accepting = self._accepting(name, model or self)
        if len(accepting) == 1:
            return accepting[0]
        return self.d.unite(accepts for accepts, _ in accepting), self.d.unite(native for _, native in accepting)

    def _accepting(self, name: str, model: Model) -> list[tuple[Node, Node]]:
        """For each variant that a name means, where ``model`` accepts it, not denied, and where it does so natively."""
        d, row = self.d, self.named(name)
        out = []
        for index, variant in enumerate(row.variants):
            names = {row.name, f"{row.name}/{variant.name}"}
            denials = [c for c in self.registry.choices if c.strength == "deny" and not names.isdisjoint(c.backends)]
            denied = d.unite(self.condition(c.when) for c in denials)
            accepts, native = model.variant(row, index)
            out.append((d.ite(denied, d.false, accepts), d.ite(denied, d.false, native)))
        return out


def _emulating(title: str, feature: str) -> str:
    return f"{title[:-1]}, {feature})" if title.endswith(")") else f"{title} (emulates {feature})"
