"""Plugins: finds installed packages with an overlay of their own, and chooses the ones that take part.

A package declares an entry point in the group `attnreg.registries`. Its value is the package, or a package inside it,
with a file `attnreg.yaml`. Finding the file imports nothing of the plugin. Only installed packages count: `python -m`
adds the current directory to the path, and plugins there are ignored.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING

from attnreg.environment import PLUGINS_VARIABLE
from attnreg.errors import LeftOut, Location, Problem, did_you_mean, escaped

# imported only where it is used: it takes a fifth of the time to import the loader
if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

ENTRY_POINTS = "attnreg.registries"
PLUGIN_FILE = "attnreg.yaml"
_POINTS_FILE = "entry_points.txt"


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point: its name and value, the top-level package of the value, and its file, or None.

    ``label`` is the name of the file in messages.
    """

    name: str
    value: str
    package: str
    label: str
    file: Path | None


def broken(name: str, problems: Iterable[Problem]) -> LeftOut:
    """A plugin that is left out because of its problems."""
    first, *others = problems = tuple(problems)
    more = f" and {len(others)} more" if others else ""
    return LeftOut(name, "broken", f"plugin {name} is broken ({first.where}: {first.message}{more})", problems)


def installed_plugins() -> tuple[list[Plugin], list[LeftOut]]:
    """The installed plugins, sorted by name, and those with an unreadable entry point."""
    if not _any_mentions_group():
        return [], []
    points, unreadable = [], []
    for found in _points():
        if isinstance(found, LeftOut):
            unreadable.append(found)
        else:
            points.append(found)
    return [_plugin(point) for point in sorted(points, key=lambda p: (p.name, p.value))], unreadable


def choose(
    plugins: Iterable[Plugin], names: Iterable[str] | None, environ: Mapping[str, str]
) -> tuple[list[Plugin], list[LeftOut]]:
    """The plugins that take part, and those that do not.

    names: the plugins that may take part. None: the ones that ``$ATTNREG_PLUGINS`` names (`off`: none), else all.
    """
    plugins, by = list(plugins), ""
    if names is None and (text := environ.get(PLUGINS_VARIABLE, "").strip()):
        names = () if text.casefold() == "off" else [name.strip() for name in text.split(",") if name.strip()]
        by = f"${PLUGINS_VARIABLE}"
    if names is None:
        return plugins, []
    wanted = {names} if isinstance(names, str) else set(names)
    known = [plugin.name for plugin in plugins]
    left_out = []
    for plugin in plugins:
        if plugin.name not in wanted:
            sentence = f"plugin {plugin.name} is not let in by {by or 'the argument `plugins`'}"
            left_out.append(LeftOut(plugin.name, "not let in", sentence))
    for name in sorted(wanted - set(known)):
        sentence = f"{by or 'plugins'} names {name!r}, and no installed package has a plugin of this name"
        left_out.append(LeftOut(name, "not installed", f"{sentence}; {did_you_mean(name, known)}"))
    return [plugin for plugin in plugins if plugin.name in wanted], left_out


def _plugin(point: EntryPoint) -> Plugin:
    value = point.value.partition(":")[0].partition("[")[0].strip()
    package, *inner = value.split(".")
    label = escaped(f"<entry point {point.name} = {point.value}>/{PLUGIN_FILE}")
    return Plugin(escaped(point.name), escaped(value), package, label, _file(package, inner))


def _file(package: str, inner: list[str]) -> Path | None:
    """The file of a plugin, found without an import."""
    try:
        spec = _spec(package)
        places = list(spec.submodule_search_locations or ()) if spec else []
        return next((file for p in places if os.path.isfile(file := Path(p, *inner, PLUGIN_FILE))), None)
    # import finders of other packages run here, and may raise anything
    except Exception:
        return None


def _spec(package: str) -> ModuleSpec | None:
    """The place of a top-level package of the environment."""
    places = _environment()
    if len(places) == len(sys.path) or not package:
        return importlib.util.find_spec(package)
    found = (finder.find_spec(package, places) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def _environment() -> list[str]:
    """The places of installed packages: ``sys.path`` without the current directory that ``python -m`` and ``-c`` add.

    They add it as the first entry. A second entry for it counts, such as that of a checkout that a .pth file adds.
    """
    first = sys.path[0] if sys.path else ""
    try:
        begins_here = first != "" and os.path.samefile(first, os.curdir)
    # the directory does not exist
    except OSError:
        begins_here = False
    return [place for place in sys.path[begins_here:] if place]


def _distributions() -> Iterable[Distribution]:
    from importlib.metadata import distributions

    return distributions(path=_environment())


def _points() -> Iterator[EntryPoint | LeftOut]:
    """The entry points of each distribution; for an unreadable one with a plugin, its problem."""
    seen: set[str] = set()
    for distribution in _distributions():
        # as in importlib.metadata, the first of several distributions with one name counts
        folder = Path(str(getattr(distribution, "_path", "")))
        name = folder.name.partition("-")[0].lower()
        if name and name in seen:
            continue
        seen.add(name)
        try:
            yield from distribution.entry_points.select(group=ENTRY_POINTS)
        except Exception as e:
            file = folder / _POINTS_FILE
            if _mentions_group(file):
                message = f"the entry points cannot be read: {type(e).__name__}: {e}"
                yield broken(escaped(name), [Problem(Location(escaped(str(file)), 1, 1), message)])


def _any_mentions_group() -> bool:
    """Whether some package may have a plugin. Parsing the entry points of all packages takes three times as long."""
    try:
        texts = (found.read_text(_POINTS_FILE) for found in _distributions())
        return any(ENTRY_POINTS in text for text in texts if text)
    # the caller then reads each distribution on its own
    except Exception:
        return True


def _mentions_group(file: Path) -> bool:
    try:
        return ENTRY_POINTS.encode() in file.read_bytes()
    except OSError:
        return False
