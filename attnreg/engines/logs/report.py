"""Reads a whole log and explains each of its lines about attention once, by the release of the run that logged it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from attnreg.engines.logs import explanations
from attnreg.engines.logs.layers import Expected, LayersExplained, explain_layers
from attnreg.engines.logs.reading.known import KnownLine, KnownLogs, known_logs
from attnreg.engines.logs.reading.lines import ReadLine
from attnreg.engines.logs.reading.templates import Match
from attnreg.engines.logs.refusals import quoted
from attnreg.engines.logs.runs import Fact, LoggedRun, ReleaseTaken, Runs
from attnreg.engines.logs.tables import TableView
from attnreg.errors import RegistryError, RequestError

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Registry

# the most different lines of a log that are explained
MOST_LINES = 400
# the most lines that are remembered to say nothing
_MOST_REMEMBERED = 2000
_ERROR = re.compile(r"\b([A-Z][A-Za-z0-9_]{0,60}(?:Error|Exception))\b(?=: )")
_RANK = re.compile(r"(?:TP|DP|PP|EP|Worker_|Worker|Rank|rank)[ _=]?(\d{1,5})|pid=(\d{1,8})")


class Surroundings(Protocol):
    """What the reader of logs asks of the command: registries, the user's GPU, and the configs of models."""

    def load(self, registry: str) -> Registry:
        """The registry of a name."""

    def platform(self, registry: Registry, name: str | None) -> Platform | None:
        """The platform that the user names, else the one of a product; None where neither is known."""

    def config(self, names: list[str]) -> tuple[str, str] | None:
        """The path of the config that the user names, else of a model with one of some names, and a note on it."""


@dataclass
class ExplainedLine:
    """One line of a log, explained: where it stands first, what it says, and why.

    ``says`` holds whatever the release is; ``table`` are sentences by the registry of ``taken``. ``reason`` says why a
    line is not explained. ``ranks`` are the ranks and processes that logged it, ``count`` is how often it was logged.
    """

    line: int
    text: str
    run: LoggedRun | None
    taken: ReleaseTaken | None = None
    title: str = ""
    says: list[str] = field(default_factory=list)
    table: list[str] = field(default_factory=list)
    layers: LayersExplained = field(default_factory=lambda: LayersExplained(None))
    reason: str = ""
    count: int = 0
    ranks: set[str] = field(default_factory=set)

    @property
    def times(self) -> str:
        """How often the line was logged: ``8 ranks``, ``3 times``; "" for once."""
        if len(self.ranks) > 1:
            again = f", {self.count:,} times" if self.count > len(self.ranks) else ""
            return f"{len(self.ranks):,} ranks{again}"
        return f"{self.count:,} times" if self.count > 1 else ""

    @property
    def repeated(self) -> str:
        """How often the line was logged, in a sentence: ``by 8 ranks``."""
        return f"by {self.times}" if len(self.ranks) > 1 else self.times

    @property
    def by(self) -> str:
        """The release whose table explains the line, and why that one; "" for a line that no table explains."""
        return f"{self.title}, {self.taken.because}" if self.taken is not None and self.title else ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        explanation = self.layers.explanation
        return {
            "line": self.line,
            "text": self.text,
            "count": self.count,
            "ranks": len(self.ranks),
            "run": self.run.number if self.run is not None else None,
            "registry": self.taken.registry if self.taken is not None else None,
            "own_release": self.taken.own if self.taken is not None else None,
            "by": self.by,
            "says": self.says,
            "table": self.table,
            "notes": list(self.layers.notes),
            "explanation": explanation.to_dict() if explanation is not None else None,
            "understood": not self.reason,
            "reason": self.reason,
        }


class _Seen(NamedTuple):
    """A line that has been read and is not explained yet."""

    entry: ExplainedLine
    known: KnownLine | None
    match: Match | None


class LogReport:
    """The explanations of one log, line by line. registry: the release that the user names, for all runs."""

    def __init__(self, around: Surroundings, registry: str | None = None, known: KnownLogs | None = None) -> None:
        self.known = known or known_logs()
        self.runs = Runs(self.known)
        self.around, self.registry = around, registry
        self.entries: list[ExplainedLine] = []
        self.passed_over = 0
        self._seen: dict[tuple[Any, ...], _Seen] = {}
        self._waiting: list[_Seen] = []
        self._nothing: set[str] = set()

    def read(self, line: ReadLine, *, now: bool = False) -> ExplainedLine | None:
        """Take a line. now: return its explanation, if it is a new one about attention; else `explain_all` does."""
        if line.text in self._nothing:
            return None
        found: tuple[KnownLine, Match] | None = None
        stated: set[str] = set()
        for known, match in self.known.matches(line.text):
            if known.says in ("fact", "gpu"):
                # of each engine the first line that fits counts
                if known.engine not in stated:
                    stated.add(known.engine)
                    self.runs.take_fact(line.number, line.text, known, match)
            elif self._may_be(known):
                found = known, match
                break
        seen = self._line(line, *found) if found is not None else None if stated else self._error(line)
        if seen is None:
            if not stated and found is None:
                self._forget(line.text)
            return None
        entry = seen.entry
        entry.count += 1
        rank = _RANK.search(line.text[: found[1].start if found is not None else 200])
        if rank is not None:
            entry.ranks.add(rank[0])
        if entry.count > 1:
            return None
        if now:
            self._explain(seen)
            return entry
        self._waiting.append(seen)
        return None

    def _may_be(self, known: KnownLine) -> bool:
        """Whether a known line may be one of this log: the refusals of an engine that does not log here are not."""
        engines = {run.engine.name for run in self.runs.all if run.facts}
        return known.says != "refusal" or not engines or known.engine in engines

    def _forget(self, text: str) -> None:
        """Remember a line that says nothing, so that an equal one is not looked at again."""
        if len(self._nothing) >= _MOST_REMEMBERED:
            self._nothing.clear()
        self._nothing.add(text)

    def explain_all(self) -> Iterator[ExplainedLine]:
        """The lines that were read and not explained yet, explained with all that the log states of their runs."""
        for seen in self._waiting:
            self._explain(seen)
            yield seen.entry
        self._waiting.clear()

    @property
    def unexplained(self) -> int:
        """The number of different lines that are not explained."""
        return sum(bool(entry.reason) for entry in self.entries) + bool(self.passed_over)

    def _line(self, line: ReadLine, known: KnownLine, match: Match) -> _Seen | None:
        run = self.runs.of(known.engine, line.number, line.text)
        name = explanations.backend_of(known, match)
        if name is not None:
            run.backends[name] = None
        if known.says == "runs-version" and known.row is not None:
            run.versions.setdefault(known.row, {}).setdefault(match.fields["number"], line.number)
        if known.of is not None and run.words_of is None:
            run.words_of = Fact(known.of, line.number)
        text = explanations.shown_line(known, match)
        key = (run.engine.name, tuple((n, f.value) for n, f in run.facts.items() if n != "gpu"), text)
        return self._remember(key, ExplainedLine(line.number, text, run), known, match)

    def _error(self, line: ReadLine) -> _Seen | None:
        """An error about attention that no known line fits; None for any other line."""
        found = _ERROR.search(line.text)
        if found is None:
            return None
        message = line.text[found.end() :].casefold()
        words = [word for word in self.known.errors if word in message]
        if not words:
            return None
        text = f"{found[1]} (about {', '.join(words)})"
        run = self.runs.all[-1] if self.runs.all else None
        entry = ExplainedLine(line.number, text, run)
        seen = self._remember((text,), entry, None, None)
        if seen is not None and seen.entry is entry:
            entry.says = [line.text[found.start() :]]
        return seen

    def _remember(
        self, key: tuple[Any, ...], entry: ExplainedLine, known: KnownLine | None, match: Match | None
    ) -> _Seen | None:
        if key not in self._seen:
            if len(self._seen) >= MOST_LINES:
                self.passed_over += 1
                return None
            self._seen[key] = _Seen(entry, known, match)
            self.entries.append(entry)
        return self._seen[key]

    def _explain(self, seen: _Seen) -> None:
        entry, known, match = seen
        if known is None or match is None:
            self._explain_error(entry)
            return
        assert entry.run is not None
        entry.says = list(explanations.stated(known, match, entry.run))
        try:
            table, platforms, note = self._table(entry, known)
            entry.table = [*note, *explanations.by_table(known, match, entry.run, table)]
            expected = explanations.expected(known, match, table)
            if expected is not None:
                entry.layers = self._layers(entry, expected, table, platforms)
                if entry.layers.explanation is not None and known.says in ("order", "tower", "prompts"):
                    # the explanation of the layers has their order
                    entry.table = note
                elif entry.layers.explanation is not None and known.says == "default":
                    entry.table = [*note, *explanations.default_of(expected.backend, table, entry.layers.explanation)]
        except RequestError as e:
            if entry.taken is not None and not entry.taken.own:
                entry.table = [f"{e.message}"]
            else:
                entry.reason = str(e)

    def _explain_error(self, entry: ExplainedLine) -> None:
        """Explain an error by the sentences that a registry has for refusals; it is not understood without one."""
        message, entry.says = entry.says[0], []
        if entry.run is not None:
            try:
                table, _, _ = self._table(entry, None)
                entry.table = [refusal.text for refusal in quoted(message, table)]
            except RegistryError:
                raise
            except RequestError:
                entry.table = []
        if not entry.table:
            entry.title = ""
            entry.reason = "it is not one that attnreg knows"

    def _table(self, entry: ExplainedLine, known: KnownLine | None) -> tuple[TableView, list[Platform], list[str]]:
        run = entry.run
        assert run is not None
        entry.taken = run.taken(self.registry)
        registry = self.around.load(entry.taken.registry)
        entry.title = registry.title.partition("@")[0]
        if registry.base.partition("-")[0] not in (run.engine.name, registry.base):
            entry.title = ""
            message = f"{registry.name} is no release of {run.engine.name}, which logged the line"
            raise RequestError(message, "name one with --engine")
        gpu = run.value("gpu")
        platform = self.around.platform(registry, gpu)
        only = known.platform if known is not None else None
        note = []
        if platform is not None and only not in (None, platform.platform):
            note = [f"the line is of {only}, and {platform.arch} is not: the GPU of the run is another"]
            platform = None
        elif platform is None and gpu is not None:
            note = [f"line {run.facts['gpu'].line:,} names a GPU that {entry.title} does not know"]
        if platform is not None:
            return TableView(registry, platform.arch, platform.platform), [platform], note
        return TableView(registry, None, only), _possible(registry, only, run.value("device")), note

    def _layers(
        self, entry: ExplainedLine, expected: Expected, table: TableView, platforms: list[Platform]
    ) -> LayersExplained:
        run = entry.run
        assert run is not None
        found = self.around.config(run.model_ids)
        if found is None:
            if "model" not in run.facts:
                return LayersExplained(
                    None, ("no line names the model: with --model the reasons of its layers are printed",)
                )
            words = f"the config of {run.model_words} is not here: with --model the reasons of its layers are printed"
            return LayersExplained(None, (words,))
        config, note = found
        explained = explain_layers(expected, run, config, table.registry, platforms, table.arch is not None)
        return explained._replace(notes=(*explained.notes, *([note] if note else [])))


def _possible(registry: Registry, platform: str | None, device: str | None) -> list[Platform]:
    """The platforms that a run may have had: of one kind, or those for which the registry has orders."""
    from attnreg.platforms import Platform

    kinds = {"cuda": ("cuda", "rocm"), "cpu": ("cpu",), "xpu": ("xpu",)}.get((device or "").partition(":")[0])
    names = [platform] if platform else [*(kinds or registry.orders or ("cuda", "rocm"))]
    return [
        Platform(platform=name, arch=arch.name) for name in names for arch in registry.vocabulary.architectures_of(name)
    ]
