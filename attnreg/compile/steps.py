"""Compiles steps.yaml to `Step` and `PageRules` objects, and checks every word in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, get_args

from attnreg.compile.parts import QUOTIENT, QUOTIENT_HELP, RegistryParts, Reporter
from attnreg.compile.schema.block_size import Blocks, MultipleData, StatesData
from attnreg.compile.schema.memory import IndexKeysData, WholeWindowsData, WindowsData
from attnreg.compile.schema.steps import EffectData, StepData, StepsFile
from attnreg.compile.schema.values import FromData
from attnreg.compile.source.yaml_source import Path_, shown
from attnreg.compile.validation import FilePart
from attnreg.errors import Location, did_you_mean
from attnreg.language.backend_options import BackendOption
from attnreg.language.computed import Computed, From, Operation
from attnreg.language.conditions import Condition
from attnreg.language.consequence import Consequence
from attnreg.language.engine.pages import (
    DefaultSize,
    HeldStates,
    KernelBlocks,
    OfStates,
    OtherCache,
    PageRules,
    Raised,
    StateMultiple,
    StateRules,
    UnknownSize,
    UnknownStates,
)
from attnreg.language.engine.runs import IndexKeys, MemoryRules, StageRules
from attnreg.language.facets import CORE
from attnreg.language.frozen import FrozenDict
from attnreg.language.vocabulary import ASKED, BY_MODEL, NAMED, Facet
from attnreg.registry import Effect, Step, Switched

_SETS = ("features", "without")
_EFFECTS = ("sets", "refuses", "unknown")


class StepCompiler(Reporter):
    """Compiles the steps of a registry."""

    def steps(self, parts: RegistryParts) -> tuple[Step, ...]:
        """The steps of all files, in order."""
        self.refusals: set[tuple[str, ...]] = set()
        return tuple(self._step(part, i, data) for part in parts.steps for i, data in enumerate(part.model.steps))

    def options(self, parts: RegistryParts) -> tuple[BackendOption, ...]:
        """The options that name backends, in the order in which they count."""
        return tuple(self._option(part, name) for part in parts.steps for name in part.model.options)

    def drafts(self, parts: RegistryParts) -> Mapping[str, str]:
        """Facet of a draft's request -> the facet of its target whose value it gets, after the target's steps."""
        found = {}
        for part in parts.steps:
            for name, source in part.model.drafts.items():
                known = self.name(part, ("drafts", name), name, self.vocabulary.facets, "facet", key=True)
                if known and self.name(part, ("drafts", name), source, self.vocabulary.facets, "facet"):
                    copied(self, part, name, FromData.model_validate({"from": source}), ("drafts", name))
                    found[name] = source
        return FrozenDict(found)

    def _option(self, part: FilePart[StepsFile], name: Any) -> BackendOption:
        data, path = part.model.options[name], ("options", name)
        self.source(part, data.source, *path)
        if data.facet is not None and self.name(part, (*path, "facet"), data.facet, self.vocabulary.facets, "facet"):
            facet = self.vocabulary.facets[data.facet]
            if facet.of != "request" or not facet.names_backends:
                help_ = "name a facet of the request whose kind is backend"
                self.report(part, (*path, "facet"), f"`{data.facet}` holds no backend of a request", help_)
        reaches = self.shared_condition(part, data.reaches, *path, "reaches")
        names = FrozenDict(data.names)
        return BackendOption(name, reaches, part.at(*path), data.facet, names, data.source)

    def after(self, parts: RegistryParts) -> tuple[Consequence, ...]:
        """The reasons why the engine stops after the choice, whatever the backend."""
        return tuple(consequence for part in parts.steps for consequence in self._after(part))

    def _after(self, part: FilePart[StepsFile]) -> Iterator[Consequence]:
        for i, data in enumerate(part.model.after):
            path = ("after", i)
            self.source(part, data.source, *path)
            when = self.condition(part, data.when, *path, "when")
            yield Consequence(when, part.at(*path), fails=data.fails, source=data.source, id=data.id or "")

    def page(self, parts: RegistryParts) -> PageRules | None:
        """The rules for the block size of a run; None if no file has them."""
        return next((self._page(part) for part in reversed(parts.steps) if part.model.page is not None), None)

    def _page(self, part: FilePart[StepsFile]) -> PageRules:
        data = part.model.page
        assert data is not None
        self.source(part, data.source, "page")
        self.check_reachable(part, (size.when for size in data.default), ("page", "default"), "size")
        if data.default[-1].when:
            last = ("page", "default", len(data.default) - 1)
            self.report(part, last, "no size is left where no `when` holds", "end the list with a size without `when`")

        for i, item in enumerate(data.unknown):
            if not item.when and item.mixers is None:
                self.report(part, ("page", "unknown", i), "holds for every run", "limit it by `when` or `mixers`")

        def of(kind: str) -> Iterator[tuple[Any, Condition, Location]]:
            for i, item in enumerate(getattr(data, kind)):
                self.source(part, item.source, "page", kind, i)
                yield item, self.condition(part, item.when, "page", kind, i, "when"), part.at("page", kind, i)

        return PageRules(
            agree=data.agree,
            default=tuple(DefaultSize(when, d.tokens, at, d.source) for d, when, at in of("default")),
            where=part.at("page"),
            unknown=tuple(UnknownSize(when, d.mixers, d.because, at, d.source) for d, when, at in of("unknown")),
            beside=tuple(
                OtherCache(when, d.name, blocks_of(d.kernel_blocks), at, d.source) for d, when, at in of("beside")
            ),
            raised=tuple(Raised(when, d.units, d.because, at, d.source) for d, when, at in of("raised")),
            states=self._states(part, data.states) if data.states is not None else None,
            apart=frozenset(data.apart),
            source=data.source,
        )

    def _states(self, part: FilePart[StepsFile], data: StatesData) -> StateRules:
        """The rules for runs that keep states beside their KV cache."""
        path = ("page", "states")
        self.source(part, data.source, *path)
        for i, item in enumerate(data.multiples):
            if (item.multiple_of is None) == (item.at_least is None):
                self.report(part, (*path, "multiples", i), "has no number, or two", "state `multiple_of` or `at_least`")

        proposed, facets = data.proposed, self.vocabulary.facets
        here = (*path, "proposed")
        known = proposed is not None and self.name(part, here, proposed, facets, "facet")
        if proposed is not None and known and facets[proposed].kind != "integer":
            self.report(part, here, f"`{proposed}` holds no integer", "name a facet of integers")

        def of(kind: str) -> Iterator[tuple[Any, OfStates]]:
            for i, item in enumerate(getattr(data, kind)):
                here = (*path, kind, i)
                self.source(part, item.source, *here)
                when = self.condition(part, item.when, *here, "when")
                yield item, OfStates(tuple(item.kinds), item.key_size, when, part.at(*here), item.source)

        return StateRules(
            where=part.at(*path),
            config_dtype=self.condition(part, data.config_dtype, *path, "config_dtype"),
            widened=frozenset(data.widened),
            proposed=proposed,
            all_backends=data.all_backends,
            multiples=tuple(StateMultiple(which, d.multiple_of, d.at_least) for d, which in of("multiples")),
            held=tuple(HeldStates(which, d.states) for d, which in of("held")),
            alone=data.alone,
            unknown=tuple(UnknownStates(which, d.because, d.drafted or False) for d, which in of("unknown")),
            source=data.source,
        )

    def memory(self, parts: RegistryParts) -> MemoryRules | None:
        """The share of a GPU's memory that the engine takes; None if no file says it."""
        for part in reversed(parts.steps):
            data = part.model.memory
            if data is not None:
                self.source(part, data.source, "memory")
                keys = tuple(self._index_keys(part, data.index_keys))
                whole = tuple(self._whole_windows(part, data.whole_windows))
                own = tuple(self._windows(part, data.windows))
                return MemoryRules(data.share, data.option, part.at("memory"), data.source, keys, whole, own)
        return None

    def _windows(self, part: FilePart[StepsFile], entries: Sequence[WindowsData]) -> Iterator[tuple[Condition, bool]]:
        for i, data in enumerate(entries):
            path: Path_ = ("memory", "windows", i)
            self.source(part, data.source, *path)
            yield self.condition(part, data.when, *path, "when"), data.keeps == "all"

    def _whole_windows(self, part: FilePart[StepsFile], entries: Sequence[WholeWindowsData]) -> Iterator[Condition]:
        for i, data in enumerate(entries):
            path: Path_ = ("memory", "whole_windows", i)
            self.source(part, data.source, *path)
            yield self.condition(part, data.when, *path, "when")

    def _index_keys(self, part: FilePart[StepsFile], entries: Sequence[IndexKeysData]) -> Iterator[IndexKeys]:
        for i, data in enumerate(entries):
            path: Path_ = ("memory", "index_keys", i)
            self.source(part, data.source, *path)
            when = self.condition(part, data.when, *path, "when")
            yield IndexKeys(when, data.bits, data.scale_bytes, data.scaled, part.at(*path), data.source)

    def stages(self, parts: RegistryParts) -> StageRules | None:
        """How the engine shares out layers over pipeline stages; None if no file says it."""
        for part in reversed(parts.steps):
            data = part.model.stages
            if data is not None:
                self.source(part, data.source, "stages")
                return StageRules(data.spare, part.at("stages"), data.source)
        return None

    def _step(self, part: FilePart[StepsFile], index: int, data: StepData) -> Step:
        path: Path_ = ("steps", index)
        own = any(getattr(data, name) is not None for name in _EFFECTS)
        if own == bool(data.cases):
            help_ = "a step has `cases`, or one effect of its own"
            self.report(part, path, "states `cases` and an effect" if own else "does nothing", help_)
        self.source(part, data.source, *path)
        self.check_reachable(part, (case.when for case in data.cases), (*path, "cases"), "case")
        cases = [self._effect(part, case, (*path, "cases", i)) for i, case in enumerate(data.cases)]
        if own:
            cases = [
                self._effect(part, EffectData(**data.model_dump(include={*_EFFECTS, "because", "id", "ends"})), path)
            ]
        when = self.condition(part, data.when, *path, "when")
        step = Step(data.step, when, tuple(cases), part.at(*path), data.source, data.name or "")
        for i, effect in enumerate(step.effects):
            if effect.refuses and not effect.unknown:
                here = path if own else (*path, "cases", i)
                names = (step.title or step.name, effect.id)
                self.apart(part, here, self.refusals, names, f"a refusal of {names[0]}")
        return step

    def _effect(self, part: FilePart[StepsFile], data: EffectData, path: Path_) -> Effect:
        given = [f"`{name}`" for name in _EFFECTS if getattr(data, name) is not None]
        if len(given) > 1:
            self.report(part, path, f"states {' and '.join(given)}", "a step has one effect: keep one")
        sets = self._sets(part, data.sets or {}, (*path, "sets"))
        when = self.condition(part, data.when, *path, "when")
        said = data.refuses or data.unknown or ""
        if data.id is not None and data.refuses is None:
            self.report(part, (*path, "id"), "names a refusal, and this is none", "remove it", key=True)
        unknown = data.unknown is not None
        return Effect(when, part.at(*path), sets, said, unknown, data.because, data.id or "", data.ends or False)

    def _sets(self, part: FilePart[StepsFile], raw: Mapping[str, Any], path: Path_) -> dict[str, Any]:
        sets: dict[str, Any] = {}
        for name, value in raw.items():
            if name not in _SETS:
                facet = self._settable(part, name, (*path, name))
                if (
                    name == NAMED
                    and ASKED in self.vocabulary.facets
                    and BY_MODEL not in self.vocabulary.facets[ASKED].known
                ):
                    self.report(
                        part, (*path, name), f"`{ASKED}` has no word `{BY_MODEL}`", "add it to its words", key=True
                    )
                if facet is not None:
                    sets[name] = self._value(part, facet, value, (*path, name))
        if any(name in raw for name in _SETS):
            on, off = (self._features(part, raw.get(name, []), (*path, name)) for name in _SETS)
            sets["features"] = Switched(on, off)
            for word in sorted(on & off):
                self.report(part, path, f"adds {word} and takes it out", "keep one of the two")
        return sets

    def _settable(self, part: FilePart[StepsFile], name: str, path: Path_) -> Facet | None:
        facets = self.vocabulary.facets
        facet = facets.get(name)
        if facet is None:
            known = [*(f.name for f in facets.values() if _may_be_set(f)), *_SETS]
            self.report(part, path, f"unknown facet `{name}`", did_you_mean(name, known), key=True)
        elif not _may_be_set(facet):
            why = "is derived from others" if facet.of == "derived" else f"belongs to the {facet.of}"
            help_ = "a step sets facets of the request and of the start, and `named`"
            self.report(part, path, f"`{name}` {why}", help_, key=True)
        return facet if facet is not None and _may_be_set(facet) else None

    def _value(self, part: FilePart[StepsFile], facet: Facet, raw: object, path: Path_) -> Any:
        if isinstance(raw, dict):
            return self._taken(part, facet, raw, path)
        if raw is None:
            if _required(facet):
                self.report(part, path, f"every request has a {facet.name}", "set it to a value")
            return None
        if isinstance(raw, list):
            self.report(part, path, f"expected one value, got {shown(raw)}", "the cases of a step may differ in it")
            return None
        before = len(self.problems)
        # parsed as a matcher, only to report a wrong value
        self.parser(part).matcher(raw, facet, (*part.path, *path))
        if facet.kind == "word" and len(self.problems) == before and raw not in facet.known:
            self.report(part, path, f"`{raw}` is a pattern", "a step sets one value")
        if facet.kind == "integer" and isinstance(raw, int) and raw < facet.least:
            self.report(part, path, f"expected an integer of at least {facet.least}, got {raw}")
        return raw

    def _taken(
        self, part: FilePart[StepsFile], facet: Facet, raw: dict[str, Any], path: Path_
    ) -> From | Computed | None:
        """``{from: FACET}``, if this facet has all of its values, or a number computed from two operands."""
        [(key, value)] = raw.items() if len(raw) == 1 else [("", None)]
        if key == "from" and isinstance(value, str):
            return copied(self, part, facet.name, FromData(**raw), (*path, "from"))
        if key in get_args(Operation) and key != "quotient" and isinstance(value, list) and len(value) == 2:
            return self._computed(part, facet, cast("Operation", key), value, (*path, key))
        forms = "{from: FACET}, {product: [A, B]} or {remainder: [A, B]}"
        self.report(part, path, f"expected a value, {forms}, got {shown(raw)}")
        return None

    def _computed(
        self, part: FilePart[StepsFile], facet: Facet, operation: Operation, raw: list[Any], path: Path_
    ) -> Computed | None:
        """A product or a remainder of two operands: facets that hold integers, or integers of at least 1."""
        before = len(self.problems)
        known, least = self.vocabulary.facets, 1
        for i, operand in enumerate(raw):
            here = (*path, i)
            if isinstance(operand, str):
                if self.name(part, here, operand, known, "facet") and known[operand].kind != "integer":
                    self.report(part, here, f"`{operand}` holds no integer", "facets of integers can be computed with")
                elif operand in known and known[operand].divides:
                    self.report(part, here, f"`{operand}` cannot be used here: {QUOTIENT}", QUOTIENT_HELP)
                least = min(least, known[operand].least) if operand in known else least
            elif type(operand) is not int or operand < 1:
                self.report(part, here, f"expected a facet, or an integer of at least 1, got {shown(operand)}")
        numbers = sum(type(operand) is int for operand in raw)
        if numbers == 2:
            self.report(part, path, "both are numbers", f"write the {operation}")
        elif operation == "remainder" and not numbers:
            help_ = "one of the two is a number: what is true of two unknown sizes could not be proved"
            self.report(part, path, "the remainder of two facets", help_)
        if facet.kind != "integer":
            self.report(part, path, f"`{facet.name}` holds no integer", f"set a facet of integers to a {operation}")
        elif _required(facet):
            self.report(part, path, f"every request has a {facet.name}", "a facet that is not given has no number")
        elif facet.least > (least if operation == "product" else 0):
            self.report(part, path, f"`{facet.name}` is at least {facet.least}, and a {operation} may be 0")
        if len(self.problems) > before:
            return None
        left, right = raw
        return Computed(operation, (left, right))

    def _features(self, part: FilePart[StepsFile], raw: object, path: Path_) -> frozenset[str]:
        items = [raw] if isinstance(raw, str) else raw
        if not isinstance(items, list):
            self.report(part, path, f"expected a list of features, got {shown(raw)}")
            return frozenset()
        known = self.vocabulary.features
        return frozenset(w for i, w in enumerate(items) if self.name(part, (*path, i), w, known, "feature"))


def blocks_of(stated: Blocks) -> KernelBlocks:
    """The blocks that a kernel reads, from their form in the data."""
    sizes = tuple(sorted({size for size in stated if isinstance(size, int)}))
    return KernelBlocks(sizes, tuple(size.multiple_of for size in stated if isinstance(size, MultipleData)))


def copied(reporter: Reporter, part: FilePart[Any], name: str, data: FromData, path: Path_) -> From | None:
    """The facet to copy a value from, None if its values are not values of the facet ``name``."""
    facets = reporter.vocabulary.facets
    if not reporter.name(part, path, data.from_, facets, "facet"):
        return None
    source, target = facets[data.from_], facets.get(name)
    if source.divides:
        reporter.report(part, path, f"`{source.name}` cannot be copied: {QUOTIENT}", QUOTIENT_HELP)
        return None
    if source.kind in ("words", "packages", "arch") or source.name == "platform":
        reporter.report(part, path, f"`{source.name}` cannot be copied", "facets of one word or number can")
        return None
    if target is not None and not _fits(source, target):
        help_ = "copy a facet of the same kind with the same words"
        reporter.report(part, path, f"`{source.name}` has values that `{name}` cannot have", help_)
        return None
    return From(source.name)


def _fits(source: Facet, target: Facet) -> bool:
    if _required(target) and not _required(source):
        return False
    if source.kind in ("word", "boolean", "derived"):
        if target.kind == "integer":
            return all(type(w) is int and w >= target.least for w in source.words)
        if target.kind == "text":
            return all(type(w) is str for w in source.words)
        return all(any(w == v and type(w) is type(v) for v in target.words) for w in source.words)
    return source.kind == target.kind and source.least >= target.least


def _required(facet: Facet) -> bool:
    return facet.name in CORE and CORE[facet.name].required


def _may_be_set(facet: Facet) -> bool:
    if facet.kind in ("words", "packages", "arch"):
        return False
    return facet.of in ("request", "start") or facet.name == NAMED
