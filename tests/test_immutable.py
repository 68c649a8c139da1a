"""A registry is immutable to its last mapping, and so is the mapping that refuses to change."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterator
from types import BuiltinMethodType, FunctionType
from typing import Any

import pytest

from attnreg import Registry, load_registry
from attnreg.language.frozen import FrozenDict, deep_frozen, frozen
from attnreg.language.matchers import Matcher

ATOMS = (str, int, float, bool, type(None), FunctionType)


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an immutable value is made of. Fails for a value that can change."""
    if dataclasses.is_dataclass(value):
        assert type(value).__dataclass_params__.frozen, type(value)
        slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        held = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
        # what a matcher remembers is no data: `Matcher` says why
        return ((f".{name}", part) for name, part in held.items() if (type(value), name) != (Matcher, "_memo"))
    if type(value) is FrozenDict:
        return ((f"[{key!r}]", part) for key, part in (*value.items(), *((k, k) for k in value)))
    if isinstance(value, tuple | frozenset):
        return ((f"[{i}]", part) for i, part in enumerate(value))
    if isinstance(value, functools.partial):
        assert value.keywords == {}
        return iter([(".func", value.func), (".args", value.args)])
    if isinstance(value, BuiltinMethodType):
        # words.issuperset belongs to its words, operator.eq to a module
        return iter([] if value.__self__.__class__.__name__ == "module" else [(".__self__", value.__self__)])
    assert isinstance(value, ATOMS), f"{type(value).__name__} can change"
    return iter(())


def walk(value: Any, path: str, seen: set[int]) -> int:
    """The number of values below one, each looked at once."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    try:
        found = list(parts(value))
    except AssertionError as e:
        raise AssertionError(f"{path}: {e}") from None
    return 1 + sum(walk(part, path + name, seen) for name, part in found)


OVERLAY = {
    "choices": [{"prefer": "TRITON_ATTN", "when": {"head_size": {"max": 64, "not": [32, 48]}}}],
    "backends": {"FLASH_ATTN": {"rules": [{"when": {"any": [{"arch": "sm90"}]}, "reject": "slow here"}]}},
}


@pytest.mark.parametrize("name", ["default", "vllm-0.33.0"])
def test_nothing_in_a_registry_can_change(name: str) -> None:
    overlays = [OVERLAY] if name == "default" else []
    assert walk(load_registry(name, overlays), name, set()) > 5000


def test_a_copy_with_other_mappings_cannot_change_either(default: Registry) -> None:
    orders: dict[str, Any] = {"cuda": default.orders["cuda"]}
    changed = dataclasses.replace(default, orders=orders)
    orders["rocm"] = ()
    assert list(changed.orders) == ["cuda"]
    assert walk(changed, "changed", set()) > 5000


def test_the_walk_finds_what_can_change(default: Registry) -> None:
    row = default.backends["FLASH_ATTN"]
    for value in ([], {}, set(), dataclasses.replace(row, notes=["one"])):
        with pytest.raises(AssertionError, match="can change"):
            walk(value, "value", set())


CHANGES: list[Callable[[Any], Any]] = [
    lambda d: d.__setitem__("a", 2),
    lambda d: d.__delitem__("a"),
    lambda d: d.update(b=1),
    lambda d: d.setdefault("b", 1),
    lambda d: d.pop("a"),
    lambda d: d.popitem(),
    lambda d: d.clear(),
    lambda d: d.__ior__({"b": 1}),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_frozen_dict_refuses_every_change(change: Callable[[Any], Any]) -> None:
    mapping = FrozenDict({"a": 1})
    with pytest.raises(TypeError, match="the mapping is read-only"):
        change(mapping)
    assert mapping == {"a": 1}


def test_a_frozen_dict_reads_copies_and_travels_as_a_dict() -> None:
    mapping = frozen({"b": (1,), "a": 2})
    assert [*mapping] == ["b", "a"]
    assert frozen(mapping) is mapping
    for same in (pickle.loads(pickle.dumps(mapping)), copy.deepcopy(mapping), copy.copy(mapping)):
        assert type(same) is FrozenDict
        assert [*same.items()] == [("b", (1,)), ("a", 2)]
    # what is made of it is a dict again
    assert type(mapping | {"c": 3}) is type({**mapping}) is dict


def test_plain_data_is_frozen_to_its_depth() -> None:
    found = deep_frozen({"a": [{"b": {1}}], "c": None})
    assert found == {"a": ({"b": frozenset({1})},), "c": None}
    assert walk(found, "found", set()) > 5
