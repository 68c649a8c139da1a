"""Places in JSON text: a repeated key is found, whatever the rest of the text is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnreg.compile.source.json_places import RepeatedKeyError, place, repeated, unrepeated

TWICE = '{"a": {\n "b": 1,\n "b": 2}'


@pytest.mark.parametrize("rest", ["}", "", ",", ', "c', ', "c": ', ', "c": [1', ", x}", "]", ' "c": 1}'])
def test_a_repeated_key_is_found_before_text_that_is_no_json(rest: str) -> None:
    with pytest.raises(RepeatedKeyError):
        json.loads(TWICE + rest, object_pairs_hook=unrepeated)
    assert repeated(TWICE + rest) == ("b", 3, 7)


VALUES = st.recursive(st.none() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v))


@given(VALUES, st.integers(0, 400), st.lists(st.text() | st.integers(0, 3), max_size=3))
def test_no_text_and_no_path_is_too_odd(value: object, length: int, path: list[str | int]) -> None:
    line, column = place(json.dumps(value, indent=1)[:length], tuple(path))
    assert line >= 1
    assert column >= 1
