"""The digest of a backend's kernel: of its code and of its row's options. It is equal on every machine and Python.

The code is that of the row's modules, and of all modules that these import from attnreg's kernels, its runtime and the
layout of packed pages. Comments, docstrings, blank lines and imports for types alone are left out. This module reads
the text of the code; it imports nothing.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from attnreg.contract import OWN_MODULES
from attnreg.packages.signing import digest, digest_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnreg.registry import Backend, Registry

_PACKAGE = Path(__file__).resolve().parent.parent
# kernels read packed pages by the layout in the third
_PLACES = ("attnreg.kernels", "attnreg.runtime", "attnreg.language.packed")
# a string or a comment, whichever begins first; f-strings with nested quotes (Python 3.12) are not matched
_TOKEN = re.compile(
    r"""[rR]?(?P<long>\"{3}|'{3})(?:\\.|(?!(?P=long)).)*(?P=long)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\#[^\n]*""",
    re.DOTALL,
)
_BLANKS = re.compile(r"[ \t]*\n(?:[ \t]*\n)*")
_TYPES_ALONE = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+[^\n]*\n)*", re.MULTILINE)
_FROM = re.compile(r"^[ \t]*from (attnreg[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*import (attnreg[\w.]*)", re.MULTILINE)
# an f-string with a module's name: it may name any module of the package
_ANY_OF = re.compile(r"\"(attnreg\.[\w.]+)\.\{")


class _Module(NamedTuple):
    code: str
    imports: tuple[str, ...]


def kernel_digest(registry: Registry, title: str) -> str | None:
    """The digest of the kernel of a backend, or of a variant; None if it is unknown, as for modules outside attnreg."""
    row = registry.row(title)
    if row is None or not row.modules or not all(name.startswith(OWN_MODULES) for name in row.modules):
        return None
    return digest_of([row_text(row), *([name, _digest(name)] for name in sorted(_reached(row.modules)))])


def row_text(row: Backend) -> str:
    """The part of a row that affects its kernel: the modules, and their options.

    The claims are no part of it: a changed claim does not change the kernel.
    """
    return repr([row.contract, sorted(row.options.items()), *(v.module for v in row.variants)])


def code_of(text: str) -> str:
    """Python code without its comments, docstrings and blank lines."""
    pieces, at = [""], 0
    for match in _TOKEN.finditer(text):
        pieces[-1] += text[at : match.start()]
        at = match.end()
        if match[0].startswith("#") or (match["long"] and _is_docstring(pieces, text, at)):
            continue
        pieces += [match[0], ""]
    pieces[-1] += text[at:]
    # pieces at odd indices are strings, which must not change
    pieces[::2] = [_BLANKS.sub("\n", piece) for piece in pieces[::2]]
    return "".join(pieces).strip() + "\n"


def _is_docstring(pieces: list[str], text: str, end: int) -> bool:
    """Whether the string after these pieces, which ends at ``end``, is the first statement of a module or a block."""
    before = pieces[-1].rstrip()
    alone = text[end : end + 1] in ("", "\n") and (not before or "\n" in pieces[-1][len(before) :])
    return alone and (before.endswith(":") if len(pieces) > 1 or before else True)


def _reached(names: tuple[str, ...]) -> set[str]:
    """The names of modules, and of all modules that these import."""
    found, left = set[str](), [*names]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += (*_module(name).imports, *_parents(name))
    return found


def _parents(name: str) -> Iterator[str]:
    """The packages that are imported before a module."""
    while (name := name.rpartition(".")[0]).startswith(_PLACES):
        yield name


@functools.cache
def _module(name: str) -> _Module:
    code = code_of(_file(name).read_text(encoding="utf-8").replace("\r\n", "\n"))
    code = _TYPES_ALONE.sub("", code)
    found = set[str]()
    for match in _FROM.finditer(code):
        found.add(match[1])
        # the imported name may be a module
        found.update(f"{match[1]}.{word}" for word in re.findall(r"\w+", match[2]))
    found.update(match[1] for match in _IMPORT.finditer(code))
    for match in _ANY_OF.finditer(code):
        found.update(f"{match[1]}.{file.stem}" for file in _file(match[1]).parent.glob("*.py"))
    return _Module(code, tuple(sorted(n for n in found if n.startswith(_PLACES) and _file(n).is_file())))


@functools.cache
def _digest(name: str) -> str:
    return digest(_module(name).code.encode())


def _file(name: str) -> Path:
    path = _PACKAGE.joinpath(*name.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
