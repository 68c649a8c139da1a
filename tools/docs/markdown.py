"""Markdown that the generated pages share: escapes, anchors and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
