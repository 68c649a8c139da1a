"""The validated pieces that a registry is compiled from, and how a compiler reports what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from attnreg.compile.conditions import Parser
from attnreg.compile.yaml_source import Document, Path_, as_written, shown
from attnreg.errors import Problem, did_you_mean
from attnreg.language.conditions import ALWAYS, Condition
from attnreg.language.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Part:
    """A validated piece of data: the model, the document it stands in, and its path there.

    ``borrowed`` words are another registry's, whose sources are not at hand.
    """

    model: Any
    document: Document
    path: Path_ = ()
    borrowed: bool = False


@dataclass(slots=True)
class Parts:
    """Everything that one registry is made of, in the order in which it was read.

    ``broken`` names the rows and sources that were left out because of their own problems: whoever names them is right.
    """

    vocabulary: list[Part] = field(default_factory=list)
    backends: list[Part] = field(default_factory=list)
    patches: list[Part] = field(default_factory=list)
    orders: list[Part] = field(default_factory=list)
    overlay_orders: list[Part] = field(default_factory=list)
    places: list[Part] = field(default_factory=list)
    choices: list[Part] = field(default_factory=list)
    invariants: list[Part] = field(default_factory=list)
    known: list[Part] = field(default_factory=list)
    sources: list[Part] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)


class Reporter:
    """Looks names up, parses conditions, and collects every problem with its place."""

    def __init__(
        self, vocabulary: Vocabulary, sources: Iterable[str], broken: Iterable[str], problems: list[Problem]
    ) -> None:
        self.vocabulary = vocabulary
        self.sources = frozenset(sources)
        self.broken = frozenset(broken)
        self.problems = problems

    def parser(self, part: Part) -> Parser:
        return Parser(self.vocabulary, part.document, self.problems)

    def condition(self, part: Part, raw: dict[str, Any] | None, *path: str | int) -> Condition:
        """The condition of a backend, or of a derived facet."""
        return ALWAYS if raw is None else self.parser(part).condition(raw, (*part.path, *path))

    def deciding(self, part: Part, raw: dict[str, Any] | None, *path: str | int) -> Condition:
        """The condition of what decides between backends: an order, an entry, a choice, a fallback, an invariant."""
        parser = Parser(self.vocabulary, part.document, self.problems, of_row=False)
        return ALWAYS if raw is None else parser.condition(raw, (*part.path, *path))

    def report(
        self, part: Part, path: Iterable[str | int], message: str, help_: str = "", *, key: bool = False
    ) -> None:
        here = (*part.path, *path)
        where = ".".join(str(p) for p in here if not isinstance(p, int))
        self.problems.append(part.document.problem(here, f"{where}: {message}" if where else message, help_, key=key))

    def name(
        self, part: Part, path: Iterable[str | int], name: Any, known: Iterable[str], noun: str, *, key: bool = False
    ) -> bool:
        """Whether ``name`` is one of those known; reported if it is not, unless it is broken."""
        known = list(known)
        if isinstance(name, str) and name in known:
            return True
        if not isinstance(name, str) or name not in self.broken:
            what = f"unknown {noun} " if isinstance(name, str) else f"expected a {noun}, got "
            self.report(part, path, what + shown(name), did_you_mean(as_written(name), known), key=key)
        return False

    def shadowed(self, part: Part, items: list[Any], path: Path_, noun: str) -> None:
        """Report what can never be reached because an earlier sibling takes all of it."""
        seen: list[dict[str, Any]] = []
        for i, item in enumerate(items):
            when = item.when or {}
            if {} in seen or when in seen:
                first = seen.index({}) if {} in seen else seen.index(when)
                reason = "has no `when`, so it takes everything" if seen[first] == {} else "has the same `when`"
                self.report(
                    part,
                    (*path, i),
                    f"unreachable {noun}: number {first + 1} of the list {reason}",
                    "remove or move one",
                )
            seen.append(when)

    def source(self, part: Part, source: str | None, *path: str | int) -> None:
        if source is None:
            return
        name, _, rest = source.partition(":")
        file, _, symbol = rest.partition("#")
        if not file or not symbol:
            self.report(part, (*path, "source"), f"`{source}` is not <source>:<path>#<symbol>")
        else:
            self.name(part, (*path, "source"), name, self.sources, "source")
