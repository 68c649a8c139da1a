"""Data with something in it replaced."""

from __future__ import annotations

from typing import Any


def paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a value."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [p for key, value in inner for p in [(*path, key), *paths(value, (*path, key))]]


def spoil(data: Any, path: tuple[Any, ...], key: str | None, value: Any) -> None:
    """Replace a value, or with a key add one beside it."""
    for step in path[:-1]:
        data = data[step]
    if key is not None and isinstance(data, dict):
        data[key] = value
    else:
        data[path[-1]] = value
