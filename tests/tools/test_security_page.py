"""docs/security.md: each statement names the test that holds it, and the test exists."""

from __future__ import annotations

import re

from support import ROOT

PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
# a link to a file, whose title is the test
_TEST = re.compile(r'\]\(\.\./(tests/[\w/]+\.py) "(test_\w+)"\)')


def test_every_test_that_is_named_exists() -> None:
    named = _TEST.findall(PAGE)
    assert len(named) > 20
    for file, function in named:
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}: {function}"


def test_every_statement_names_its_test() -> None:
    listed = re.findall(r"^- .*?(?=\n\n|\n- |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    rows = [row for row in re.findall(r"^\|.*\|$", PAGE, re.MULTILINE)[2:] if not row.startswith("| you |")]
    assert len(listed) >= 10
    assert len(rows) >= 8
    assert [text for text in (*listed, *rows) if not _TEST.search(text) and "own rules" not in text] == []


def test_it_names_the_options_and_the_way_to_report() -> None:
    assert "--trust PACKAGE" in PAGE
    assert "--allow-outside" in PAGE
    assert "docs/security.md" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
