"""The changes of a backend: the changelog's entries that name it, and its claims from release to release."""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from docs.releases import changes, steps, versions

from docs_site.frame import Site


class Change(NamedTuple):
    """A change as Markdown, and the version or release that has it."""

    when: str
    text: str


def upgrades(site: Site) -> list[tuple[str, str]]:
    """The pairs of releases that have a page: for each engine each release and the next, and the first and the last."""
    out: list[tuple[str, str]] = []
    for names in versions(site.bundled).values():
        out += itertools.pairwise(names)
        out += [(names[0], names[-1])] if len(names) > 2 else []
    return out


def row_history(site: Site, name: str, row: str) -> list[Change]:
    """The history of one row: from the changelog for attnreg's registry, from the versions for an engine's."""
    if name == "default":
        return [Change(part, text) for part, text in _changelog(site.root) if _names(text, row)]
    out: list[Change] = []
    for before, after in steps(site.bundled):
        if name in (before, after):
            texts = changes(site.bundled[before], site.bundled[after], row)
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
