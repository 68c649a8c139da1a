"""The check of prose: what it finds, and that it reads text and no code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from support import ROOT

WORDS = " ".join(["word"] * 31)
LONG = f"One {WORDS}."


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    """tools/prose.py as a module."""
    spec = importlib.util.spec_from_file_location("prose_under_test", ROOT / "tools/prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAULTS = [
    ("a docstring", f'"""{LONG}"""\n', ["1: a sentence of 32 words"]),
    ("a comment over two lines", f"x = 1\n# {WORDS[:79]}\n# {WORDS[80:]}\n", ["2: a sentence of 31 words"]),
    ("a phrase", "# the cache of which it is\n", ["1: `of which`"]),
    ("a docstring of a method", f'class A:\n    def b(self):\n        """{LONG}"""\n', ["3: a sentence of 32 words"]),
    ("two sentences", f'"""{WORDS[:79]}. {WORDS[80:].capitalize()}."""\n', []),
    ("code", f'"""One `{WORDS}` and ``{WORDS}``."""\n', []),
    ("arguments, each a sentence", f'"""{WORDS[:79]}. first: {WORDS[:79]}. second, third: {WORDS[:79]}."""\n', []),
    ("a string that is no docstring", f'x = "{LONG}"\n', []),
    ("a list", "# - " + WORDS[:79] + "\n# - " + WORDS[:79] + "\n", []),
]


@pytest.mark.parametrize(("text", "found"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_faults_of_python(prose: ModuleType, tmp_path: Path, text: str, found: list[str]) -> None:
    file = tmp_path / "module.py"
    file.write_text(text)
    faults = [f"{fault.line}: {fault.what}" for fault in prose.faults_of(file)]
    assert [fault.startswith(start) for fault, start in zip(faults, found, strict=True)] == [True] * len(found)


def test_a_page_is_read_without_code_tables_and_generated_blocks(prose: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    block = f"<!-- begin generated: a -->\n\n{LONG}\n\n<!-- end generated: a -->\n"
    file.write_text(f"# A\n\n| {WORDS} |\n\n```text\n{LONG}\n```\n\n    {LONG}\n\n{block}\nFine.\n\n{LONG}\n")
    assert [(fault.line, fault.what[:22]) for fault in prose.faults_of(file)] == [(19, "a sentence of 32 words")]


def test_a_class_has_a_name_of_its_own(prose: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "attnreg").mkdir()
    files = [tmp_path / "attnreg" / name for name in ("a.py", "b.py")]
    for file in files:
        file.write_text("class Plan: ...\nclass _Plan: ...\n")
    (fault,) = prose.repeated_names(files)
    assert str(fault) == "attnreg/a.py:1: class Plan has the name of attnreg/b.py:1"


def test_main_fails_where_it_finds_something(
    prose: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "module.py"
    file.write_text("# plain\n")
    assert prose.main([str(file)]) == 0
    file.write_text(f"# {LONG}\n")
    assert prose.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith("1 faults of prose in 1 files\n")
