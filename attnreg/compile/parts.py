"""Parts: the validated data of a registry, before compilation. Reporter: checks names and reports problems."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from attnreg.compile.conditions import Parser
from attnreg.compile.schema import tables as schema
from attnreg.compile.schema import values
from attnreg.compile.schema.steps import StepsFile
from attnreg.compile.source.yaml_source import Path_, as_written, shown
from attnreg.compile.validation import UNSTATED, FilePart
from attnreg.errors import Problem, did_you_mean
from attnreg.language.conditions import ALWAYS, Condition
from attnreg.language.engine.architectures import Architectures
from attnreg.language.vocabulary import Vocabulary

# why no condition that an analysis reads may name a quotient or a remainder
QUOTIENT = "it divides one facet by another, and what is true of two unknown sizes could not be proved"
QUOTIENT_HELP = "consequences, layouts and graphs may name it"
# a whole row, or an overlay's change of one
RowData = schema.BackendData | schema.BackendPatch
VocabularyPart = FilePart[schema.VocabularyFile]
OrdersPart = FilePart[dict[str, list[schema.OrderData]]]


@dataclass(slots=True)
class RegistryParts:
    """All parts of one registry, in the order in which they were read.

    ``broken`` has the rows and sources that validation left out; their names still count as known. ``bound`` has for
    each invariant the rows that were read before it; the invariant is about these rows. ``left_out`` has a sentence for
    each plugin that does not take part, for messages about unknown backends. ``architectures`` is the table of the
    classes that the engine serves, if it is recorded.
    """

    vocabulary: list[VocabularyPart] = field(default_factory=list)
    backends: list[FilePart[schema.BackendsFile]] = field(default_factory=list)
    patches: list[FilePart[RowData]] = field(default_factory=list)
    orders: list[OrdersPart] = field(default_factory=list)
    overlay_orders: list[OrdersPart] = field(default_factory=list)
    places: list[FilePart[schema.PlaceData]] = field(default_factory=list)
    choices: list[FilePart[schema.ChoiceData]] = field(default_factory=list)
    invariants: list[FilePart[schema.InvariantData]] = field(default_factory=list)
    bound: list[frozenset[str]] = field(default_factory=list)
    known: list[FilePart[schema.KnownData]] = field(default_factory=list)
    steps: list[FilePart[StepsFile]] = field(default_factory=list)
    sources: list[FilePart[dict[str, values.SourceData]]] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)
    architectures: Architectures | None = None

    def rows(self) -> frozenset[str]:
        """The names of all rows that were read."""
        added = (str(patch.path[-1]) for patch in self.patches if isinstance(patch.model, schema.BackendData))
        return frozenset((*(row for file in self.backends for row in file.model.backends), *added))


class Reporter:
    """Checks names, parses conditions, and collects every problem with its location."""

    def __init__(
        self, vocabulary: Vocabulary, sources: Iterable[str], broken: Iterable[str], problems: list[Problem]
    ) -> None:
        self.vocabulary = vocabulary
        self.sources = frozenset(sources)
        self.broken = frozenset(broken)
        self.problems = problems
        self.left_out: Sequence[str] = ()

    def parser(self, part: FilePart[object]) -> Parser:
        return Parser(self.vocabulary, part.document, self.problems)

    def condition(self, part: FilePart[object], raw: values.Condition | None, *path: str | int) -> Condition:
        """The condition of a row, a waiver or a derived facet; it may differ from backend to backend."""
        return self._without_quotients(self.aside(part, raw, *path))

    def aside(self, part: FilePart[object], raw: values.Condition | None, *path: str | int) -> Condition:
        """The condition of a consequence, which decides no choice. It may name a facet that divides."""
        return ALWAYS if raw is None else self.parser(part).condition(raw, (*part.path, *path))

    def shared_condition(self, part: FilePart[object], raw: values.Condition | None, *path: str | int) -> Condition:
        """The condition of an order, entry, choice, fallback or invariant; it is the same for all backends."""
        parser = Parser(self.vocabulary, part.document, self.problems, of_row=False)
        return ALWAYS if raw is None else self._without_quotients(parser.condition(raw, (*part.path, *path)))

    def _without_quotients(self, condition: Condition) -> Condition:
        for clause in condition.walk():
            if self.vocabulary.facets[clause.facet].divides:
                message = f"`{clause.facet}` cannot be used here: {QUOTIENT}"
                self.problems.append(Problem(clause.where, message, QUOTIENT_HELP))
        return condition

    def report(
        self, part: FilePart[object], path: Iterable[str | int], message: str, help_: str = "", *, key: bool = False
    ) -> None:
        here = (*part.path, *path)
        where = ".".join(str(p) for p in here if not isinstance(p, int))
        self.problems.append(part.document.problem(here, f"{where}: {message}" if where else message, help_, key=key))

    def name(
        self,
        part: FilePart[object],
        path: Iterable[str | int],
        name: object,
        known: Iterable[str],
        noun: str,
        *,
        key: bool = False,
    ) -> bool:
        """Whether ``name`` is known. Reports an unknown ``noun``, unless the name is among the broken rows."""
        known = list(known)
        if isinstance(name, str) and name in known:
            return True
        if noun == "facet" and isinstance(name, str):
            self.report(part, path, *self.vocabulary.missing(name), key=key)
        elif not isinstance(name, str) or name not in self.broken:
            what = f"unknown {noun} " if isinstance(name, str) else f"expected a {noun}, got "
            missing = self.left_out if noun == "backend" else ()
            help_ = "; ".join([did_you_mean(as_written(name), known), *missing])
            self.report(part, path, what + shown(name), help_, key=key)
        return False

    def apart(
        self, part: FilePart[object], path: Path_, seen: set[tuple[str, ...]], names: tuple[str, ...], what: str
    ) -> None:
        """Report a failure or a refusal whose names are among those seen, and add them. what: it, in words."""
        if names in seen:
            id_ = f"the `id` {names[-1]}" if names[-1] else "no `id`"
            self.report(part, path, f"{what} before has {id_} too", "give each an `id` of its own, such as `dcp-sinks`")
        seen.add(names)

    def once(self, part: FilePart[object], path: Path_, items: object, added: object = ()) -> None:
        """Report each item that a list has twice, or that the same file has under `add` too (``added``)."""
        seen: set[str] = set()
        others = {*map(repr, added if isinstance(added, list | tuple) else [added])}
        for i, item in enumerate(items if isinstance(items, list) else [items]):
            here = (*path, i) if isinstance(items, list) else path
            if repr(item) in others:
                self.report(part, here, f"{shown(item)} is under `add` too", "keep one of the two")
            elif repr(item) in seen:
                self.report(part, here, f"{shown(item)} is listed twice", "remove one of the two")
            seen.add(repr(item))

    def check_reachable(
        self, part: FilePart[object], conditions: Iterable[values.Condition | None], path: Path_, noun: str
    ) -> None:
        """Report each unreachable item of a list: an earlier item has the same `when`, or none."""
        seen: list[values.Condition] = []
        for i, condition in enumerate(conditions):
            when = condition or {}
            if {} in seen or when in seen:
                first = seen.index({}) if {} in seen else seen.index(when)
                reason = "has no `when`, so it takes everything" if seen[first] == {} else "has the same `when`"
                message = f"unreachable {noun}: number {first + 1} of the list {reason}"
                self.report(part, (*path, i), message, "remove or move one")
            seen.append(when)

    def source(self, part: FilePart[object], source: str | None, *path: str | int) -> None:
        if source is None or source == UNSTATED:
            return
        name, _, rest = source.partition(":")
        file, _, symbol = rest.partition("#")
        if not file or not symbol:
            self.report(part, (*path, "source"), f"`{source}` is not <source>:<path>#<symbol>")
        else:
            self.name(part, (*path, "source"), name, self.sources, "source")
