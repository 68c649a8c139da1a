"""Markdown that the generated pages share: escapes, anchors, tables, and the blocks between markers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

_BLOCK = re.compile(r"(<!-- begin generated: (\S+) -->\n).*?(<!-- end generated: (\S+) -->\n)", re.DOTALL)
_MARKER = re.compile(r"<!-- (?:begin|end) generated")


def plain(text: str) -> str:
    """Text with Markdown's characters escaped."""
    for character in "\\*|<[":
        text = text.replace(character, f"\\{character}")
    return text


def slug(text: str) -> str:
    """The anchor of a text: lower-case letters, digits and hyphens."""
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def table(columns: Sequence[tuple[str, int]], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of (title, width) columns. Widths are fixed, so that a changed row is a diff of one line."""
    lines = [[title for title, _ in columns], ["-" * width for _, width in columns], *rows]
    padded = ([cell.ljust(width) for cell, (_, width) in zip(line, columns, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def fill(name: str, page: str, blocks: Mapping[str, str]) -> str:
    """A page with the text between its markers replaced. Raises ValueError if markers and blocks do not correspond."""
    markers = [(match[2], match[4]) for match in _BLOCK.finditer(page)]
    names = [begin for begin, _ in markers]
    problems = [f"`{begin}` is closed by the marker of `{end}`" for begin, end in markers if begin != end]
    problems += [
        f"the markers of `{begin}` are there twice" for begin in dict.fromkeys(names) if names.count(begin) > 1
    ]
    problems += [f"no block is called `{begin}`" for begin in names if begin not in blocks]
    problems += [f"markers are missing for `{block}`" for block in blocks if block not in names]
    if len(_MARKER.findall(page)) != 2 * len(markers):
        problems.append("a marker stands alone, or not on a line of its own")
    if problems:
        raise ValueError(f"{name}: " + "; ".join(problems))
    return _BLOCK.sub(lambda match: f"{match[1]}\n{blocks[match[2]]}\n\n{match[3]}", page)
