"""Lines and tables of text that fit a terminal's width. No word is cut, and no line ends in blanks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_GAP = 2
# the least width of a column that wraps; in a narrower terminal the cells of a row stand below each other
_LEAST = 16
# the largest width of text with something on its right: the eye has to find the end of the line
MOST = 76


@dataclass(frozen=True)
class Column:
    """One column of a table. The column that ``wraps`` gets the width that the other columns leave."""

    heading: str = ""
    style: str = ""
    right: bool = False
    wraps: bool = False


def wrapped(text: str, width: int, hanging: str = "", *, first: str = "") -> list[str]:
    """The lines of a text: the first is indented by ``first``, all others by ``hanging``.

    They are at most ``width`` wide unless a single word is wider. A line may end in ``·`` but does not begin with it.
    """
    import textwrap

    kept = text.replace(" · ", "\xa0· ")
    lines = textwrap.wrap(
        kept, width, break_long_words=False, break_on_hyphens=False, initial_indent=first, subsequent_indent=hanging
    )
    return [line.replace("\xa0", " ") for line in lines]


def emit(lines: Iterable[Text], console: Console) -> None:
    """Print lines as they are."""
    for line in lines:
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, *, total: bool = False) -> list[Text]:
    """The lines of a table below its headings, if it has any. With ``total`` the last row is bold, below a blank line.

    If a column that wraps would be too narrow, the cells of each row stand below each other, with their headings. A
    single row does the same if one of its words is too wide.
    """
    from rich.text import Text

    texts = [[column.heading for column in columns], *rows]
    widths = [max(len(line) for row in texts for line in row[i].split("\n")) for i in range(len(columns))]
    pairs = list(zip(widths, columns, strict=True))
    rest = width - sum(w for w, c in pairs if not c.wraps) - _GAP * (len(columns) - 1)
    if rest < sum(min(w, _LEAST) for w, c in pairs if c.wraps):
        return [line for row in rows for line in _below_each_other(columns, row, width)]
    if not columns[-1].wraps:
        rest = min(rest, MOST)
    widths = [min(w, rest) if c.wraps else w for w, c in pairs]
    lines: list[Text] = []
    if any(column.heading for column in columns):
        lines += _row([Column(c.heading, "bold", c.right, c.wraps) for c in columns], texts[0], widths)
        lines.append(Text("─" * (sum(widths) + _GAP * (len(widths) - 1)), style="dim"))
    for number, row in enumerate(rows, 1):
        last = total and number == len(rows)
        lines += [Text()] if last else []
        styled = [Column(c.heading, "bold", c.right, c.wraps) for c in columns] if last else columns
        laid = list(_row(styled, row, widths))
        # a word that is wider than its column, such as a module, pushes the next column out of the terminal
        if any(len(line.plain.rstrip()) > width for line in laid):
            laid = list(_below_each_other(styled, row, width))
        lines += laid
    return lines


def _row(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> Iterator[Text]:
    from rich.text import Text

    wrapped_cells = [
        [line for text in cell.split("\n") for line in (wrapped(text, width) if column.wraps else [text]) or [""]]
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ]
    for parts in itertools.zip_longest(*wrapped_cells, fillvalue=""):
        line = Text()
        for part, column, width in zip(parts, columns, widths, strict=True):
            line.append(" " * (_GAP if line else 0))
            line.append(f"{part:>{width}}" if column.right else f"{part:<{width}}", style=column.style)
        yield line


def _below_each_other(columns: Sequence[Column], cells: Sequence[str], width: int) -> Iterator[Text]:
    """The cells of a row: the first alone, the others indented below it."""
    from rich.text import Text

    indent = " " * (len(cells[0]) - len(cells[0].lstrip()))
    for number, (column, cell) in enumerate(zip(columns, cells, strict=True)):
        first = f"{indent}  " if number else indent
        for text in cell.strip().split("\n"):
            named = f"{column.heading}: {text}" if number and column.heading else text
            yield from (Text(part, style=column.style) for part in wrapped(named, width, f"{first}  ", first=first))
