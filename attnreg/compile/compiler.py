"""Compiles validated files to one Registry, and checks every name in orders, choices, waivers and invariants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from attnreg.compile.backends import RowCompiler
from attnreg.compile.parts import QUOTIENT, QUOTIENT_HELP, OrdersPart, RegistryParts, Reporter
from attnreg.compile.runs import RunCompiler
from attnreg.compile.schema import tables as schema
from attnreg.compile.schema.values import EqualData, FromData, MeasuredData, QuotientData, RemainderData, SourceData
from attnreg.compile.steps import StepCompiler, copied
from attnreg.compile.validation import FilePart
from attnreg.compile.vocabulary import compile_vocabulary, equality, numeric, wrong_facets
from attnreg.errors import Location, Problem, RegistryError
from attnreg.language.backend_options import Fallback
from attnreg.language.computed import From
from attnreg.language.conditions import Condition
from attnreg.language.frozen import deep_frozen
from attnreg.language.measured import Measured
from attnreg.language.vocabulary import Facet, Kind
from attnreg.registry import Backend, Choice, Derived, Entry, Invariant, Known, Order, Registry, SourceRef, Waiver


def compile_registry(
    name: str,
    fingerprint: str,
    parts: RegistryParts,
    trusted: frozenset[str],
    files: tuple[str, ...],
    problems: Iterable[Problem] = (),
) -> Registry:
    """The registry made of ``parts``. Raises `RegistryError` with every problem, ``problems`` included."""
    return _Compiler(parts, trusted, list(problems)).registry(name, fingerprint, files)


class _Compiler(Reporter):
    def __init__(self, parts: RegistryParts, trusted: frozenset[str], problems: list[Problem]) -> None:
        before = len(problems)
        vocabulary = compile_vocabulary(parts.vocabulary, parts.rows() | parts.broken, problems)
        super().__init__(vocabulary, (key for part in parts.sources for key in part.model), parts.broken, problems)
        if len(problems) > before:
            # without the vocabulary's words every other part would have follow-up problems
            self._fail()
        self.parts = parts
        self.left_out = parts.left_out
        self.trusted = trusted
        self.refs: dict[str, SourceRef] = {}
        for part in parts.sources:
            self._add_sources(part)

    def _add_sources(self, part: FilePart[dict[str, SourceData]]) -> None:
        """Add the sources of a file. Reports a second source with the same name and another address or version."""
        for key, s in part.model.items():
            known = self.refs.setdefault(key, SourceRef(key, s.url, s.version, s.read))
            if (known.url, known.version) != (s.url, s.version):
                message = f"there is a source {key} already, {known.url} at {known.version}"
                self.report(part, (key,), message, "give this one a name of its own", key=True)

    def registry(self, name: str, fingerprint: str, files: tuple[str, ...]) -> Registry:
        derived = self._derived()
        wrong = [*wrong_facets(self.vocabulary.facets.values())]
        self.problems += wrong
        if wrong:
            self._fail()
        imports = all(part.model.imports is None for part in self.parts.backends)
        common = self.vocabulary, self.sources, self.broken, self.problems
        starts, runs = StepCompiler(*common), RunCompiler(*common)
        steps, after = starts.steps(self.parts), starts.after(self.parts)
        layout = runs.layout(self.parts)
        rows = RowCompiler(*common, self.trusted, imports, after, layout)
        backends = rows.backends(self.parts)
        orders = self._orders(backends)
        names: set[str] = set()
        registry = Registry(
            name=name,
            fingerprint=fingerprint,
            vocabulary=self.vocabulary,
            backends=backends,
            orders=orders,
            derived=derived,
            choices=tuple(self._choice(part, backends) for part in self.parts.choices),
            fallbacks=tuple(self._fallbacks(backends)),
            waivers=tuple(self._waivers()),
            known=tuple(known for part in self.parts.known for known in self._known(part)),
            invariants=tuple(
                self._invariant(part, backends, bound, names)
                for part, bound in zip(self.parts.invariants, self.parts.bound, strict=True)
            ),
            sources=self.refs,
            files=files,
            trusted=self.trusted,
            imports=imports,
            steps=steps,
            page=starts.page(self.parts),
            memory=starts.memory(self.parts),
            stages=starts.stages(self.parts),
            layout=layout,
            graphs=runs.graphs(self.parts),
            architectures=self.parts.architectures,
            options=starts.options(self.parts),
            drafts=starts.drafts(self.parts),
        )
        self._fail()
        return registry

    def _fail(self) -> None:
        if self.problems:
            raise RegistryError(self.problems)

    def _derived(self) -> dict[str, Derived]:
        out: dict[str, Derived] = {}
        later = [name for part in self.parts.vocabulary for name in part.model.derived]
        for part in self.parts.vocabulary:
            for name, data in part.model.derived.items():
                self.vocabulary = replace(self.vocabulary, later=tuple(later))
                del later[0]
                here = ("derived", name)
                divides = any(isinstance(case.value, QuotientData | RemainderData) for case in data.cases)
                if name in self.vocabulary.facets and name not in out:
                    self.report(part, here, "is a facet already", "give the derived facet a name of its own", key=True)
                    continue
                cases = tuple(self._cases(part, data, divides, *here, "cases"))
                self.check_reachable(part, (case.when for case in data.cases), (*here, "cases"), "case")
                self.source(part, None if part.borrowed else data.source, *here)
                where = part.key_at(*here)
                out[name] = Derived(name, cases, where)
                if divides and data.claim is not None:
                    self.report(part, (*here, "claim"), f"no row can claim it: {QUOTIENT}", QUOTIENT_HELP)
                # keyed by type too: 1 and True are equal, but different values
                known = [v for _, value, _ in cases if not divides for v in self._values(value) if v is not None]
                values = tuple({(type(value), value): value for value in known}.values())
                kind: Kind = "integer" if divides else "derived"
                facet = Facet(name, "derived", kind, data.legend, where, values, data.claim, divides=divides)
                self.vocabulary = self.vocabulary.with_facets([facet])
        self.vocabulary = replace(self.vocabulary, later=())
        return out

    def _cases(
        self, part: FilePart[schema.VocabularyFile], data: schema.DerivedData, divides: bool, *path: str | int
    ) -> Iterator[tuple[Condition, Any, Location]]:
        """The cases of a derived facet; whether two facets are equal becomes a case of each answer."""
        for i, case in enumerate(data.cases):
            when, where = self.condition(part, case.when, *path, i, "when"), part.at(*path, i)
            if not divides and isinstance(case.value, EqualData):
                equal = equality(self, part, case.value.equal, *path, i, "value", "equal")
                yield replace(when, any_of=(*when.any_of, *equal.any_of)), True, where
                yield when, False, where
            else:
                yield when, self._value(part, case.value, divides, *path, i, "value"), where

    def _value(self, part: FilePart[schema.VocabularyFile], value: Any, divides: bool, *path: str | int) -> Any:
        """The value of a case: a constant, `From` with the facet to copy, or `Computed`.

        divides: whether a case of the facet is a quotient or a remainder; all cases are then integers or null.
        """
        if divides:
            return numeric(self, part, value, path)
        if not isinstance(value, FromData):
            return value
        source = copied(self, part, "", value, (*path, "from"))
        if source is not None and not self._values(source):
            self.report(part, path, f"`{source.facet}` has no list of values", "copy a facet of words, or a boolean")
        return source

    def _values(self, value: Any) -> tuple[Any, ...]:
        """The values that a case may have."""
        return self.vocabulary.facets[value.facet].words if isinstance(value, From) else (value,)

    def _orders(self, backends: dict[str, Backend]) -> dict[str, tuple[Order, ...]]:
        orders: dict[str, tuple[Order, ...]] = {}
        platforms = self.vocabulary.facets["platform"].words
        for part in (*self.parts.orders, *self.parts.overlay_orders):
            for platform, rows in part.model.items():
                if not self.name(part, (platform,), platform, platforms, "platform", key=True):
                    continue
                self.check_reachable(part, (row.when for row in rows), (platform,), "order")
                below = orders.get(platform, ())
                names = [order.name for order in below]
                for i, row in enumerate(rows):
                    if row.name in names:
                        message = f"{platform} has an order {row.name} already"
                        self.report(part, (platform, i, "name"), message, "give it a name of its own")
                    names.append(row.name)
                if part in self.parts.orders and rows and rows[-1].when is not None:
                    help_ = "end the list with an order that has no `when`"
                    self.report(part, (platform, len(rows) - 1), "the last order has a `when`", help_)
                # the orders of an overlay come first
                orders[platform] = (*(self._order(part, platform, i, r, backends) for i, r in enumerate(rows)), *below)
        for number, place in enumerate(self.parts.places):
            # two overlays may place a backend alike; the same place twice in one overlay is a mistake
            if any(p.document is place.document and p.model == place.model for p in self.parts.places[:number]):
                self.report(place, (), f"{place.model.backend} is placed so already", "remove one of the two")
            self._place(place, orders, backends)
        return orders

    def _order(
        self, part: OrdersPart, platform: str, index: int, row: schema.OrderData, backends: dict[str, Backend]
    ) -> Order:
        path = (platform, index)
        entries: list[Entry] = []
        seen: dict[str, bool] = {}
        for i, entry in enumerate(row.order):
            here = (*path, "order", i)
            if not self._named(part, here, entry.backend, backends):
                continue
            runs = backends[entry.backend.partition("/")[0]].platforms
            if platform not in runs:
                runs_on = ", ".join(sorted(runs))
                self.report(part, here, f"{entry.backend} does not run on {platform} (it runs on {runs_on})")
            if entry.backend in seen and not (entry.if_ and seen[entry.backend]):
                help_ = "remove one, or give each an `if`"
                self.report(part, here, f"{entry.backend} stands twice in the order", help_)
            seen[entry.backend] = bool(entry.if_)
            condition = self.shared_condition(part, entry.if_, *here, "if")
            entries.append(Entry(entry.backend, condition, part.at(*here)))
        self.source(part, row.source, *path)
        return Order(
            platform=platform,
            name=row.name,
            when=self.shared_condition(part, row.when, *path, "when"),
            entries=tuple(entries),
            where=part.at(*path),
            because=row.because,
            source=row.source,
            measured=self._measured(part, row.measured, backends, *path, "measured"),
        )

    def _measured(
        self, part: OrdersPart, data: MeasuredData | None, backends: dict[str, Backend], *path: str | int
    ) -> Measured | None:
        if data is None:
            return None
        for key in ("of", "over"):
            self._named(part, (*path, key), getattr(data, key), backends)
        return Measured(**data.model_dump(), where=part.key_at(*path))

    def _place(
        self, part: FilePart[schema.PlaceData], orders: dict[str, tuple[Order, ...]], backends: dict[str, Backend]
    ) -> None:
        """Insert a backend beside its neighbour, in every order that has it; with `if`, its earlier places stay."""
        data = part.model
        entry = Entry(data.backend, self.shared_condition(part, data.if_, "if"), part.at(), joined=not data.orders)
        side, neighbour = self._neighbour(part, backends, [order.title for order in _all(orders)])
        if neighbour is None:
            return
        beside = [order for order in _all(orders) if any(neighbour in (e.backend, e.row) for e in order.entries)]
        runs_on = backends[entry.row].platforms
        taking = [o for o in beside if o.platform in runs_on and o.title in (data.orders or [o.title])]
        for order in taking:
            changed = _with_entry(order, entry, side, neighbour, keep=bool(data.if_))
            orders[order.platform] = tuple(changed if o is order else o for o in orders[order.platform])
        if not taking:
            help_ = f"{neighbour} stands in {', '.join(o.title for o in beside) or 'no order'}"
            help_ += f"; {data.backend} runs on {', '.join(sorted(runs_on))}"
            self.report(part, (), f"no order takes {data.backend} {side} {neighbour}", help_)

    def _neighbour(
        self, part: FilePart[schema.PlaceData], backends: dict[str, Backend], titles: list[str]
    ) -> tuple[str, str | None]:
        """The side and the name of the neighbour of a place; the name is None if the place is not valid."""
        data = part.model
        side, neighbour = ("before", data.before) if data.before else ("after", data.after)
        if neighbour is None or (data.before and data.after):
            self.report(part, (), "a place needs one of `before` and `after`")
            return side, None
        if neighbour == data.backend:
            self.report(part, (side,), f"{neighbour} cannot stand {side} itself")
            return side, None
        known = [self._named(part, (key,), getattr(data, key), backends) for key in ("backend", side)]
        known += [self.name(part, ("orders", i), title, titles, "order") for i, title in enumerate(data.orders)]
        return side, neighbour if all(known) else None

    def _named(self, part: FilePart[Any], path: tuple[str | int, ...], name: str, backends: dict[str, Backend]) -> bool:
        """Whether a backend, or a variant of one, has that name. Reports an unknown name."""
        row, _, variant = name.partition("/")
        if name in backends or name in self.broken or row not in backends:
            return self.name(part, path, name, backends, "backend")
        return self.name(part, path, variant, backends[row].variant_names, f"variant of {row}")

    def _choice(self, part: FilePart[schema.ChoiceData], backends: dict[str, Backend]) -> Choice:
        data = part.model
        decisions = {k: v for k in ("require", "prefer", "deny") if (v := getattr(data, k)) is not None}
        if len(decisions) != 1:
            self.report(part, (), "a choice needs exactly one of `require`, `prefer` and `deny`")
        strength, names = next(iter(decisions.items()), ("deny", []))
        names = [names] if isinstance(names, str) else names
        if decisions and not names:
            self.report(part, (strength,), "names no backend")
        for i, name in enumerate(names):
            self._named(part, (strength, i), name, backends)
        when = self.shared_condition(part, data.when, "when")
        return Choice(strength, tuple(names), when, part.at(), data.because)  # type: ignore[arg-type]

    def _fallbacks(self, backends: Mapping[str, Backend]) -> Iterator[Fallback]:
        for part in self.parts.backends:
            for i, data in enumerate(part.model.fallbacks):
                path = ("fallbacks", i)
                for j, facet in enumerate(data.only or ()):
                    self.name(part, (*path, "only", j), facet, self.vocabulary.facets, "facet")
                for place in ((("takes",), data.takes), *((("unless", j), name) for j, name in enumerate(data.unless))):
                    if place[1] is not None:
                        self.name(part, (*path, *place[0]), place[1], backends, "backend")
                if data.only is None and data.takes is None:
                    help_ = "state `only`, the facets of the reasons, or `takes`, the backend in its place"
                    self.report(part, path, "is of every named backend", help_)
                self.source(part, data.source, *path)
                when = self.shared_condition(part, data.when, *path, "when")
                only = None if data.only is None else frozenset(data.only)
                yield Fallback(when, only, data.because, part.at(*path), data.takes, frozenset(data.unless))

    def _waivers(self) -> Iterator[Waiver]:
        known = ["platform", "attention", "phase", *(f.name for f in self.vocabulary.claims.values())]
        for part in self.parts.backends:
            for i, data in enumerate(part.model.waivers):
                path = ("waivers", i)
                for j, facet in enumerate(data.unchecked):
                    self.name(part, (*path, "unchecked", j), facet, known, "facet with a claim")
                self.source(part, data.source, *path)
                when = self.condition(part, data.when, *path, "when")
                yield Waiver(when, frozenset(data.unchecked), data.because, part.at(*path))

    def _known(self, part: FilePart[schema.KnownData]) -> Iterator[Known]:
        data = part.model
        if bool(data.of) == bool(data.each):
            help_ = "give the subject of one finding as `of`, or those of several as `each`"
            self.report(part, (), "states `of` and `each`" if data.of else "names no subject", help_)
        for name in data.example or ():
            self.name(part, ("example", name), name, self.vocabulary.facets, "facet", key=True)
        example = deep_frozen(data.example) if data.example else None
        subjects = [(tuple(data.of), part.at("of"))] if data.of else []
        subjects += [(tuple(of), part.at("each", i)) for i, of in enumerate(data.each)]
        for subject, where in subjects:
            yield Known(data.code, subject, data.because, where, example)

    def _invariant(
        self, part: FilePart[schema.InvariantData], backends: dict[str, Backend], bound: frozenset[str], names: set[str]
    ) -> Invariant:
        """An invariant. It is about the ``bound`` rows; a row that a later overlay adds may always be chosen.

        names: the names of earlier invariants.
        """
        data = part.model
        if data.name in names:
            self.report(part, ("name",), f"there is an invariant {data.name} already", "give it a name of its own")
        names.add(data.name)
        if sum(x is not None for x in (data.chosen, data.never, data.finds)) != 1:
            self.report(part, (), "an invariant states exactly one of `chosen`, `never` and `finds`")
        for key in ("chosen", "never"):
            for i, name in enumerate(getattr(data, key) or ()):
                if name is not None:
                    self.name(part, (key, i), name, backends, "backend")
        return Invariant(
            name=data.name,
            says=data.says,
            when=self.shared_condition(part, data.when, "when"),
            where=part.at(),
            chosen=frozenset((*data.chosen, *(backends.keys() - bound))) if data.chosen is not None else None,
            never=frozenset(data.never or ()),
            finds=bool(data.finds),
            native=data.while_ == "native",
        )


def _all(orders: dict[str, tuple[Order, ...]]) -> list[Order]:
    return [order for rows in orders.values() for order in rows]


def _with_entry(order: Order, entry: Entry, side: str, neighbour: str, *, keep: bool) -> Order:
    """The order with an entry beside the first of a neighbour. ``keep`` keeps other entries of the same backend."""
    entries = [e for e in order.entries if keep or e.backend != entry.backend]
    names = [e.backend for e in entries]
    # if only variants of the neighbour are in the order: before the first of them, or after the last
    of_row = [i for i, e in enumerate(entries) if e.row == neighbour]
    at = names.index(neighbour) if neighbour in names else of_row[-1 if side == "after" else 0]
    entries.insert(at + (side == "after"), entry)
    return replace(order, entries=tuple(entries))
