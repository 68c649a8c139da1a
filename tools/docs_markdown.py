"""Pieces of Markdown that the generated pages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def plain(text: str) -> str:
    """Text as Markdown that shows exactly it."""
    for character in "\\*|<[":
        text = text.replace(character, f"\\{character}")
    return text


def slug(text: str) -> str:
    """An anchor: letters, digits and hyphens."""
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def table(columns: Sequence[tuple[str, int]], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. Widths are given, not measured, so that a change of one row is a change of one line."""
    lines = [[title for title, _ in columns], ["-" * width for _, width in columns], *rows]
    padded = ([cell.ljust(width) for cell, (_, width) in zip(line, columns, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)
