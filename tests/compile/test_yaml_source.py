"""YAML as attnreg reads it: plain values with their places."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.suite.examples import examples

import attnreg
from attnreg.compile.source.yaml_source import Document
from attnreg.errors import RegistryError
from attnreg.language.numbers import Float, as_data

TEXT = """\
# a comment
rows:
  A: {name: "quoted", sizes: [64, 128]}
  "B b":
    - plain words
    - x: 1

last: &again
  deep: [[here]]
copy: *again
"""


# values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"),
    [
        # words that YAML 1.1 takes for booleans and dates
        *((w, w) for w in ("no", "yes", "on", "off", "y", "N", "2026-11-21", "12:30:00", "1_000", "0b101", "=")),
        *((w, True) for w in ("true", "True", "TRUE")),
        *((w, False) for w in ("false", "False", "FALSE")),
        *((w, None) for w in ("null", "Null", "NULL", "~", "")),
        ("tRUE", "tRUE"),
        ("0", 0),
        ("-12", -12),
        ("+12", 12),
        ("010", 10),
        ("09", 9),
        ("0o17", 15),
        ("0x1F", 31),
        ("0x", "0x"),
        # a number with a point stays as it was written, and is known for one
        *((w, Float(w)) for w in ("9.10", "9.0", "1e5", ".5", "-3.", ".inf", "-.INF", ".nan")),
        (".", "."),
        ("+", "+"),
        ("1.2.3", "1.2.3"),
        ("٣", "٣"),
        ("'9'", "9"),
        ('"null"', "null"),
        ('"true"', "true"),
        ("''", ""),
        ('"a\\tb\\u00e9"', "a\tbé"),
        ("! 5", 5),
        ("sm90", "sm90"),
        ("a#b", "a#b"),
    ],
)
def test_scalars_follow_the_core_schema(written: str, value: Any) -> None:
    read = Document(f"a: {written}", "f.yaml").data["a"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("", None),
        ("# nothing\n", None),
        ("\ufeffa: 1\n", {"a": 1}),
        ("a: 1\r\nb: 2\r\n", {"a": 1, "b": 2}),
        ("a: 1\rb: 2\r", {"a": 1, "b": 2}),
        ("--- \na: 1\n...\n", {"a": 1}),
        ("%YAML 1.1\n---\na: 1\n", {"a": 1}),
        ("a:\tb\n", {"a": "b"}),
        ("a: |\n  x\n  5\n", {"a": "x\n5\n"}),
        ("a: >-\n  x\n  y\n", {"a": "x y"}),
        ("a: b # c\n", {"a": "b"}),
        ("? a\n: b\n", {"a": "b"}),
        ("null: 1\n~: 2\n3: x\n", {"null": 1, "~": 2, "3": "x"}),
        ('"<<": 1\n', {"<<": 1}),
        ("a: &x [1, {b: 2}]\nc: *x\nd: [*x, *x]\n", {"a": [1, {"b": 2}], "c": [1, {"b": 2}], "d": [[1, {"b": 2}]] * 2}),
        ("a: &x 1\nb: &x 2\nc: *x\n", {"a": 1, "b": 2, "c": 2}),
        ("a: &x {b: &y 1, c: *y}\nd: *x\ne: *y\n", {"a": {"b": 1, "c": 1}, "d": {"b": 1, "c": 1}, "e": 1}),
    ],
)
def test_documents(text: str, data: Any) -> None:
    assert Document(text, "f.yaml").data == data


# places --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        (("rows",), (3, 3), (2, 1)),
        (("rows", "A"), (3, 6), (3, 3)),
        (("rows", "A", "name"), (3, 13), (3, 7)),
        (("rows", "A", "sizes"), (3, 30), (3, 23)),
        (("rows", "A", "sizes", 1), (3, 35), (3, 35)),
        (("rows", "B b"), (5, 5), (4, 3)),
        (("rows", "B b", 0), (5, 7), (5, 7)),
        (("rows", "B b", 1), (6, 7), (6, 7)),
        (("rows", "B b", 1, "x"), (6, 10), (6, 7)),
        (("last", "deep", 0, 0), (9, 11), (9, 11)),
        # an alias stands where it is written, what it repeats where that is
        (("copy",), (10, 7), (10, 1)),
        (("copy", "deep"), (9, 9), (9, 3)),
        # what is not there is where it would be
        (("rows", "A", "sizes", 7), (3, 30), (3, 30)),
        (("rows", "C"), (3, 3), (3, 3)),
        (("nothing", "at", "all"), (2, 1), (2, 1)),
    ],
)
def test_every_key_and_value_has_its_place(path: tuple[str | int, ...], value: Any, key: Any) -> None:
    document = Document(TEXT, "dir/f.yaml")
    assert document.at(*path)[1:] == value
    assert document.key_at(*path)[1:] == key


def test_a_place_prints_for_editors_and_for_traces() -> None:
    where = Document(TEXT, "dir/f.yaml").at("rows", "A")
    assert str(where) == "dir/f.yaml:3:6"
    assert where.short == "f.yaml:3"


def test_a_problem_shows_its_line_with_a_caret_and_the_cure() -> None:
    document = Document(TEXT, "dir/f.yaml")
    assert str(document.problem(("rows", "A", "name"), "is wrong", "mend it")) == (
        'dir/f.yaml:3:13: is wrong\n    3 |   A: {name: "quoted", sizes: [64, 128]}\n      |             ^^^^^^^^\n'
        "  help: mend it"
    )
    assert str(document.problem(("rows", "A", "name"), "is wrong", key=True)) == (
        'dir/f.yaml:3:7: is wrong\n    3 |   A: {name: "quoted", sizes: [64, 128]}\n      |       ^^^^'
    )


@pytest.mark.parametrize("before", [1, 40, 59, 60, 61, 119, 120, 300, 5000])
def test_the_caret_stays_under_its_word_in_a_long_line(before: int) -> None:
    document = Document(f"[{'x' * before}, here, {'y' * 200}]\n", "f.yaml")
    _, line, carets = str(document.problem((1,), "is wrong")).splitlines()
    start = carets.index("^")
    assert line[start : start + carets.count("^")] == "here"
    assert len(line) <= 8 + 120


def test_the_caret_stays_in_line_and_the_terminal_untouched_whatever_stands_before() -> None:
    document = Document("[a\tb\u202ec\u00a0d, here]\n", "f.yaml")
    assert str(document.problem((1,), "is wrong")).splitlines()[1:] == [
        "    1 | [a b c d, here]",
        "      |           ^^^^",
    ]


# any text ------------------------------------------------------------------------------------------------------------

YAMLISH = st.lists(
    st.sampled_from(
        [*"[]{}:,-&*!|>'\"#%@`?~<.01ab \t\r\n", "\n  ", ": ", "- ", "&a ", "*a", "<<: ", "!!str ", "---\n"]
    ),
    max_size=60,
).map("".join)


@examples(400)
@given(st.text(st.characters(), max_size=60) | YAMLISH)
def test_any_text_is_a_document_or_a_located_refusal(text: str) -> None:
    try:
        json.dumps(Document(text, "f.yaml").data).encode()
    except RegistryError as e:
        problems, message = e.problems, str(e)
        message.encode()
    else:
        problems = ()
    last = len(text.splitlines()) + 1
    assert all(1 <= p.where.line <= last and p.where.column >= 1 for p in problems)


LETTERS = st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\ufeff\ufffe\uffff\u2028\u2029")
DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**16), 10**16) | st.text(LETTERS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(LETTERS), inner, max_size=4),
    max_leaves=20,
)


@given(DATA)
def test_json_is_read_as_it_is_and_every_key_found(data: Any) -> None:
    text = json.dumps(data, ensure_ascii=False, indent=1)
    document = Document(text, "f.yaml")
    assert json.dumps(document.data) == json.dumps(data)
    lines = text.split("\n")
    for path, (line, column, width) in document.keys.items():
        assert lines[line - 1][column - 1 : column - 1 + width] == json.dumps(path[-1], ensure_ascii=False)


def test_numbers_with_a_point_are_floats_however_they_are_written() -> None:
    data = as_data(Document("[9.10, 1e5, .5, -3., .inf, -.INF, +.inf, {a: .nan}]", "f.yaml").data)
    assert data[:-1] == [9.1, 1e5, 0.5, -3.0, float("inf"), float("-inf"), float("inf")]
    assert data[-1]["a"] != data[-1]["a"]


def test_a_file_is_read_again_once_its_text_is_another(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1\n")
    first, again = Document.load(file), Document.load(file, "label")
    # the same text says the same, under whichever name
    assert again.data == first.data
    assert (str(first.at("a")), str(again.at("a"))) == (f"{file}:1:4", "label:1:4")
    file.write_text("b: 1\n\na: 2\n")
    assert (Document.load(file).data, Document.load(file, "x").at("a").line) == ({"b": 1, "a": 2}, 3)
    file.write_text("a: 1\na: 2\n")
    for _ in range(2):
        with pytest.raises(RegistryError, match="`a` is given twice"):
            Document.load(file)


def test_what_is_done_to_a_document_reaches_no_other(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: {b: [1, {c: 2}]}\n")
    for _ in range(3):
        read = Document.load(file)
        assert (read.data, read.at("a", "b", 1, "c").line) == ({"a": {"b": [1, {"c": 2}]}}, 1)
        read.data["a"]["b"][1]["c"] = 3
        read.data["a"]["b"].append(4)
        read.data["d"] = read.data.pop("a")
        read.keys.clear()
        read.values.clear()


@pytest.mark.parametrize("name", ["vllm-0.31.0", "sglang-0.5.14"])
def test_loading_a_registry_leaves_what_its_files_say_alone(name: str) -> None:
    # releases that are differences, which take the files of another apart
    first = attnreg.load_registry(name)
    other = attnreg.load_registry("vllm-0.33.0" if name.startswith("vllm") else "sglang-0.5.23")
    before = deepcopy([(row.name, row.variants) for row in other.backends.values()])
    again = attnreg.load_registry(name, [{"choices": [{"deny": ["TRITON_ATTN" if "vllm" in name else "triton"]}]}])
    assert attnreg.load_registry(name) == first
    assert again.fingerprint != first.fingerprint
    assert [(row.name, row.variants) for row in attnreg.load_registry(other.name).backends.values()] == before
