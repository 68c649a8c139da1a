"""Differences of an engine's interfaces from a record of those that an integration is written for."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

# a module, and a dotted name in it; an empty name stands for the module
Place = tuple[str, str]


def differences(
    record: Mapping[Place, str],
    needed: Mapping[Place, str],
    *,
    cached: Collection[Place] = (),
    replaced: Callable[[Any], bool] = lambda found: False,
) -> Iterator[str]:
    """Each difference as a sentence.

    record: exactly the parameters of a function, the public names of a class, or the fields of a class that holds data.
    needed: names that a module or a class must have among others. cached: functions that functools must cache.
    replaced: whether an object is the integration's own; its names are not compared.
    """
    for place, known in record.items():
        found, problem = _find(*place)
        if problem:
            yield problem
        elif not replaced(found):
            yield from _changes(place[1], found, known.split(), cached=place in cached)
    for (module, name), names in needed.items():
        found, problem = _find(module, name)
        gone = [] if problem else [x for x in names.split() if not _has(found, x)]
        if problem or gone:
            yield problem or f"{name or module} has no {', '.join(gone)}"


def _changes(name: str, found: Any, known: list[str], *, cached: bool) -> Iterator[str]:
    if cached and not hasattr(found, "__wrapped__"):
        yield f"{name} is no cached function"
        return
    names = _names(found)
    new = [x for x in names if x not in known]
    gone = [x for x in known if x not in names]
    if new or gone:
        parts = ["has no " + ", ".join(gone)] if gone else []
        parts += ["now has " + ", ".join(new)] if new else []
        yield f"{name} {' and '.join(parts)}"


def _find(module: str, name: str) -> tuple[Any, str]:
    """The object under a dotted name in a module, or the module if the name is empty; and a problem if it is gone."""
    try:
        found = importlib.import_module(module)
        for part in name.split(".") if name else ():
            found = getattr(found, part)
    except (ImportError, AttributeError) as e:
        return None, f"{module}.{name} is gone ({e})" if name else f"{module} is gone ({e})"
    return found, ""


def _has(found: Any, name: str) -> bool:
    # a class has no attribute for a field without a default
    return hasattr(found, name) or (dataclasses.is_dataclass(found) and name in _names(found))


def _names(found: Any) -> list[str]:
    if dataclasses.is_dataclass(found):
        return [f.name for f in dataclasses.fields(found) if not f.name.startswith("_")]
    if hasattr(found, "_fields"):
        return list(found._fields)
    if inspect.isclass(found) and issubclass(found, enum.Enum):
        return list(found.__members__)
    if inspect.isclass(found):
        return [name for name in vars(found) if not name.startswith("_")]
    return list(inspect.signature(found).parameters)
