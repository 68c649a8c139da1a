"""YAML that attnreg does not read: each refusal has its place, and a small file cannot become large."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnreg.compile.source.yaml_source import MAX_BYTES, Document
from attnreg.errors import RegistryError


def refusal(text: str) -> str:
    """What is printed for a text, without the title."""
    with pytest.raises(RegistryError) as e:
        Document(text, "f.yaml")
    return str(e.value).partition("\n")[2]


# refusals ------------------------------------------------------------------------------------------------------------

REFUSALS = {
    "duplicate keys, all of them, each with the first": (
        "a: 1\nb: {x: 1, x: 2}\na: 2\na: 3\n",
        """\
f.yaml:2:11: `x` is given twice (first on line 2)
    2 | b: {x: 1, x: 2}
      |           ^
  help: keep one of the two
f.yaml:3:1: `a` is given twice (first on line 1)
    3 | a: 2
      | ^
  help: keep one of the two
f.yaml:4:1: `a` is given twice (first on line 1)
    4 | a: 3
      | ^
  help: keep one of the two""",
    ),
    "a duplicate key in what an alias repeats is said once": (
        "a: &x {k: 1, k: 2}\nb: *x\n",
        """\
f.yaml:1:14: `k` is given twice (first on line 1)
    1 | a: &x {k: 1, k: 2}
      |              ^
  help: keep one of the two""",
    ),
    "keys are text: 1 and '1' are the same": (
        "1: a\n'1': b\n",
        """\
f.yaml:2:1: `1` is given twice (first on line 1)
    2 | '1': b
      | ^^^
  help: keep one of the two""",
    ),
    "a tag that would run code": (
        "a: !!python/object/apply:os.system [ls]\n",
        """\
f.yaml:1:4: the tag `!!python/object/apply:os.system` is not understood
    1 | a: !!python/object/apply:os.system [ls]
      |    ^
  help: remove it; plain YAML is enough here""",
    ),
    "a harmless tag": (
        "a: !!str 5\n",
        """\
f.yaml:1:4: the tag `!!str` is not understood
    1 | a: !!str 5
      |    ^
  help: remove it; plain YAML is enough here""",
    ),
    "a tag on a key": (
        "!!str a: 5\n",
        """\
f.yaml:1:1: a key must be a plain word, without anchor, alias or tag
    1 | !!str a: 5
      | ^""",
    ),
    "an anchor on a key": (
        "&k a: 1\n",
        """\
f.yaml:1:1: a key must be a plain word, without anchor, alias or tag
    1 | &k a: 1
      | ^""",
    ),
    "a list as a key": (
        "a: 1\n[b, c]: 1\n",
        """\
f.yaml:2:1: a key must be a plain word, without anchor, alias or tag
    2 | [b, c]: 1
      | ^""",
    ),
    "a merge key": (
        "a: &x {p: 1}\nb: {<<: *x}\n",
        """\
f.yaml:2:5: merge keys (`<<`) are not understood
    2 | b: {<<: *x}
      |     ^
  help: write the keys out, or repeat a whole value with `*name`""",
    ),
    "two documents": (
        "a: 1\n---\nb: 2\n",
        """\
f.yaml:2:1: a second document in one file
    2 | ---
      | ^
  help: remove the `---` line, or split the file in two""",
    ),
    "an alias of nothing": (
        "a: *b\n",
        """\
f.yaml:1:4: `*b` names no anchor
    1 | a: *b
      |    ^
  help: write `&b` before its first use""",
    ),
    "an anchor that holds itself": (
        "a: &a [1, {b: *a}]\n",
        """\
f.yaml:1:15: `*a` stands in the value that it repeats
    1 | a: &a [1, {b: *a}]
      |               ^""",
    ),
    "an integer that no machine would take": (
        f"a: {'9' * 5000}\n",
        f"""\
f.yaml:1:4: an integer of more than 18 digits
    1 | a: {"9" * 117}
      |    ^
  help: quote it, if it is text""",
    ),
    "a NUL": (
        "a: 1\nb: x\x00y\n",
        """\
f.yaml:2:5: the control character U+0000 is not allowed
    2 | b: x y
      |     ^""",
    ),
    "half a surrogate pair": (
        "a: \ud800\n",
        "f.yaml:1:4: the control character U+D800 is not allowed\n    1 | a:  \n      |    ^",
    ),
    "an escape sequence in a comment": (
        "# \x1b[2J\n",
        """\
f.yaml:1:3: the control character U+001B is not allowed
    1 | #  [2J
      |   ^""",
    ),
    "an escape sequence in quotes": (
        'a: "\\e[2J"\n',
        """\
f.yaml:1:4: the control character U+001B is not allowed
    1 | a: "\\e[2J"
      |    ^""",
    ),
    "an escape sequence in a quoted key": (
        '{"\\u0007": 1}\n',
        """\
f.yaml:1:2: the control character U+0007 is not allowed
    1 | {"\\u0007": 1}
      |  ^""",
    ),
    "a tab as indentation": (
        "a:\n\tb: 1\n",
        """\
f.yaml:2:1: not valid YAML: while scanning for the next token found character that cannot start any token
    2 |  b: 1
      | ^
  help: indent with spaces, not with tabs""",
    ),
    "a list that is never closed": (
        "a: [1, 2\nb: 3\n",
        """\
f.yaml:2:2: not valid YAML: while parsing a flow sequence did not find expected ',' or ']'
    2 | b: 3
      |  ^""",
    ),
    "a value that never comes": (
        "a: [\n\n",
        """\
f.yaml:1:5: not valid YAML: while parsing a flow node did not find expected node content
    1 | a: [
      |     ^""",
    ),
    "quotes that are never closed, cited where they open": (
        "a: 'x\nb: 1\n",
        """\
f.yaml:1:4: not valid YAML: while scanning a quoted scalar found unexpected end of stream
    1 | a: 'x
      |    ^""",
    ),
    "a mapping in a value": (
        "a: b: c\n",
        """\
f.yaml:1:5: not valid YAML: mapping values are not allowed in this context
    1 | a: b: c
      |     ^""",
    ),
    "lines end as editors count them": (
        "a: 1\r\nb: 2\r\nb: 3\r\n",
        """\
f.yaml:3:1: `b` is given twice (first on line 2)
    3 | b: 3
      | ^
  help: keep one of the two""",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(text: str, message: str) -> None:
    assert refusal(text) == message


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
