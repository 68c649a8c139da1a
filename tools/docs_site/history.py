"""What changed about a backend: the changelog's entries that name it, and its claims between versions of an engine."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from docs_markdown import plain

from attnreg.registry import Backend, Registry, Variant
from docs_site.frame import Site

_ENGINE = re.compile(r"([a-z]+)-(\d+(?:\.\d+)*)")


class Change(NamedTuple):
    """Where a change is told of, and the change as Markdown."""

    when: str
    text: str


def versions(site: Site) -> dict[str, list[str]]:
    """Engine -> its registries, the oldest first."""
    found: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for name in site.registries:
        if match := _ENGINE.fullmatch(name):
            found.setdefault(match[1], []).append((tuple(map(int, match[2].split("."))), name))
    return {engine: [name for _, name in sorted(some)] for engine, some in found.items()}


def steps(site: Site) -> list[tuple[str, str]]:
    """The pairs of registries of one engine of which the second follows the first."""
    return [pair for names in versions(site).values() for pair in itertools.pairwise(names)]


def row_history(site: Site, name: str, row: str) -> list[Change]:
    """The history of one row: of attnreg's own by the changelog, of an engine's by its versions."""
    if name == "default":
        return [Change(part, text) for part, text in _changelog(site.root) if _names(text, row)]
    out: list[Change] = []
    for before, after in steps(site):
        if name in (before, after):
            texts = changes(site.registries[before], site.registries[after], row)
            out += [Change(f"{before} → {after}", text) for text in texts]
    return out


def _names(text: str, row: str) -> bool:
    return re.search(rf"(?<![A-Z0-9_]){re.escape(row)}(?![A-Z0-9_])", text) is not None


@cache
def _changelog(root: Path) -> list[tuple[str, str]]:
    """(version and part, entry) of every entry of the changelog."""
    out: list[tuple[str, str]] = []
    version = part = ""
    for line in (root / "CHANGELOG.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            version = line[3:]
        elif line.startswith("### "):
            part = line[4:]
        elif line.startswith("- "):
            out.append((f"{version}, {part.lower()}", line[2:]))
        elif line.startswith("  ") and out:
            out[-1] = (out[-1][0], f"{out[-1][1]} {line.strip()}")
    return out


def changes(old: Registry, new: Registry, name: str) -> list[str]:
    """What two registries say otherwise of a row, a sentence each, as Markdown."""
    before, after = old.backends.get(name), new.backends.get(name)
    if before is None or after is None:
        return [] if before is after else [f"{'gone' if after is None else 'new'} in `{new.name}`"]
    return list(dict.fromkeys(_row_changes(before, after)))


def _row_changes(before: Backend, after: Backend) -> Iterator[str]:
    for what in ("status", "platforms", "attention", "phases"):
        a, b = getattr(before, what), getattr(after, what)
        if a != b:
            yield f"{what}: {_shown(a)} → {_shown(b)}"
    old, new = ({v.name or "": v for v in row.variants} for row in (before, after))
    if len(old) == len(new) == 1:
        yield from _variant_changes("", next(iter(old.values())), next(iter(new.values())))
        return
    for name in old.keys() | new.keys():
        if name in old and name in new:
            yield from _variant_changes(name, old[name], new[name])
    for text, names in (("gone", old.keys() - new.keys()), ("new", new.keys() - old.keys())):
        if names:
            yield f"variants {text}: {', '.join(sorted(filter(None, names))) or 'the only one'}"


def _variant_changes(name: str, before: Variant, after: Variant) -> Iterator[str]:
    head = f"{name}: " if name else ""
    for what in ("when", "requires"):
        a, b = (getattr(v, what).describe() for v in (before, after))
        if a != b:
            yield f"{head}{what} `{a}` → `{b}`"
    old, new = ({c.key: c.matcher.text for c in v.claims} for v in (before, after))
    for key in dict.fromkeys((*old, *new)):
        a, b = old.get(key, "any"), new.get(key, "any")
        if a != b:
            yield f"{head}{key}: {plain(a)} → {plain(b)}"
    for text, names in (
        ("serves now", after.served - before.served),
        ("serves no longer", before.served - after.served),
    ):
        if names:
            yield f"{head}{text} {', '.join(sorted(names))}"
    rules = [{f"{r.reject} (`{r.when.describe()}`)" for r in v.rules} for v in (before, after)]
    for text, sentences in (("refuses now", rules[1] - rules[0]), ("refuses no longer", rules[0] - rules[1])):
        for sentence in sorted(sentences):
            yield f"{head}{text}: {plain(sentence)}"


def _shown(value: object) -> str:
    if isinstance(value, frozenset):
        return ", ".join(sorted(value))
    return "every" if value is None else str(value)
