"""Model: a registry's selection as decision diagrams over the space, from conditions to the chosen backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Hashable, Iterable
from functools import cached_property

from attnreg.analysis.diagram import Diagrams, Node
from attnreg.analysis.space import Space
from attnreg.analysis.symbolic.conditions import Conditions, State
from attnreg.analysis.symbolic.start import SymbolicStart, start
from attnreg.analysis.value_classes import every_clause
from attnreg.language.matchers import Matcher
from attnreg.language.vocabulary import ASKED, AUTOMATIC, BY_MODEL, BY_NAME, NAMED
from attnreg.registry import Backend, Order, Registry, Variant

# the name of a winner, who asks for it, and the name that a user requires, or None


Key = tuple[str, str, str | None]


class Model(Conditions):
    """One registry's selection as functions over a space.

    In a comparison the space may have words of the other registry. No backend is chosen for such a word; an unknown
    flag or facet has no effect. ``asked`` says who asks for a row: the order, a user who names it, or a step that names
    it. ``name`` is then the row. They are not dimensions of the space, because one selection may need all three.
    Conditions are evaluated after the steps of the engine's start.
    """

    def __init__(
        self,
        space: Space,
        registry: Registry,
        asked: str = AUTOMATIC,
        name: str | None = None,
        begun: SymbolicStart | None = None,
    ) -> None:
        """begun: the engine's start that was run for this model. None: it is run here, for requests that name a row."""
        self.begun = start(space, registry, asked, name) if begun is None else begun
        after, d = self.begun.after, space.diagrams
        super().__init__(space, registry, {**after.state, **_selection(d, asked, name)})
        self.asked = asked
        self._variants: dict[tuple[str, str | None], tuple[Node, Node]] = {}
        self._rows: dict[str, tuple[Node, Node]] = {}
        self._orders: dict[str | None, Node] = {}
        self._regions: list[tuple[Order, Node]] | None = None
        self._others: dict[tuple[object, ...], Model] = {}

    def naming(self, name: str) -> Model:
        """The model of a row that a user names before the start; this model if no condition reads who asks."""
        return self._other(BY_NAME, name, None)

    def judging(self, asked: str, name: str) -> Model:
        """The model of a row that is named after the steps of this model."""
        return self._other(asked, name, self.begun)

    def _other(self, asked: str, name: str | None, begun: SymbolicStart | None) -> Model:
        facets = self.registry.vocabulary.facets
        if ASKED not in facets and NAMED not in facets:
            return self
        name = name and name.partition("/")[0]
        # names that no condition distinguishes share a model
        key = asked, begun is None, *(m.matches(name) for m in self._naming)
        if key not in self._others:
            self._others[key] = Model(self.space, self.registry, asked, name, begun)
        return self._others[key]

    @cached_property
    def _naming(self) -> list[Matcher]:
        """The matchers on the name of a backend."""
        return [clause.matcher for clause in every_clause(self.registry) if clause.facet == NAMED]

    def ways(self, name: str) -> tuple[Model, ...]:
        """This model, and the models of the row if a user or a step names it; without duplicates."""
        return tuple(dict.fromkeys((*self.automatic(name), self.naming(name))))

    def automatic(self, name: str) -> tuple[Model, ...]:
        """This model, and the model of the row if a step names it; without duplicates."""
        steps = any(NAMED in effect.sets for step in self.registry.steps for effect in step.effects)
        return tuple(dict.fromkeys((self, *([self.judging(BY_MODEL, name)] if steps else []))))

    @cached_property
    def both(self) -> tuple[Model, ...]:
        """The models of `ways` for all rows."""
        return tuple(dict.fromkeys(m for name in self.registry.backends for m in self.ways(name))) or (self,)

    def without_rules(self, variant: Variant) -> Node:
        """The points at which a variant would accept the request if it had no rules."""
        d = self.d
        parts = [self.space.possible, self.condition(variant.when), self.condition(variant.requires)]
        for claim in variant.claims:
            waived = [self.condition(w.when) for w in self.registry.waivers if claim.facet in w.facets]
            parts.append(d.unite([self._absent(claim.facet), self.matches(claim.facet, claim.matcher), *waived]))
        asked = [str(v.word) for v in self.space.variables if v.facet == "features" and v.word not in variant.served]
        return d.conjoin([*parts, *(d.negate(self.has("features", word)) for word in asked)])

    def _absent(self, facet: str) -> Node:
        if facet in self.registry.derived or (facet, None) in self.state:
            return self.d.equals(self.value(facet), None)
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
            slow = [self.has("features", f) for f in variant.emulated if ("features", f) in self.space.level]
            native = d.conjoin([accepts, *(d.negate(asked) for asked in slow)])
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
        """The row that a choice or an order names; ``FLASH_ATTN/FA3`` is a row with this variant alone."""
        row = self.registry.row(name)
        assert row is not None, name
        return row

    def chosen(self) -> Node:
        """The name of the selected backend at every point, or None at a point without one."""
        return self._names

    def titles(self) -> Node:
        """The selected backend at every point, with its variant and its emulated features, or None at a point without
        one.

        The values are texts: ``FLASH_ATTN/FA3``, ``ROCM_ATTN (emulates sinks)``.
        """
        return self._titles

    def titles_of(self, rows: Container[str]) -> Node:
        """`titles` at the points whose backend is one of ``rows``, and None at all others."""
        d, winner = self.d, self._winner
        out = d.terminal(None)
        for key in d.terminals(winner):
            if self.named(key[0]).name in rows:
                out = d.ite(d.equals(winner, key), self._title(key[0], self._judge(key)), out)
        return out

    @cached_property
    def _names(self) -> Node:
        return self.d.apply(lambda winner: winner and self.named(winner[0]).name, self._winner)

    @cached_property
    def _titles(self) -> Node:
        return self.titles_of(self.registry.backends)

    def _judge(self, key: Key) -> Model:
        """The model that judged a winner. key: the winner's name, how it was asked for, and the name that was given."""
        name, asked, given = key
        if asked == BY_NAME:
            return self.naming(name) if given else self.judging(BY_NAME, name)
        return self if asked == AUTOMATIC else (self.naming(given) if given else self).judging(BY_MODEL, name)

    def _title(self, name: str, model: Model) -> Node:
        """The title of a named backend or variant, wherever ``model`` accepts it."""
        d, row = self.d, self.named(name)
        picked = self.pick(enumerate(self._accepting(name, model)), d.true)
        out = d.terminal(None)
        for index, variant in enumerate(row.variants):
            title = d.terminal(f"{row.name}/{variant.name}" if variant.name else row.name)
            for feature in sorted(f for f in variant.emulated if ("features", f) in self.space.level):
                more = d.apply(lambda text, f=feature: _emulating(text, f), title)
                title = d.ite(model.has("features", feature), more, title)
            out = d.ite(d.equals(picked, index), title, out)
        return out

    @cached_property
    def _winner(self) -> Node:
        """The selected backend at every point, as a `Key`."""
        d, out = self.d, self._begun(self._by_order(None))
        asked = start(self.space, dataclasses.replace(self.registry, steps=())).after
        for choice in self.registry.choices:
            name, here = choice.backends[0], asked.condition(choice.when)
            if choice.strength == "require":
                model = self.naming(name)
                required = self.pick([((name, BY_NAME, name), self._undenied(name, model))], here)
                order = Model(self.space, self.registry, begun=model.begun)._by_order(None)
                out = d.ite(here, model._begun(required, order, name), out)
            elif choice.strength == "prefer":
                out = d.ite(here, self._begun(self._by_order(name)), out)
        return d.ite(self._known(), out, d.terminal(None))

    def _begun(self, otherwise: Node, order: Node | None = None, given: str | None = None) -> Node:
        """The selected backend after the steps: the one that a step names, else ``otherwise``, but None if a step
        refuses.

        order: replaces a backend that a step names and that refuses the request; by default ``otherwise``.
        given: the name that a user requires.
        """
        d, out, after = self.d, otherwise, self.begun.after
        by_model = d.equals(after.value(ASKED), BY_MODEL)
        named = d.ite(by_model, after.value(NAMED), d.terminal(None))
        # without names that only another registry of the space has
        for name in sorted(n for n in d.terminals(named) if self.registry.row(n) is not None):
            judge = self.judging(BY_MODEL, name)
            picked = self.pick([((name, BY_MODEL, given), self._undenied(name, judge))], d.equals(named, name))
            kept = picked
            # of several the first counts
            for fallback in reversed(self.registry.fallbacks):
                gives_way = judge.condition(fallback.when)
                if name == fallback.takes or name in fallback.unless:
                    picked = d.ite(gives_way, kept, picked)
                    continue
                if fallback.only is not None:
                    gives_way = d.conjoin([gives_way, judge.refused_about(name, fallback.only)])
                instead = otherwise if order is None else order
                if fallback.takes is not None:
                    key = fallback.takes, AUTOMATIC, None
                    instead = self.pick([(key, self._undenied(fallback.takes))], gives_way)
                picked = d.ite(gives_way, instead, picked)
            out = d.ite(d.equals(named, name), picked, out)
        return d.ite(self.begun.refused, d.terminal(None), out)

    def refused_about(self, name: str, facets: frozenset[str]) -> Node:
        """Where a row refuses, and all of its reasons are about these facets."""
        d, row, words = self.d, self.named(name), self.registry.vocabulary.features
        known = {*self.registry.vocabulary.facets}
        without = [
            dataclasses.replace(
                variant,
                claims=tuple(c for c in variant.claims if c.facet not in facets),
                rules=tuple(r for r in variant.rules if not known & set(r.facets) <= facets),
                unchecked=dict.fromkeys(words, variant.where) if "features" in facets else variant.unchecked,
            )
            for variant in row.variants
        ]
        accepts = [
            d.ite(d.unite(self.condition(r.when) for r in v.rules), d.false, self.without_rules(v)) for v in without
        ]
        return d.ite(self.row(name)[0], d.false, d.unite(accepts))

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

    @property
    def ordered(self) -> Node:
        """Where an order may decide: no step refuses the run, and none names a backend that cannot give way."""
        d, after = self.d, self.begun.after
        by_model = d.equals(after.value(ASKED), BY_MODEL)
        taken = self.begun.refused if self.registry.fallbacks else d.unite([self.begun.refused, by_model])
        return d.negate(taken)

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
        """For each entry of an order: the points at which it can be chosen, and those without emulation."""
        d, out = self.d, []
        for entry in order.entries:
            experimental = self.registry.backends[entry.row].status == "experimental"
            condition = d.false if experimental else self.condition(entry.condition)
            accepts, native = self._undenied(entry.backend)
            out.append((d.conjoin([accepts, condition]), d.conjoin([native, condition])))
        return out

    def pick(
        self, candidates: Iterable[tuple[Hashable, tuple[Node, Node]]], region: Node, elsewhere: Node | None = None
    ) -> Node:
        """In a region the name of the first candidate that serves natively, else of the first that accepts.

        Outside the region it is ``elsewhere``, or None.
        """
        candidates, d = list(candidates), self.d
        nobody = d.terminal(None)
        out = nobody if elsewhere is None else d.ite(region, nobody, elsewhere)
        # conjoined with the region first, so that no part outside it is built
        for name, (accepts, _) in reversed(candidates):
            out = d.ite(d.conjoin([region, accepts]), d.terminal(name), out)
        for name, (_, native) in reversed(candidates):
            out = d.ite(d.conjoin([region, native]), d.terminal(name), out)
        return out

    def _by_order(self, preferred: str | None) -> Node:
        """The `Key` of the selected backend without the user's choices, except ``preferred``."""
        if preferred not in self._orders:
            self._orders[preferred] = self._decided(preferred)
        return self._orders[preferred]

    def _decided(self, preferred: str | None) -> Node:
        first = []
        if preferred is not None:
            first = [((preferred, BY_NAME, None), self._undenied(preferred, self.judging(BY_NAME, preferred)))]
        out = self.pick(first, self.d.true)
        for order, region in self.regions():
            rest = [(e.backend, where) for e, where in zip(order.entries, self.entries(order), strict=True)]
            candidates = [*first, *(((name, AUTOMATIC, None), where) for name, where in rest if name != preferred)]
            out = self.pick(candidates, region, out)
        return out

    def _undenied(self, name: str, model: Model | None = None) -> tuple[Node, Node]:
        accepting = self._accepting(name, model or self)
        if len(accepting) == 1:
            return accepting[0]
        return self.d.unite(accepts for accepts, _ in accepting), self.d.unite(native for _, native in accepting)

    def _accepting(self, name: str, model: Model) -> list[tuple[Node, Node]]:
        """For each variant of a name: where ``model`` accepts it undenied, and where it does so natively."""
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


def _selection(d: Diagrams, asked: str, name: str | None) -> State:
    """The state of the facets `asked` and `named`."""
    return {(ASKED, None): d.terminal(asked), (NAMED, None): d.terminal(name)}
