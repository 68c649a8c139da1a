"""Any Python object as any argument of a question: a selection, or a typed error that names the argument."""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.suite.examples import examples

from attnreg import AttentionRequest, NoBackendError, Platform, Registry, RequestError, select


class Broken:
    """Raises whatever is asked of it."""

    def fail(self, *arguments: object) -> Any:
        raise RuntimeError("broken")

    __eq__ = __hash__ = __len__ = __iter__ = __bool__ = __repr__ = __str__ = __lt__ = __index__ = fail


class BrokenText(str):
    __slots__ = ()

    def fail(self, *arguments: object) -> Any:
        raise RuntimeError("broken")

    __eq__ = __hash__ = __len__ = __bool__ = __repr__ = __str__ = fail


class BrokenNumber(int):
    def fail(self, *arguments: object) -> Any:
        raise RuntimeError("broken")

    __eq__ = __hash__ = __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __bool__ = __repr__ = __str__ = fail


class Word(enum.StrEnum):
    FLOAT16 = "float16"


class Size(enum.IntEnum):
    WIDE = 128


class Array:
    """As a numpy array of one number: it has no length, and comparing it gives no truth value."""

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("iteration over a 0-d array")

    def __eq__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None  # type: ignore[assignment]


ODD: list[Callable[[], Any]] = [
    *(Broken, Array, lambda: BrokenText("float16"), lambda: BrokenNumber(128), object, list, dict, set, bytes),
    *(lambda: Word.FLOAT16, lambda: Size.WIDE, lambda: -(10**5000), lambda: 10**5000, lambda: float("nan")),
    *(lambda: itertools.count(), lambda: itertools.repeat("sinks"), lambda: [[]], lambda: {1: 2}, lambda: b"sinks"),
    *(
        lambda: "\ud800",
        lambda: "\x1b[31m",
        lambda: {"x": True},
        lambda: {"x": 10**5000},
        lambda: [("a",)],
        lambda: int,
    ),
    *(lambda: [BrokenText("sinks")], lambda: {BrokenText: 1}, lambda: [Broken()], lambda: {"x": BrokenNumber(3)}),
    *(lambda: (1 / x for x in [0]), lambda: {"x": BrokenText("y")}, lambda: True, lambda: 0, lambda: None),
]
NAMES = {
    "request": [name for name, f in AttentionRequest.__dataclass_fields__.items() if f.init],
    "platform": [name for name, f in Platform.__dataclass_fields__.items() if f.init],
    "select": ["request", "platform", "registry", "backend", "to_run"],
}
TYPED = (RequestError, NoBackendError)


def ask(default: Registry, given: dict[str, dict[str, Any]]) -> None:
    request = AttentionRequest(**{"head_size": 128, **given.get("request", {})})
    platform = Platform(**{"platform": "cuda", "arch": "sm90", **given.get("platform", {})})
    arguments: dict[str, Any] = {"request": request, "platform": platform, "registry": default}
    select(**arguments | given.get("select", {}))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_any_object_is_a_value_or_a_typed_error(default: Registry, kind: str, name: str) -> None:
    for make in ODD:
        if (name, make) == ("registry", ODD[-1]):
            continue
        with contextlib.suppress(*TYPED):
            ask(default, {kind: {name: make()}})


anything = st.recursive(
    st.sampled_from(ODD).map(lambda make: make()) | st.text() | st.integers() | st.floats() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@examples(300)
@given(st.data())
def test_any_objects_together(default: Registry, data: st.DataObject) -> None:
    given_arguments: dict[str, dict[str, Any]] = {}
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(sorted(NAMES)))
        name = data.draw(st.sampled_from([n for n in NAMES[kind] if n != "registry"]))
        given_arguments.setdefault(kind, {})[name] = data.draw(anything)
    with contextlib.suppress(*TYPED):
        ask(default, given_arguments)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("select", {"backend": ["FLASH_ATTN"]}, "backend is ['FLASH_ATTN']; expected the name of a backend"),
    ("select", {"backend": Broken()}, "backend is <Broken instance at "),
    ("select", {"request": {"head_size": 128}}, "request is {'head_size': 128}; expected an AttentionRequest"),
    ("select", {"platform": 5}, "platform is 5; expected a Platform"),
    ("select", {"registry": 5}, "registry is 5; expected a Registry, as load_registry returns it"),
    ("select", {"to_run": "no"}, "to_run is 'no'; expected True or False"),
    ("request", {"head_size": -(10**5000)}, "head_size is of type int, and cannot be shown; expected at least 1"),
    ("request", {"head_size": 2**63}, f"head_size is {2**63}; expected at most 9,223,372,036,854,775,807"),
    ("request", {"features": Array()}, "features is <"),
    ("request", {"features": itertools.repeat("sinks")}, "features is repeat('sinks'); expected a set of words"),
    ("request", {"dtype": b"float16"}, "dtype is b'float16'; expected a word of the registry's vocabulary"),
    ("request", {"extra": {"x": -(2**63)}}, f"extra['x'] is {-(2**63)}; expected at most 9,223,372"),
    ("platform", {"packages": itertools.repeat("torch")}, "packages is repeat('torch'); expected a mapping of names"),
]


@pytest.mark.parametrize(("kind", "arguments", "message"), REFUSED, ids=[r[2][:40] for r in REFUSED])
def test_the_error_names_the_argument(default: Registry, kind: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        ask(default, {kind: arguments})
    assert str(caught.value).startswith(message)


def test_members_of_enumerations_are_words_and_numbers(default: Registry) -> None:
    request = AttentionRequest(head_size=Size.WIDE, dtype=Word.FLOAT16, features=[Word.FLOAT16], extra={"x": Size.WIDE})
    assert type(request.dtype) is str
    assert type(request.head_size) is int
    assert request == AttentionRequest(head_size=128, dtype="float16", features={"float16"}, extra={"x": 128})


def test_true_is_not_one(default: Registry) -> None:
    one, true = (AttentionRequest(head_size=128, extra={"x": value}) for value in (1, True))
    assert one != true
    assert len({one, true}) == 2
    assert AttentionRequest(head_size=128, extra=true.extra) == true
    with pytest.raises(RequestError, match="the request is 5; expected a mapping of its fields"):
        AttentionRequest.from_dict(5)  # type: ignore[arg-type]
