"""FrozenDict: a mapping that refuses every change, and reads like the dict that it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dict that cannot change: one more key, or one less, raises TypeError. It pickles; ``dict(it)`` can change."""

    __slots__ = ()

    def _refuse(self, *args: Any, **more: Any) -> NoReturn:
        raise TypeError("the mapping is read-only: make a dict of it, and change that")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    # unpickled by its constructor: otherwise key by key, which it refuses
    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def frozen(mapping: Mapping[K, V]) -> FrozenDict[K, V]:
    """The mapping as one that cannot change; its values stay as they are."""
    return mapping if type(mapping) is FrozenDict else FrozenDict(mapping)


def deep_frozen(value: Any) -> Any:
    """Plain data, such as YAML holds, of which no part can change: lists are tuples."""
    if isinstance(value, Mapping):
        return FrozenDict({key: deep_frozen(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(map(deep_frozen, value))
    return frozenset(value) if isinstance(value, set) else value
