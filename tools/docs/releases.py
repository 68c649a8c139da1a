"""Releases of an engine: their order, and the page that lists how their registries differ."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from attnreg.registry import Backend, Registry, Variant
from docs.changes import moved_blocks
from docs.markdown import plain
from docs.registries import bundled

_ENGINE = re.compile(r"([a-z]+)-(\d+(?:\.\d+)*)")


def versions(names: Iterable[str]) -> dict[str, list[str]]:
    """Engine -> its registries among the given ones, the oldest first."""
    found: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for name in names:
        if match := _ENGINE.fullmatch(name):
            found.setdefault(match[1], []).append((tuple(map(int, match[2].split("."))), name))
    return {engine: [name for _, name in sorted(some)] for engine, some in found.items()}


def steps(names: Iterable[str]) -> list[tuple[str, str]]:
    """The pairs of successive registries of one engine, each with the older one first."""
    return [pair for some in versions(names).values() for pair in itertools.pairwise(some)]


def releases_block(registries: Iterable[str]) -> str:
    """The differences of each of these releases of an engine from the one before it, the latest first, as Markdown."""
    parts = []
    for before, after in reversed(steps(registries)):
        old, new = bundled(before), bundled(after)
        moved = moved_blocks(before, after)
        lines = [f"## {before} to {after}", "", moved["models"], "", moved["why"], "", "Rows that differ:", ""]
        rows = [(name, changes(old, new, name)) for name in sorted({*old.backends, *new.backends})]
        lines += [f"- {name}: {'; '.join(some)}" for name, some in rows if some] or ["- none"]
        parts.append(re.sub(r"\n{3,}", "\n\n", "\n".join(lines)))
    return "\n\n".join(parts)


def changes(old: Registry, new: Registry, name: str) -> list[str]:
    """The differences of a row between two registries, each a sentence in Markdown."""
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
        yield from _variant_changes(next(iter(old.values())), next(iter(new.values())))
        return
    of: dict[str, list[str]] = {}
    for name in (name for name in new if name in old):
        for text in _variant_changes(old[name], new[name]):
            of.setdefault(text, []).append(name)
    yield from (f"{', '.join(names)}: {text}" for text, names in of.items())
    for text, names in (("gone", old.keys() - new.keys()), ("new", new.keys() - old.keys())):
        if names:
            yield f"variants {text}: {', '.join(sorted(filter(None, names))) or 'the only one'}"


def _variant_changes(before: Variant, after: Variant) -> Iterator[str]:
    for what in ("when", "requires"):
        a, b = (getattr(v, what).describe() for v in (before, after))
        if a != b:
            yield f"{what} `{a}` → `{b}`"
    old, new = ({c.key: c.matcher.text for c in v.claims} for v in (before, after))
    for key in dict.fromkeys((*old, *new)):
        a, b = old.get(key, "any"), new.get(key, "any")
        if a != b:
            yield f"{key}: {plain(a)} → {plain(b)}"
    for text, names in (
        ("serves now", after.served - before.served),
        ("serves no longer", before.served - after.served),
    ):
        if names:
            yield f"{text} {', '.join(sorted(names))}"
    rules = [{f"{r.reject} (`{r.when.describe()}`)" for r in v.rules} for v in (before, after)]
    for text, sentences in (("refuses now", rules[1] - rules[0]), ("refuses no longer", rules[0] - rules[1])):
        for sentence in sorted(sentences):
            yield f"{text}: {plain(sentence)}"


def _shown(value: object) -> str:
    if isinstance(value, frozenset):
        return ", ".join(sorted(value))
    return "every" if value is None else str(value)
