"""Names of releases: which table answers for a version of an engine, and which of two names is which table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from attnreg.compile.inputs.bundled import bundled_registries, engines, patch_releases, plain_release, release_name
from attnreg.selection.wording import engine_words

# a release, or what is built before one, without its engine
NUMBER = re.compile(r"v?\d+(\.\d+)*([-.]?(a|b|rc|dev|post)\d*)*(\+[\w.]+)?")
# the release of a candidate or of a nightly build
BEFORE = re.compile(r"(.*?)[-.]?(?:a|b|rc|dev)\d*.*")


class AnsweringTable(NamedTuple):
    """The table of an installed engine. newer: whether the engine is newer than any table."""

    name: str
    newer: bool


def table_of(engine: str, version: str) -> AnsweringTable | None:
    """The table of a version of an engine; None if it is older than any table, or no table is about its minor release.

    A patch release has a table of its own, or that of the last patch release before it.
    """
    from packaging.version import InvalidVersion, Version

    tables = {Version(name.partition("-")[2]): name for name in bundled_registries() if name.startswith(f"{engine}-")}
    public = version.partition("+")[0]
    if (exact := release_name(f"{engine}-{public}")) in bundled_registries():
        return AnsweringTable(exact, newer=False)
    try:
        wanted = Version(public)
    except InvalidVersion:
        return None
    if wanted > max(tables):
        return AnsweringTable(tables[max(tables)], newer=True)
    # a candidate or a nightly build before a release is of that release
    alike = [v for v in tables if v <= Version(wanted.base_version) and v.release[:2] == wanted.release[:2]]
    return AnsweringTable(tables[max(alike)], newer=False) if alike else None


def patch_notes(*texts: str | None) -> list[str]:
    """Which table answers for each patch release without one of its own that a text names, and how that is known."""
    # a number alone is a release of any engine
    names = [name for text in texts if text for name in (plain_release(text), *(f"{e}-{text}" for e in engines()))]
    without = [name for name in names if name.count(".") > 1 and name not in bundled_registries()]
    known = patch_releases() if without else {}
    return [
        f"{engine_words(*name.split('-'))} has the table of {patch['as']}: {patch['because']}"
        for name in without
        if (patch := known.get(name))
    ]


def apart(names: Sequence[str], found: Sequence[str]) -> list[str]:
    """The tables of several names, so that two names have two tables if they can.

    A minor release is its newest table; beside a name of that table it is the newest of its others.
    """
    tables, told = bundled_registries(), [*found]
    for i, (name, table) in enumerate(zip(names, found, strict=True)):
        engine, _, version = plain_release(name).rpartition("-")
        minor = f"{engine or table.rpartition('-')[0]}-{version.removeprefix('v')}."
        if table in (other for other, its in zip(told, names, strict=True) if its != name):
            others = [other for other in tables if other.startswith(minor) and other not in told]
            told[i] = max(others, key=lambda other: [*map(int, other.removeprefix(minor).split("."))], default=table)
    return told


def itself_note(*tables: str) -> list[str]:
    """A note if all names are one bundled table."""
    same = len({*tables}) == 1 and tables[0] in {*bundled_registries()} - {"default"}
    return [f"{'both' if len(tables) == 2 else 'all'} names are {tables[0]}, compared with itself"] if same else []
