"""Finds prose that one reading does not reach: in docstrings, comments, messages and written pages.

    python tools/prose.py [PATH …]

A sentence has at most 30 words, and `code` counts as one. It holds no phrase that hides who does what. Each class
has a name of its own. A path is a Python file, a Markdown file or a folder of them; without one, the package, the tools
and the written pages are read. Exits with 1 where anything is found.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PLACES = (
    "attnreg", "tools", "benchmarks/notes", "docs", "examples/configs", "README.md", "CONTRIBUTING.md", "RELEASING.md",
    "SECURITY.md",
)  # fmt: skip
MOST_WORDS = 30
# passives without a subject, and relative clauses that have to be read twice
PHRASES = re.compile(
    r"\b(?:is|are|was|be) said\b|\bof which\b|\bof whom\b|\bwhat (?:is|are) (?:none|no)\b|\bso many\b|\bis told of\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"``.+?``|`[^`]+`|\[[^\]]*\]\([^)]*\)|\[[^\]]*\]|https?://\S+", re.DOTALL)
# a sentence ends before a capital, before a name without one, and before the argument that the next one describes
_ENDS = re.compile(r"(?<=[.?!])[\"')]*\s+(?=[\"'(A-Z\d]|(?:attnreg|transformers|vLLM)\b|[a-z_]\w*(?:, \w+)*: )")
# words that names in a row do not have
_SENTENCE = re.compile(r"\b(?:the|an?|is|are|of|to|in|and|not?|for|has|that)\b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z0-9_][\w'’/.,+*=-]*")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s")
# the name of a field or an argument that a paragraph begins with
_FIELD = re.compile(r"^\s*[`\w, *]+:\s")


class Fault(NamedTuple):
    """One sentence, phrase or name that a reader stops at, and where it is."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def main(arguments: Sequence[str]) -> int:
    """Entry point: the exit status."""
    files = list(_files(arguments or [str(ROOT / place) for place in PLACES]))
    faults = [fault for file in files for fault in faults_of(file)]
    faults += repeated_names(files) if not arguments else []
    for fault in faults:
        print(fault)
    print(f"{len(faults)} faults of prose in {len(files)} files" if faults else "the prose is plain")
    return 1 if faults else 0


def faults_of(file: Path) -> Iterator[Fault]:
    """The faults of a Python or a Markdown file."""
    text = file.read_text(encoding="utf-8")
    name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)
    # the strings of kernels are part of their digests, so they change with the next kernel
    messages = not name.startswith(("attnreg/kernels/", "attnreg/runtime/"))
    for line, paragraph in _python(text, messages) if file.suffix == ".py" else _markdown(text):
        for sentence in sentences(paragraph):
            words = len(_WORD.findall(sentence))
            if words > MOST_WORDS:
                yield Fault(name, line, f"a sentence of {words} words: {_short(sentence)}")
            if found := PHRASES.search(sentence):
                yield Fault(name, line, f"`{found[0]}`: {_short(sentence)}")


def repeated_names(files: Iterable[Path]) -> list[Fault]:
    """The classes of the package whose name another class of the package has too."""
    homes: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for file in files:
        name = str(file.relative_to(ROOT))
        if file.suffix == ".py" and name.startswith("attnreg/"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append((name, node.lineno))
    return [
        Fault(*places[0], f"class {name} has the name of {', '.join(f'{file}:{line}' for file, line in places[1:])}")
        for name, places in homes.items()
        if len(places) > 1
    ]


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph, each piece of code in it as one word."""
    plain = _CODE.sub("Code", paragraph)
    return [one for one in _ENDS.split(" ".join(plain.split())) if one]


def _files(places: Iterable[str]) -> Iterator[Path]:
    for place in map(Path, places):
        found = sorted(place.rglob("*")) if place.is_dir() else [place]
        yield from (file.resolve() for file in found if file.suffix in (".py", ".md"))


def _python(text: str, messages: bool) -> Iterator[tuple[int, str]]:
    """The paragraphs of a module's docstrings and comments, and its messages if asked for, each with its line."""
    tree = ast.parse(text)
    yield from _messages(tree) if messages else ()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                yield from _paragraphs(first.lineno, first.value.value.split("\n"))
    block: list[str] = []
    begin = last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1:
            yield from _paragraphs(begin, block)
            begin, block = token.start[0], []
        block.append(token.string.lstrip("# "))
        last = token.start[0]
    yield from _paragraphs(begin, block)


def _messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The strings of a module that may be sentences, each with its line. A value in one counts as a word."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else "Value" for v in node.values)
        elif isinstance(node, ast.Constant) and type(node.value) is str and id(node) not in inside | alone:
            text = node.value
        else:
            continue
        if _SENTENCE.search(text) and len(text.split()) > 5 and "\n" not in text:
            yield node.lineno, text


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    """The written paragraphs of a page, each with its line: no code, table, picture or generated block."""
    kept: list[str] = []
    fence = generated = False
    for line in text.split("\n"):
        generated = generated or line.startswith("<!-- begin generated")
        fence = fence != line.lstrip().startswith("```")
        indented = line.startswith("    ") and not (kept and kept[-1])
        hidden = fence or generated or indented or line.lstrip().startswith(("```", "|", "<", "#", "!["))
        kept.append("" if hidden else line)
        generated = generated and not line.startswith("<!-- end generated")
    yield from _paragraphs(1, kept)


def _paragraphs(begin: int, lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The paragraphs and list items among lines, each with its line."""
    paragraph: list[str] = []
    at = begin
    for number, line in enumerate([*lines, ""], begin):
        starts = bool(_ITEM.match(line) or _FIELD.match(line)) and not line.startswith(" " * 12)
        if paragraph and (not line.strip() or starts):
            yield at, "\n".join(paragraph)
            paragraph = []
        if line.strip():
            at = at if paragraph else number
            paragraph.append(line)


def _short(sentence: str) -> str:
    return sentence if len(sentence) <= 100 else f"{sentence[:97]}..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
