"""The generator of the docs finds a stale file and leaves prose alone. `make lint` runs it: the docs are fresh."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
from support import ROOT

COMMAND = "python tools/gen_docs.py"
# generated files, a text in each, and one that would be wrong in its place
STALE = {
    "docs/attention_backends.md": ("[TURBOQUANT]", "[TURBOJET]"),
    "docs/explain.md": ("UNIFIED_ATTN   4th", "UNIFIED_ATTN   1st"),
    "docs/schema/overlay.schema.json": ('"sm90"', '"sm91"'),
    "docs/images/explain.svg": ("TRITON_ATTN", "TRITON_BTTN"),
}


@pytest.fixture
def written() -> dict[str, str]:
    """Some generated files as they stand in this checkout, by their paths."""
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in STALE}


@pytest.fixture
def checkout(tmp_path: Path, written: Mapping[str, str]) -> Path:
    """A directory that holds them."""
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


# the generated files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STALE)
def test_stale_file_is_found(gen_docs: ModuleType, written: Mapping[str, str], checkout: Path, name: str) -> None:
    text, other = STALE[name]
    assert gen_docs.stale(checkout, written) == ""
    file = checkout / name
    before = file.read_text(encoding="utf-8")
    assert text in before
    file.write_text(before.replace(text, other), encoding="utf-8")
    difference = gen_docs.stale(checkout, written)
    assert difference
    assert f"--- {name} (as it is)" in difference
    assert other in "".join(line for line in difference.splitlines() if line.startswith("-"))
    assert text in "".join(line for line in difference.splitlines() if line.startswith("+"))
    assert difference.endswith(f"Run: {COMMAND}")


def test_missing_file_is_stale(gen_docs: ModuleType, written: Mapping[str, str], checkout: Path) -> None:
    (checkout / "docs/images/explain.svg").unlink()
    assert "+++ docs/images/explain.svg (generated)" in gen_docs.stale(checkout, written)


def test_prose_is_left_alone(gen_docs: ModuleType, written: Mapping[str, str]) -> None:
    """What people write between the blocks is theirs."""
    name = "docs/attention_backends.md"
    page = written[name]
    edited = page.replace("# Attention backends\n", "# Backends\n\nMore.\n", 1)
    # what stands between the markers and the empty lines beside them
    blocks = {m[2]: m[0][len(m[1]) + 1 : -len(m[3]) - 2] for m in gen_docs.docs.markdown._BLOCK.finditer(page)}
    assert edited != page
    assert gen_docs.docs.markdown.fill(name, edited, blocks) == edited


def test_check_writes_nothing_and_exits_with_1(
    gen_docs: ModuleType,
    written: Mapping[str, str],
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gen_docs, "__file__", str(checkout / "tools/gen_docs.py"))
    monkeypatch.setattr(gen_docs, "outputs", lambda root: written)
    assert gen_docs.main(["--check"]) == 0
    file = checkout / "docs/images/explain.svg"
    stale = file.read_text(encoding="utf-8").replace("TRITON_ATTN", "TRITON_BTTN")
    file.write_text(stale, encoding="utf-8")
    capsys.readouterr()
    assert gen_docs.main(["--check"]) == 1
    assert COMMAND in capsys.readouterr().out
    assert file.read_text(encoding="utf-8") == stale
    assert gen_docs.main([]) == 0
    assert capsys.readouterr().out == "wrote docs/images/explain.svg\n"
    assert gen_docs.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "markers are missing for `a`"),
        ("<!-- begin generated: a -->\n<!-- end generated: b -->\n", "`a` is closed by the marker of `b`"),
        ("<!-- begin generated: a -->\n<!-- end generated: a -->\n" * 2, "the markers of `a` are there twice"),
        ("<!-- begin generated: c -->\n<!-- end generated: c -->\n", "no block is called `c`"),
        ("<!-- begin generated: a -->\n", "a marker stands alone"),
        ("<!-- begin generated: a --> <!-- end generated: a -->\n", "not on a line of its own"),
    ],
)
def test_malformed_markers_are_refused(gen_docs: ModuleType, text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        gen_docs.docs.markdown.fill("page.md", text, {"a": "text"})
