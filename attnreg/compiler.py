"""Validated files -> one Registry: rows, orders, choices and invariants, in which every name must exist."""

from __future__ import annotations

from dataclasses import replace

from attnreg import schema
from attnreg.errors import Problem, RegistryError
from attnreg.parts import Part, Parts, Reporter
from attnreg.registry import Backend, Choice, Derived, Entry, Invariant, Order, Registry, SourceRef
from attnreg.rows import RowCompiler
from attnreg.vocabulary import Facet
from attnreg.words import compile_vocabulary


def compile_registry(
    name: str, fingerprint: str, parts: Parts, trusted: frozenset[str], files: tuple[str, ...]
) -> Registry:
    """The registry that the parts make. Raises `RegistryError` with every problem found."""
    return _Compiler(parts, trusted).registry(name, fingerprint, files)


class _Compiler(Reporter):
    def __init__(self, parts: Parts, trusted: frozenset[str]) -> None:
        problems: list[Problem] = []
        sources = {key: s for part in parts.sources for key, s in part.model.items()}
        super().__init__(compile_vocabulary(parts.vocabulary, problems), sources, problems)
        self.parts = parts
        self.trusted = trusted
        self.refs = {key: SourceRef(key, s.url, s.version, s.read) for key, s in sources.items()}

    def registry(self, name: str, fingerprint: str, files: tuple[str, ...]) -> Registry:
        self._fail()
        derived = self._derived()
        imports = all(part.model.imports is None for part in self.parts.backends)
        rows = RowCompiler(self.vocabulary, self.sources, self.problems, self.trusted, imports)
        backends = rows.backends(self.parts)
        orders = self._orders(backends)
        registry = Registry(
            name=name,
            fingerprint=fingerprint,
            vocabulary=self.vocabulary,
            backends=backends,
            orders=orders,
            derived=derived,
            choices=tuple(self._choice(part, backends) for part in self.parts.choices),
            invariants=tuple(self._invariant(part, backends) for part in self.parts.invariants),
            sources=self.refs,
            files=files,
            trusted=self.trusted,
            imports=imports,
        )
        self._fail()
        return registry

    def _fail(self) -> None:
        if self.problems:
            raise RegistryError(dict.fromkeys(self.problems))

    # derived facets --------------------------------------------------------------------------------------------------

    def _derived(self) -> dict[str, Derived]:
        out: dict[str, Derived] = {}
        for part in self.parts.vocabulary:
            for name, data in part.model.derived.items():
                here = ("derived", name)
                if name in self.vocabulary.facets and name not in out:
                    self.report(part, here, "is a facet already", "give the derived facet a name of its own", key=True)
                cases = tuple(
                    (
                        self.condition(part, case.when, *here, "cases", i, "when"),
                        case.value,
                        part.document.at(*part.path, *here, "cases", i),
                    )
                    for i, case in enumerate(data.cases)
                )
                self.shadowed(part, data.cases, (*here, "cases"), "case")
                where = part.document.key_at(*part.path, *here)
                out[name] = Derived(name, cases, where)
                values = frozenset(value for _, value, _ in cases if value is not None)
                facet = Facet(name, "derived", "derived", data.legend, where, values, data.claim)
                self.vocabulary = self.vocabulary.with_facets([facet])
        return out

    def _orders(self, backends: dict[str, Backend]) -> dict[str, tuple[Order, ...]]:
        orders: dict[str, tuple[Order, ...]] = {}
        for part in self.parts.orders:
            for platform, rows in part.model.items():
                if not self.name(part, (platform,), platform, self.vocabulary.facets["platform"].words, "platform"):
                    continue
                self.shadowed(part, rows, (platform,), "order")
                if rows and rows[-1].when is not None:
                    help_ = "end the list with an order that has no `when`"
                    self.report(part, (platform, len(rows) - 1), "the last order has a `when`", help_)
                orders[platform] = self._order_list(part, platform, rows, backends)
        for part in self.parts.overlay_orders:
            for platform, rows in part.model.items():
                if self.name(part, (platform,), platform, self.vocabulary.facets["platform"].words, "platform"):
                    self.shadowed(part, rows, (platform,), "order")
                    orders[platform] = self._order_list(part, platform, rows, backends) + orders.get(platform, ())
        for part in self.parts.places:
            self._place(part, orders, backends)
        return orders

    def _order_list(
        self, part: Part, platform: str, rows: list[schema.OrderData], backends: dict[str, Backend]
    ) -> tuple[Order, ...]:
        return tuple(self._order(part, platform, i, row, backends) for i, row in enumerate(rows))

    def _order(
        self, part: Part, platform: str, index: int, row: schema.OrderData, backends: dict[str, Backend]
    ) -> Order:
        path = (platform, index)
        entries: list[Entry] = []
        seen: set[str] = set()
        for i, entry in enumerate(row.order):
            here = (*path, "order", i)
            if not self.name(part, here, entry.backend, backends, "backend"):
                continue
            if platform not in backends[entry.backend].platforms:
                runs_on = ", ".join(sorted(backends[entry.backend].platforms))
                self.report(part, here, f"{entry.backend} does not run on {platform} (it runs on {runs_on})")
            if entry.backend in seen and not entry.if_:
                self.report(
                    part, here, f"{entry.backend} stands twice in the order", "remove one, or give each an `if`"
                )
            seen.add(entry.backend)
            condition = self.condition(part, entry.if_, *here, "if")
            entries.append(Entry(entry.backend, condition, part.document.at(*part.path, *here)))
        self.source(part, row.source, *path)
        return Order(
            platform=platform,
            name=row.name,
            when=self.condition(part, row.when, *path, "when"),
            entries=tuple(entries),
            where=part.document.at(*part.path, *path),
            because=row.because,
            source=row.source,
        )

    def _place(self, part: Part, orders: dict[str, tuple[Order, ...]], backends: dict[str, Backend]) -> None:
        data: schema.PlaceData = part.model
        neighbour = data.before or data.after
        if neighbour is None or (data.before and data.after):
            self.report(part, (), "a place needs one of `before` and `after`")
            return
        known = self.name(part, ("backend",), data.backend, backends, "backend")
        if not known or not self.name(part, ("before" if data.before else "after",), neighbour, backends, "backend"):
            return
        entry = Entry(data.backend, self.condition(part, data.if_, "if"), part.document.at(*part.path))
        placed = False
        for platform, rows in orders.items():
            new = []
            for order in rows:
                names = [e.backend for e in order.entries]
                wanted = not data.orders or order.title in data.orders
                if wanted and neighbour in names and platform in backends[data.backend].platforms:
                    at = names.index(neighbour) + (0 if data.before else 1)
                    entries = (*order.entries[:at], entry, *order.entries[at:])
                    order, placed = replace(order, entries=entries), True
                new.append(order)
            orders[platform] = tuple(new)
        if not placed:
            titles = [o.title for rows in orders.values() for o in rows if neighbour in {e.backend for e in o.entries}]
            self.report(part, (), f"no order takes {data.backend} there", f"{neighbour} stands in {', '.join(titles)}")

    def _choice(self, part: Part, backends: dict[str, Backend]) -> Choice:
        data: schema.ChoiceData = part.model
        given = {k: v for k in ("require", "prefer", "deny") if (v := getattr(data, k)) is not None}
        if len(given) != 1:
            self.report(part, (), "a choice needs exactly one of `require`, `prefer` and `deny`")
            given = given or {"deny": []}
        strength, names = next(iter(given.items()))
        names = [names] if isinstance(names, str) else names
        for name in names:
            self.name(part, (strength,), name, backends, "backend")
        when = self.condition(part, data.when, "when")
        return Choice(strength, tuple(names), when, part.document.at(*part.path), data.because)  # type: ignore[arg-type]

    def _invariant(self, part: Part, backends: dict[str, Backend]) -> Invariant:
        data: schema.InvariantData = part.model
        if sum(x is not None for x in (data.chosen, data.never, data.finds)) != 1:
            self.report(part, (), "an invariant states exactly one of `chosen`, `never` and `finds`")
        for key in ("chosen", "never"):
            for i, name in enumerate(getattr(data, key) or ()):
                if name is not None:
                    self.name(part, (key, i), name, backends, "backend")
        return Invariant(
            name=data.name,
            says=data.says,
            when=self.condition(part, data.when, "when"),
            where=part.document.at(*part.path),
            chosen=frozenset(data.chosen) if data.chosen is not None else None,
            never=frozenset(data.never or ()),
            finds=bool(data.finds),
            native=data.while_ == "native",
        )
