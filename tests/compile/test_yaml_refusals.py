"""YAML that attnreg does not read: each refusal has its place, and a small file cannot become large."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.suite.sentences import Sentences

from attnreg.compile.source.yaml_source import MAX_BYTES, Document
from attnreg.errors import RegistryError


def refusal(text: str) -> str:
    """What is printed for a text, without the title."""
    with pytest.raises(RegistryError) as e:
        Document(text, "f.yaml")
    return str(e.value).partition("\n")[2]


# refusals ------------------------------------------------------------------------------------------------------------

REFUSALS = {
    "duplicate keys, all of them, each with the first": ("a: 1\nb: {x: 1, x: 2}\na: 2\na: 3\n", "2:11 3:1 4:1"),
    "a duplicate key in what an alias repeats is said once": ("a: &x {k: 1, k: 2}\nb: *x\n", "1:14"),
    "keys are text: 1 and '1' are the same": ("1: a\n'1': b\n", "2:1"),
    "a tag that would run code": ("a: !!python/object/apply:os.system [ls]\n", "1:4"),
    "a harmless tag": ("a: !!str 5\n", "1:4"),
    "a tag on a key": ("!!str a: 5\n", "1:1"),
    "an anchor on a key": ("&k a: 1\n", "1:1"),
    "a list as a key": ("a: 1\n[b, c]: 1\n", "2:1"),
    "a merge key": ("a: &x {p: 1}\nb: {<<: *x}\n", "2:5"),
    "two documents": ("a: 1\n---\nb: 2\n", "2:1"),
    "an alias of nothing": ("a: *b\n", "1:4"),
    "an anchor that holds itself": ("a: &a [1, {b: *a}]\n", "1:15"),
    "an integer that no machine would take": (f"a: {'9' * 5000}\n", "1:4"),
    "a NUL": ("a: 1\nb: x\x00y\n", "2:5"),
    "half a surrogate pair": ("a: \ud800\n", "1:4"),
    "an escape sequence in a comment": ("# \x1b[2J\n", "1:3"),
    "an escape sequence in quotes": ('a: "\\e[2J"\n', "1:4"),
    "an escape sequence in a quoted key": ('{"\\u0007": 1}\n', "1:2"),
    "a tab as indentation": ("a:\n\tb: 1\n", "2:1"),
    "a list that is never closed": ("a: [1, 2\nb: 3\n", "2:2"),
    "a value that never comes": ("a: [\n\n", "1:5"),
    "quotes that are never closed, cited where they open": ("a: 'x\nb: 1\n", "1:4"),
    "a mapping in a value": ("a: b: c\n", "1:5"),
    "lines end as editors count them": ("a: 1\r\nb: 2\r\nb: 3\r\n", "3:1"),
}


@pytest.mark.parametrize(("text", "places"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(text: str, places: str, sentences: Sentences) -> None:
    sentences.check(refusal(text), places)


def aliases(levels: int, width: int) -> str:
    """Lists of lists of aliases: each line says ``width`` times what the one above says."""
    lines = ["- &a0 [x]"]
    lines += [f"- &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("[" * 500_000, "1:26", "nested more than 24 deep"),
        ("[" * 1000 + "]" * 1000, "1:26", "nested more than 24 deep"),
        ("{a: " * 100_000, "1:101", "nested more than 24 deep"),
        ("- " * 5000 + "x", "1:51", "nested more than 24 deep"),
        ("\n".join(" " * i + "a:" for i in range(1000)), "26:26", "nested more than 24 deep"),
        ("a: &a " + "[" * 1000, "1:31", "nested more than 24 deep"),
        # each alias nests one deeper
        ("a0: &a0 [x]\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 40)), "1:10", "nested more than"),
        (aliases(12, 10), "2:", "more than 100,000 values (an alias counts as all that it repeats)"),
        (aliases(3, 60_000), "2:", "more than 100,000 values"),
        ("[" + "1," * 200_000 + "]", "1:200000", "more than 100,000 values"),
        (f"a: {'x' * MAX_BYTES}", "1:1", "over 1,048,576 bytes: nothing that large is read"),
        # half as many characters, of two bytes each
        (f"a: {'é' * (MAX_BYTES // 2)}", "1:1", "over 1,048,576 bytes: nothing that large is read"),
    ],
)
def test_a_small_file_cannot_become_large(text: str, place: str, message: str) -> None:
    first = refusal(text).splitlines()[0]
    assert first.startswith(f"f.yaml:{place}")
    assert message in first


def test_aliases_that_repeat_little_are_fine() -> None:
    data = Document(aliases(5, 9), "f.yaml").data
    assert json.dumps(data[4]).count("x") == 9**4


@pytest.mark.parametrize("depth", [24, 25])
def test_depth_24_is_the_last(depth: int) -> None:
    text = "[" * depth + "x" + "]" * depth
    if depth == 24:
        assert json.dumps(Document(text, "f.yaml").data) == text.replace("x", '"x"')
    else:
        assert "nested more than 24 deep" in refusal(text)


# files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: x\xff\n", "f.yaml:2:5: not UTF-8 text: invalid start byte at byte 9"),
        ("a: é".encode("latin-1"), "f.yaml:1:4: not UTF-8 text: unexpected end of data at byte 3"),
        ("a: 1".encode("utf-16"), "f.yaml:1:1: not UTF-8 text: invalid start byte at byte 0"),
        (b"a: " + b"x" * MAX_BYTES, "f.yaml:1:1: over 1,048,576 bytes: nothing that large is read"),
        (None, "f.yaml:1:1: cannot be read: No such file or directory"),
    ],
)
def test_unreadable_files(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RegistryError) as e:
        Document.load(path, "f.yaml")
    assert str(e.value) == f"the registry has 1 problem:\n{message}"


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r":1:1: cannot be read: Is a directory"):
        Document.load(tmp_path)


@pytest.mark.parametrize(("name", "why"), [("nul\0", "embedded null byte"), ("x" * 5000, "File name too long")])
def test_a_name_that_no_file_can_have(name: str, why: str) -> None:
    with pytest.raises(RegistryError, match=f"f.yaml:1:1: cannot be read: {why}"):
        Document.load(Path(name), "f.yaml")


def test_a_byte_order_mark_moves_no_column(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert Document.load(path).at("a")[1:] == Document("\ufeffa: 1\n", "f.yaml").at("a")[1:] == (1, 4)
