"""Compiles `layout` and `graphs` of steps.yaml to the rules of a whole run, and checks every word in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from attnreg.compile.parts import RegistryParts, Reporter
from attnreg.compile.schema.runs import GraphsData, LayoutData
from attnreg.compile.schema.steps import StepsFile
from attnreg.compile.source.yaml_source import Path_
from attnreg.compile.validation import FilePart
from attnreg.errors import Location
from attnreg.language.conditions import Condition
from attnreg.language.engine.runs import (
    AskedMode,
    CacheBeside,
    ConnectorWish,
    GraphRules,
    KindLevel,
    LayoutRules,
    ModeLimit,
    PiecesOf,
    UnknownRun,
)

_Part = FilePart[StepsFile]


class RunCompiler(Reporter):
    """Compiles the rules of a whole run."""

    def layout(self, parts: RegistryParts) -> LayoutRules | None:
        """The rules for the layout of a run's KV cache; None if no file has them."""
        return next((self._layout(p, data) for p in reversed(parts.steps) if (data := p.model.layout)), None)

    def graphs(self, parts: RegistryParts) -> GraphRules | None:
        """The rules for the graph mode of a run; None if no file has them."""
        return next((self._graphs(p, data) for p in reversed(parts.steps) if (data := p.model.graphs)), None)

    def _layout(self, part: _Part, data: LayoutData) -> LayoutRules:
        self.source(part, data.source, "layout")
        for key in ("layouts", "default", "block_compact", "block_outermost"):
            self.once(part, ("layout", key), getattr(data, key))
            if key != "layouts":
                self._known(part, ("layout", key), getattr(data, key), data.layouts)
        for alias, layout in data.aliases.items():
            self.name(part, ("layout", "aliases", alias), layout, data.layouts, "layout")
        for i, beside in enumerate(data.beside):
            self._known(part, ("layout", "beside", i, "layouts"), beside.layouts or [], data.layouts)
            if beside.layouts is None or beside.graphs is not None:
                self.report(
                    part, ("layout", "beside", i), "states no layouts, or a graph level", "state `layouts` alone"
                )
        return LayoutRules(
            agree=data.agree,
            layouts=tuple(data.layouts),
            default=tuple(data.default),
            where=part.at("layout"),
            block_compact=frozenset(data.block_compact),
            block_outermost=frozenset(data.block_outermost),
            aliases=data.aliases,
            variable=data.variable,
            apart=frozenset(data.apart),
            beside=tuple(
                CacheBeside(when, item.name, at, layouts=tuple(item.layouts or ()), source=item.source)
                for item, when, at in self._items(part, "layout", "beside", data.beside)
            ),
            unknown=self._unknown(part, "layout", data),
            wishes=tuple(self._wishes(part, data)),
            source=data.source,
        )

    def _wishes(self, part: _Part, data: LayoutData) -> Iterator[ConnectorWish]:
        names = {layout: layout for layout in data.layouts} | data.aliases
        for i, (item, when, at) in enumerate(self._items(part, "layout", "wishes", data.wishes)):
            if item.layout is not None:
                self.name(part, ("layout", "wishes", i, "layout"), item.layout, names, "layout")
            yield ConnectorWish(when, item.layout, item.unknown or "", at, item.source)

    def _known(self, part: _Part, path: Path_, names: Iterable[str], known: Iterable[str]) -> None:
        for i, name in enumerate(names):
            self.name(part, (*path, i), name, known, "layout")

    def _graphs(self, part: _Part, data: GraphsData) -> GraphRules:
        self.source(part, data.source, "graphs")
        for key, noun in (("asked", "mode"), ("pieces", "entry")):
            items = getattr(data, key)
            self.check_reachable(part, (item.when for item in items), ("graphs", key), noun)
            if items and items[-1].when:
                message = f"no {noun} is left where no `when` holds"
                self.report(part, ("graphs", key, len(items) - 1), message, "end the list with one without `when`")
        for i, beside in enumerate(data.beside):
            if beside.graphs is None or beside.layouts is not None:
                self.report(part, ("graphs", "beside", i), "states no graph level, or layouts", "state `graphs` alone")

        def of(key: str) -> Iterator[tuple[Any, Condition, Location]]:
            return self._items(part, "graphs", key, getattr(data, key))

        return GraphRules(
            asked=tuple(AskedMode(when, d.mode, at, d.because or "", d.source) for d, when, at in of("asked")),
            where=part.at("graphs"),
            limits=tuple(
                ModeLimit(when, d.mode, frozenset(d.keeps), d.because, at, d.source) for d, when, at in of("limits")
            ),
            pieces=tuple(PiecesOf(when, d.pieces, at, d.because or "", d.source) for d, when, at in of("pieces")),
            wrapped=tuple(
                KindLevel(frozenset(d.kinds), when, d.level, at, d.because, d.source) for d, when, at in of("wrapped")
            ),
            mixers=tuple(
                KindLevel(frozenset(d.kinds), when, d.level, at, source=d.source) for d, when, at in of("mixers")
            ),
            beside=tuple(
                CacheBeside(when, d.name, at, graphs=d.graphs, source=d.source) for d, when, at in of("beside")
            ),
            unknown=self._unknown(part, "graphs", data),
            source=data.source,
        )

    def _unknown(self, part: _Part, rules: str, data: LayoutData | GraphsData) -> tuple[UnknownRun, ...]:
        for i, item in enumerate(data.unknown):
            if not item.when and not item.mixers:
                self.report(part, (rules, "unknown", i), "holds for every run", "limit it by `when` or `mixers`")
        items = self._items(part, rules, "unknown", data.unknown)
        return tuple(UnknownRun(when, d.mixers or False, d.because, at, d.source) for d, when, at in items)

    def _items(
        self, part: _Part, rules: str, key: str, items: Iterable[Any]
    ) -> Iterator[tuple[Any, Condition, Location]]:
        """The items of a list with their conditions and places."""
        for i, item in enumerate(items):
            self.source(part, item.source, rules, key, i)
            yield item, self.condition(part, item.when, rules, key, i, "when"), part.at(rules, key, i)
