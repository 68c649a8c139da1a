"""The facts of a run that its log states: release, model, GPU, ranks, dtypes and options, each with its line.

One log may hold several runs: an engine that starts again, or engines that write into one stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from attnreg.compile.inputs.bundled import bundled_registries, nearest_release, release_name
from attnreg.engines.logs.reading.known import KnownEngine, KnownLine, KnownLogs, gpu_name
from attnreg.engines.logs.reading.templates import Match
from attnreg.engines.logs.reading.values import member, values

# what a service's name may be that stands before each of its lines: of compose, of kubectl --prefix
_SERVICE = re.compile(r"\s{0,4}(\[pod/[\w./-]{1,120}\]|[\w.-]{1,80}\s{1,20}\|)")
_PLAIN_NAME = re.compile(r"[\w.-]{1,100}(?:/[\w.-]{1,100})?")
_CACHED = re.compile(r"models--([\w.-]{1,100}?)(?:--([\w.-]{1,100}))?(?:/|$)")
_RELEASE = re.compile(r"(\d{1,6}\.\d{1,6}\.\d{1,6}(?:\.post\d{1,6})?)(?:\+(?!g[0-9a-f]{6,})[\w.]{1,60})?")
# the facts that make up the sentence about a run, each with its words
_WORDS = {"ranks": "TP {}", "dtype": "{}", "kv_dtype": "KV cache {}", "gpu": "{}"}
# options of a run, in the order in which they are printed
OPTIONS = {
    "backend": "attention_backend",
    "prefill_backend": "prefill_attention_backend",
    "decode_backend": "decode_attention_backend",
    "vision_backend": "vision backend",
    "block_size": "block size",
    "dcp_ranks": "decode context parallelism",
    "quantization": "quantization",
    "context": "context length",
}


class Fact(NamedTuple):
    """A value that a log states, and the number of its line."""

    value: str
    line: int


class ReleaseTaken(NamedTuple):
    """The release whose table explains a run: its registry, whether it is the run's own, and why it was taken."""

    registry: str
    own: bool
    because: str


@dataclass
class LoggedRun:
    """What a log states of one run of an engine. ``number`` counts the runs of a log; ``first`` is its first line."""

    engine: KnownEngine
    number: int
    first: int
    facts: dict[str, Fact] = field(default_factory=dict)
    # the names of the backends that its lines have named so far
    backends: dict[str, None] = field(default_factory=dict)
    # of a library, the versions that lines of the run name, each with its first line
    versions: dict[str, dict[str, int]] = field(default_factory=dict)
    # the release whose words a line of the run has, and the line
    words_of: Fact | None = None

    def value(self, name: str) -> str | None:
        """The value of a fact; None where the log states none."""
        return self.facts[name].value if name in self.facts else None

    @property
    def title(self) -> str:
        """The run in a line, each fact with the number of the line that states it."""
        words = {"release": f"{self.engine.title} {{}}", "model": self.model_words, **_WORDS}
        words |= {name: f"{title} {{}}" for name, title in OPTIONS.items()} | {"draft": "draft {}"}
        parts = [] if "release" in self.facts else [self.engine.title]
        stated = [name for name in words if name in self.facts]
        for line, names in groupby(stated, key=lambda name: self.facts[name].line):
            said = ", ".join(words[name].format(self.facts[name].value) for name in names)
            parts.append(f"{said} (line {line:,})")
        return " · ".join(parts)

    @property
    def model_words(self) -> str:
        """The name of the model, for a message: of a path in the hub's cache the id, of any other the last part."""
        return (self.model_ids or ["a model whose name is not printed"])[0].replace("{", "").replace("}", "")

    @property
    def model_ids(self) -> list[str]:
        """The names under which the model may be known: its id, then its last part."""
        return model_ids(self.value("model") or "")

    def taken(self, asked: str | None = None) -> ReleaseTaken:
        """The release that explains the run. asked: the registry that the user names."""
        title, stated = self.engine.title, self.facts.get("release")
        if asked is not None:
            beside = f"; line {stated.line:,} names {title} {stated.value}" if stated is not None else ""
            return ReleaseTaken(asked, True, f"which --engine names{beside}")
        if stated is None and self.words_of is not None:
            because = f"since line {self.words_of.line:,} has its words, and no line names the release of {title}"
            return ReleaseTaken(self.words_of.value, True, because)
        if stated is None:
            newest = release_name(f"{self.engine.name}-0")
            return ReleaseTaken(
                newest, True, f"which is assumed, the newest here: no line names the release of {title}"
            )
        exact = _RELEASE.fullmatch(stated.value)
        name = release_name(f"{self.engine.name}-{exact[1]}") if exact else ""
        if name in bundled_registries():
            own = exact is not None and name.endswith(f"-{exact[1]}")
            what = "which" if own else f"which answers for {title} {stated.value}, the release that"
            return ReleaseTaken(name, True, f"{what} line {stated.line:,} names")
        near = nearest_release(self.engine.name, stated.value)
        names = f"line {stated.line:,} names {title} {stated.value}, and attnreg has no table of it"
        because = f"the nearest, which may differ: {names}"
        return ReleaseTaken(near, False, because)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values: each fact with its line."""
        facts = {name: {"value": fact.value, "line": fact.line} for name, fact in self.facts.items()}
        if "model" in facts:
            facts["model"]["value"] = self.model_words
        return {"engine": self.engine.name, "facts": facts}


class Runs:
    """The runs of one log, as its lines come."""

    def __init__(self, known: KnownLogs) -> None:
        self.known = known
        self.all: list[LoggedRun] = []
        self._current: dict[tuple[str, str], LoggedRun] = {}
        self._gpu: Fact | None = None

    def take_fact(self, number: int, text: str, line: KnownLine, match: Match) -> None:
        """Take the facts of a line that has some."""
        if line.says == "fact":
            self._take(number, text, line, match)
        elif self._gpu is None:
            self._gpu = Fact(gpu_name(match), number)
            for run in self._current.values():
                run.facts.setdefault("gpu", self._gpu)

    def of(self, engine: str, number: int, text: str) -> LoggedRun:
        """The run that a line of an engine belongs to: the last one that the same service began before it."""
        place = service(text), engine
        if place not in self._current:
            # a line without a service belongs to the only run that there is
            others = [run for (_, name), run in self._current.items() if name == engine]
            if len(others) == 1 and not place[0]:
                return others[0]
            self._begin(place, number)
        return self._current[place]

    def _begin(self, place: tuple[str, str], number: int) -> LoggedRun:
        run = LoggedRun(self.known.engines[place[1]], len(self.all) + 1, number)
        self.all.append(run)
        self._current[place] = run
        if self._gpu is not None:
            run.facts["gpu"] = self._gpu
        return run

    def _take(self, number: int, text: str, line: KnownLine, match: Match) -> None:
        stated = dict(_stated(line, self.known.engines[line.engine], match, text))
        if not stated:
            return
        place = service(text), line.engine
        run = self._current.get(place)
        if run is None or _differs(run, stated):
            before, run = run, self._begin(place, number)
            # a configuration without a release follows the banner that has it
            if before is not None and "release" not in stated and "release" in before.facts:
                run.facts["release"] = before.facts["release"]
        for name, value in stated.items():
            # a banner has the served name of a model, a configuration its id
            if name not in run.facts:
                run.facts[name] = Fact(value, number)


def _differs(run: LoggedRun, stated: dict[str, str]) -> bool:
    """Whether facts belong to another run: another release or model, or a banner after the backends were chosen."""
    if run.value("release") not in (None, stated.get("release", run.value("release"))):
        return True
    models = [model_ids(text)[-1:] for text in (run.value("model"), stated.get("model")) if text]
    return (len(models) == 2 and models[0] != models[1]) or (bool(run.backends) and [*stated] == ["release"])


def _stated(line: KnownLine, engine: KnownEngine, match: Match, text: str) -> Iterator[tuple[str, str]]:
    if "release" in match.fields:
        yield "release", match.fields["release"]
    if "word" in match.fields:
        yield "model", match.fields["word"]
    if any(name.startswith("text") for name in match.fields):
        rest = text[match.start :]
        for key, value in values(rest, engine.settings).items():
            name = engine.settings[key]
            if name == "draft":
                inner = values(rest[rest.find(key) : rest.find(key) + 600], ("method", "model"))
                words = [*filter(None, (inner.get("method"), *model_ids(inner.get("model", ""))[:1]))]
                value = " ".join(words) if value.startswith(("SpeculativeConfig", "{")) else value
            if name == "model" or _PLAIN_NAME.fullmatch(value) or (name == "draft" and value):
                yield name, value if name == "model" else member(value)


def service(text: str) -> str:
    """The service that wrote a line of a joined log; "" for a line of one alone."""
    found = _SERVICE.match(text)
    return found[1].rstrip(" |") if found else ""


def model_ids(text: str) -> list[str]:
    """The names under which a model may be known: its id, then the last part of that; [] for a text of another form."""
    cached = _CACHED.search(text)
    if cached is not None:
        name = "/".join(filter(None, cached.groups()))
    else:
        name = text.rstrip("/") if _PLAIN_NAME.fullmatch(text.rstrip("/")) else text.rstrip("/").rpartition("/")[2]
    if not _PLAIN_NAME.fullmatch(name) or "@" in text or "://" in text:
        return []
    return list(dict.fromkeys((name, name.rpartition("/")[2])))
