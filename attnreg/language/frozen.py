"""FrozenDict: a read-only dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A read-only dict: every change raises TypeError. It can be pickled; ``dict(mapping)`` is a mutable copy."""

    __slots__ = ()

    def _refuse(self, *args: Any, **more: Any) -> NoReturn:
        raise TypeError("the mapping is read-only: make a dict of it, and change that")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    # rebuilt by its constructor: pickle would set key by key, which raises
    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def frozen(mapping: Mapping[K, V]) -> FrozenDict[K, V]:
    """A read-only mapping with the same values; the values themselves are not frozen."""
    return mapping if type(mapping) is FrozenDict else FrozenDict(mapping)


def deep_frozen(value: Any) -> Any:
    """Plain data in read-only form: mappings as `FrozenDict`, lists as tuples, sets as frozensets, at every depth."""
    if isinstance(value, Mapping):
        return FrozenDict({key: deep_frozen(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(map(deep_frozen, value))
    return frozenset(value) if isinstance(value, set) else value
