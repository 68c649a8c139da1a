"""The lines that engines are known to log, and their words for refusals: registry/logs.yaml."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from attnreg.compile.inputs.bundled import registry_root
from attnreg.compile.source.yaml_source import Document
from attnreg.engines.logs.reading.templates import Match, Template
from attnreg.errors import Problem, RegistryError, did_you_mean

# what a line says, which decides how it is explained
SAYS = (
    *("order", "named", "old", "stored", "precluded", "refused", "none", "unknown-name"),
    *("version", "runs-version", "tower", "prompts", "graphs", "blocks", "memory", "step", "note"),
    *("default", "written", "pages", "phases"),
)
_KEYS = {"text", "says", "source", "platform", "named", "row", "rows", "like", "means", "steps", "options"} | {
    *("about", "words", "refused", "refuses", "of")
}


@dataclass(frozen=True, eq=False)
class KnownLine:
    """A line that an engine logs: its template, what it says (one of `SAYS`), and the data that explain it.

    - ``platform``: the platform on which alone the line is logged. ``named``: the backend, if the line names none.
    - ``rows``: the names under which a registry may have the line's backend; ``like`` has further ones.
    - ``means``: a sentence with the template's fields. ``options``: those that change what the line says.
    - ``steps``: the steps of a registry that log it. ``about``: a word in the condition of the step that logs it.
    - ``of``: the bundled release that has these words, for a log that names no release.
    - ``refuses``: of a refusal, the beginnings of the sentences that registries have for it.
    """

    engine: str
    template: Template
    says: str
    source: str
    platform: str | None = None
    named: str | None = None
    row: str | None = None
    rows: tuple[str, ...] = ()
    like: Mapping[str, str] = field(default_factory=dict)
    means: str = ""
    steps: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    about: str | None = None
    words: str | None = None
    refused: bool = False
    refuses: tuple[str, ...] = ()
    of: str | None = None


@dataclass(frozen=True)
class KnownEngine:
    """What is known of an engine's logs; ``settings`` maps keys of its logged configuration to the facts of a run."""

    name: str
    title: str
    settings: Mapping[str, str]
    facts: tuple[KnownLine, ...]
    lines: tuple[KnownLine, ...]
    refusals: tuple[KnownLine, ...]
    reasons: Mapping[str, str]
    unlogged: tuple[str, ...]


@dataclass(frozen=True)
class KnownLogs:
    """What is known of all engines' logs. ``words``: a line without any is not read. ``errors``: words of attention."""

    engines: Mapping[str, KnownEngine]
    words: tuple[str, ...]
    errors: tuple[str, ...]
    messages: tuple[str, ...]
    gpus: tuple[KnownLine, ...]

    @functools.cached_property
    def _by_word(self) -> dict[str, list[tuple[int, KnownLine]]]:
        """Word -> the known lines that have it, each with its place among all: facts, GPUs, lines, refusals.

        A line is filed under the longest word that one of its literals has.
        """
        engines = list(self.engines.values())
        kinds = [[e.facts for e in engines], [self.gpus], [e.lines for e in engines], [e.refusals for e in engines]]
        filed: dict[str, list[tuple[int, KnownLine]]] = {}
        for place, line in enumerate(line for kind in kinds for part in kind for line in part):
            words = [word for word in self.words if any(word in literal for literal in line.template.literals)]
            filed.setdefault(max(words, key=len, default=line.template.anchor), []).append((place, line))
        return filed

    def matches(self, text: str) -> Iterator[tuple[KnownLine, Match]]:
        """The known lines that a text holds, and how: facts of the run first, refusals last."""
        filed: list[tuple[int, KnownLine]] = []
        for word, lines in self._by_word.items():
            if word in text:
                filed += lines
        for _, line in sorted(filed, key=itemgetter(0)):
            found = line.template.match(text)
            if found is not None:
                yield line, found


def gpu_name(match: Match) -> str:
    """The name of a GPU in a line that has one: ``NVIDIA H100 80GB HBM3``."""
    name = next(iter(match.fields.values()))
    return name.partition(".json")[0].partition(",")[0].replace("_", " ").strip()


@functools.cache
def known_logs() -> KnownLogs:
    """The data of registry/logs.yaml. Raises `RegistryError` with every problem, each with its place."""
    return read_known(Document.load(registry_root() / "logs.yaml", "registry/logs.yaml"))


def read_known(document: Document) -> KnownLogs:
    """What a document knows of logs. Raises `RegistryError` with every problem, each with its place."""
    problems: list[Problem] = []
    data: Mapping[str, Any] = document.data
    engines = {name: part for name, part in data.items() if isinstance(part, dict)}

    def lines(path: tuple[str, ...], items: Any, engine: str = "", says: str = "") -> tuple[KnownLine, ...]:
        return tuple(
            found
            for number, item in enumerate(items)
            if (found := _line(document, (*path, number), item, engine, says, problems)) is not None
        )

    known = KnownLogs(
        engines={
            name: KnownEngine(
                name=name,
                title=part["title"],
                settings=part["settings"],
                facts=lines((name, "facts"), part["facts"], name, "fact"),
                lines=lines((name, "lines"), part["lines"], name),
                refusals=lines((name, "refusals"), part["refusals"], name, "refusal"),
                reasons=part["reasons"],
                unlogged=tuple(part["unlogged"]),
            )
            for name, part in engines.items()
        },
        words=tuple(data["words"]),
        errors=tuple(data["errors"]),
        messages=tuple(data["messages"]),
        gpus=lines(("gpus",), data["gpus"], "", "gpu"),
    )
    if problems:
        raise RegistryError(problems)
    return known


def _line(
    document: Document, path: tuple[str | int, ...], item: Mapping[str, Any], engine: str, says: str, out: list[Problem]
) -> KnownLine | None:
    for key in item:
        if key not in _KEYS:
            out.append(document.problem((*path, key), f"unknown key `{key}`", did_you_mean(key, _KEYS), key=True))
            return None
    kind = says or item.get("says", "")
    if not says and kind not in SAYS:
        out.append(document.problem((*path, "says"), f"{kind!r} is no kind of line", did_you_mean(kind, SAYS)))
        return None
    try:
        template = Template(item["text"])
    except (KeyError, ValueError) as e:
        out.append(document.problem(path, f"text: {e}"))
        return None
    rest: dict[str, Any] = {key: value for key, value in item.items() if key not in ("text", "says", "source")}
    for key in ("rows", "steps", "options", "refuses"):
        rest[key] = tuple(rest.get(key, ()))
    return KnownLine(engine=engine, template=template, says=kind, source=item.get("source", ""), **rest)
