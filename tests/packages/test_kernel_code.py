"""The digest of a kernel: what changes it, what does not, and that it is the same everywhere."""

from __future__ import annotations

import ast
import dataclasses
import io
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from support import ROOT

from attnreg import Registry
from attnreg.packages import kernel_code
from attnreg.packages.kernel_code import code_of, kernel_digest

SOURCES = sorted(path for name in ("kernels", "runtime") for path in (ROOT / "attnreg" / name).rglob("*.py"))


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package's code that a test may edit."""
    for name in ("kernels", "runtime"):
        shutil.copytree(ROOT / "attnreg" / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(kernel_code, "_PACKAGE", tmp_path)
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def forget() -> None:
    kernel_code._module.cache_clear()
    kernel_code._digest.cache_clear()


def edited(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) >= 1
    file.write_text(text.replace(old, new, 1), encoding="utf-8", newline="")
    forget()


def without_comments(text: str) -> str:
    """The code as Python's own tokenizer and parser see it: another way to the same."""
    lines, inside = text.splitlines(keepends=True), set[int]()
    for token in reversed([*tokenize.generate_tokens(io.StringIO(text).readline)]):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column] + lines[row - 1][token.end[1] :]
        # blank lines of a string are a part of it; of an f-string, newer Pythons have several tokens
        elif token.type not in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            doc = range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
            inside -= {*doc}
            lines[doc.start - 1 : doc.stop - 1] = ["\n"] * len(doc)
    kept = [line.rstrip("\n") if i in inside else line.rstrip() for i, line in enumerate(lines, 1)]
    return "\n".join(line for i, line in enumerate(kept, 1) if line or i in inside).strip() + "\n"


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT / "attnreg")) for path in SOURCES])
def test_comments_and_docstrings_are_those_that_python_sees(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert code_of(text) == without_comments(text)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1  # one\n\n\ny = 2\n", "x = 1\ny = 2\n"),
        ('"""Doc."""\nx = "#"\n', 'x = "#"\n'),
        ("x = '''a\n\n# no comment\n'''\n", "x = '''a\n\n# no comment\n'''\n"),
        ('def f():\n    """Doc."""\n    return r"\\""\n', 'def f():\n    return r"\\""\n'),
        ('f(\n    """asm # this\n    """\n)\n', 'f(\n    """asm # this\n    """\n)\n'),
        ("x = 'it''s' # '\n", "x = 'it''s'\n"),
    ],
)
def test_what_counts_as_code(text: str, code: str) -> None:
    assert code_of(text) == code


def test_every_module_that_python_imports_is_reached(default: Registry) -> None:
    """Held against a fresh interpreter that imports the module; what it imports for itself may be more."""
    names = sorted({m for row in default.backends.values() for m in row.modules if m.startswith("attnreg.kernels.")})
    for name in (n for n in names if n.rsplit(".", 1)[-1] in ("cpu_attn", "triton_attn", "triton_mla", "torch_sdpa")):
        program = f"import {name}, sys; print(*(m for m in sys.modules if m.startswith({kernel_code._PLACES!r})))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
        assert set(done.stdout.split()) <= kernel_code._reached((name,)), name


def test_a_change_of_a_kernel_changes_its_digest_and_no_other(copied: Path, default: Registry) -> None:
    before = {name: kernel_digest(default, name) for name in ("TRITON_ATTN", "CPU_ATTN", "HOPPER_ATTN")}
    edited(copied / "kernels/triton/attend.py", "tl.dot", "tl.dot ")
    after = {name: kernel_digest(default, name) for name in before}
    assert after["TRITON_ATTN"] != before["TRITON_ATTN"]
    assert after["CPU_ATTN"] == before["CPU_ATTN"]


@pytest.mark.parametrize(
    ("file", "row"),
    [
        ("runtime/tensors.py", "TRITON_ATTN"),
        ("runtime/batch.py", "CPU_ATTN"),
        ("kernels/triton/tiles.py", "TRITON_ATTN"),
    ],
)
def test_a_change_of_what_it_imports_changes_it_and_a_comment_does_not(
    copied: Path, default: Registry, file: str, row: str
) -> None:
    before = kernel_digest(default, row)
    edited(copied / file, "\nfrom ", "\n# a comment\n\nfrom ")
    assert kernel_digest(default, row) == before
    edited(copied / file, '"""', '"""Said otherwise. ')
    assert kernel_digest(default, row) == before
    with (copied / file).open("a") as more:
        more.write("\nMORE = 1\n")
    forget()
    assert kernel_digest(default, row) != before


def test_lines_may_end_in_either_way(copied: Path, default: Registry) -> None:
    before = kernel_digest(default, "CPU_ATTN")
    file = copied / "kernels/cpu_attn.py"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    forget()
    assert kernel_digest(default, "CPU_ATTN") == before


def test_the_options_of_a_row_are_a_part_of_it_and_its_claims_are_not(default: Registry) -> None:
    row = default.backends["CPU_ATTN"]

    def digest(changed: object) -> str | None:
        return kernel_digest(
            dataclasses.replace(default, backends={**default.backends, "CPU_ATTN": changed}), "CPU_ATTN"
        )

    assert digest(dataclasses.replace(row, options={"tile": 3})) != digest(row)
    bare = dataclasses.replace(row.variants[0], claims=())
    assert digest(dataclasses.replace(row, variants=(bare,))) == digest(row)


def test_the_kernel_of_a_module_outside_attnreg_is_not_known(default: Registry) -> None:
    row = default.backends["CPU_ATTN"]
    theirs = dataclasses.replace(row, variants=(dataclasses.replace(row.variants[0], module="acme.attention"),))
    registry = dataclasses.replace(default, backends={**default.backends, "CPU_ATTN": theirs})
    assert kernel_digest(registry, "CPU_ATTN") is None
    assert kernel_digest(default, "NO_ATTN") is None


def test_nothing_is_imported_for_it() -> None:
    program = (
        "from attnreg import load_registry\n"
        "from attnreg.packages.kernel_code import kernel_digest\n"
        "assert kernel_digest(load_registry('default'), 'HOPPER_ATTN')\n"
        "import sys; assert not {'torch', 'triton', 'attnreg.kernels', 'attnreg.runtime'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
