"""Charts of measurements: rows of text with marks beside them, which a narrow page stacks; with a table and a CSV.

The marks are SVG in per cent of their row, so that text keeps its size at any width. A mark's shape says whose it is,
not its colour alone.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from markupsafe import Markup, escape

from docs_site.frame import Asset
from docs_site.pictures import described

# the marks of the series in their order, each drawn around 0,0; the first is attnreg's own
_SHAPES = (
    '<circle r="4.5"/>',
    '<path d="M-5-5H5V5H-5Z"/>',
    '<path d="M0-6.5 6.5 0 0 6.5-6.5 0Z"/>',
    '<path d="M0-6 6 5H-6Z"/>',
    '<path d="M-6 0H6M0-6V6"/>',
    '<path d="M-5-5 5 5M-5 5 5-5"/>',
    '<circle r="3.5"/>',
)
# a tick is near an end of its axis within this part of it
_NEAR = 0.08
Value = str | float | int | None
# what an error bar is, and the columns of its ends
BAR = "10th to 90th percentile"
_ENDS = (", 10th percentile", ", 90th percentile")


class Row(NamedTuple):
    """A case: its name, the value of each series, the least that the hardware allows, a remark, and error bars.

    spreads: series -> the ends of its bar, for the series that have one.
    """

    case: str
    values: Mapping[str, float]
    floor: float | None = None
    remark: str = ""
    spreads: Mapping[str, tuple[float, float]] = MappingProxyType({})

    def cells(self, series: str, ends: Collection[str]) -> list[Value]:
        """The value of a series for a table, and the two ends of its bar if the series is in ``ends``."""
        bar = self.spreads.get(series, (None, None))
        return [self.values.get(series), *(bar if series in ends else ())]


@dataclass(frozen=True)
class Chart:
    """A chart: what it shows and on which machine, its marks, and its table."""

    name: str
    title: str
    note: str
    picture: Markup
    head: Sequence[str]
    rows: Sequence[Sequence[Value]]

    @property
    def path(self) -> str:
        """The path of its data below the site."""
        return f"charts/{self.name}.csv"

    def file(self) -> Asset:
        """Its data as CSV."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.head, *self.rows])
        return Asset(self.path, out.getvalue().encode())


def dots(name: str, title: str, note: str, unit: str, rows: Sequence[Row], own: str = "") -> Chart:
    """The values of each case on one logarithmic axis; ``own`` is the series that stands out.

    A series with a spread has an error bar, and its ends have columns in the table.
    """
    series = list(dict.fromkeys([*([own] if own else []), *(name for row in rows for name in row.values)]))
    ends = {name for row in rows for name in row.spreads}
    bars = [end for row in rows for bar in row.spreads.values() for end in bar]
    shown = [value for row in rows for value in (*row.values.values(), row.floor) if value] + bars
    axis = _Axis.over(shown)
    floors = any(row.floor for row in rows)
    grid = f"grid-{name}"
    parts = [_legend(series, floors, bool(ends)), f'<div class="row axis"><span></span>{axis.ticks(grid)}<b></b></div>']
    parts += [_row(row, series, axis, unit, grid) for row in rows]
    said = "; ".join(
        f"{row.case}: " + ", ".join(f"{who} {_number(v)}" for who, v in row.values.items()) for row in rows
    )
    label = escape(f"{title}, in {unit}. {said}")
    picture = Markup(f'<div class="dots" role="img" aria-label="{label}">{"".join(parts)}</div>')
    columns = [f"{who}{end} ({unit})" for who in series for end in ("", *(_ENDS if who in ends else ()))]
    head = ["case", *columns, *([f"floor ({unit})"] if floors else [])]
    cells = [[value for who in series for value in row.cells(who, ends)] for row in rows]
    table = [[row.case, *some, *([row.floor] if floors else [])] for row, some in zip(rows, cells, strict=True)]
    return Chart(name, title, note, picture, head, table)


class _Axis(NamedTuple):
    """A logarithmic axis from one power's part to another."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> _Axis:
        low, high = math.log10(min(values)), math.log10(max(values))
        spare = max((high - low) * 0.04, 0.02)
        return cls(low - spare, high + spare)

    def at(self, value: float) -> str:
        return f"{100 * (math.log10(value) - self.low) / (self.high - self.low):.2f}%"

    @property
    def steps(self) -> list[float]:
        """The values with a tick: powers of ten, and their fives and twos where there are few."""
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        for factors in ((1,), (1, 3), (1, 2, 5)):
            found = [f * 10.0**p for p in powers for f in factors if self.low <= math.log10(f * 10.0**p) <= self.high]
            if len(found) >= 3:
                break
        return found

    def ticks(self, grid: str) -> str:
        """The numbers of the axis, and its lines under the id ``grid``: each row refers to them."""
        texts = [
            f'<text x="{self.at(s)}" y="14" text-anchor="{self._anchor(s)}">{_number(s)}</text>' for s in self.steps
        ]
        lines = (f'<line x1="{self.at(s)}" x2="{self.at(s)}" y1="0" y2="100%"/>' for s in self.steps)
        kept = f'<defs><g id="{grid}">{"".join(lines)}</g></defs>'
        return f'<svg height="18" aria-hidden="true">{kept}{"".join(texts)}</svg>'

    def _anchor(self, value: float) -> str:
        """The end of a tick's text that stands at it: the texts at the ends of the axis stay inside."""
        place = (math.log10(value) - self.low) / (self.high - self.low)
        return "start" if place < _NEAR else "end" if place > 1 - _NEAR else "middle"


def _legend(series: Sequence[str], floors: bool, bars: bool) -> str:
    items = [f"<li>{_mark(number)}{escape(name)}</li>" for number, name in enumerate(series)]
    if floors:
        items.append(
            '<li><svg class="mark floor" viewBox="-8 -8 16 16"><path d="M0-8V8"/></svg>floor of the hardware</li>'
        )
    if bars:
        path = '<path d="M-8 0H8M-8-4V4M8-4V4"/>'
        items.append(f'<li><svg class="mark spread" viewBox="-8 -8 16 16">{path}</svg>{BAR}</li>')
    return f'<ul class="series" aria-hidden="true">{"".join(items)}</ul>' if len(items) > 1 else ""


def _mark(number: int) -> str:
    return (
        f'<svg class="mark s{number}" viewBox="-8 -8 16 16" aria-hidden="true">{_SHAPES[number % len(_SHAPES)]}</svg>'
    )


def _row(row: Row, series: Sequence[str], axis: _Axis, unit: str, grid: str) -> str:
    marks = [f'<use href="#{grid}"/>']
    if row.floor:
        at, tip = axis.at(row.floor), f"floor {_number(row.floor)} {unit}"
        marks.append(f'<g class="floor"><line x1="{at}" x2="{at}" y1="5" y2="21"/><title>{escape(tip)}</title></g>')
    # the own mark is drawn last, above the others
    for number, name in reversed([*enumerate(series)]):
        if name in row.values:
            bar = row.spreads.get(name)
            said = f", {BAR} {_number(bar[0])} to {_number(bar[1])}" if bar else ""
            tip = escape(f"{name}: {_number(row.values[name])} {unit}{said}")
            marks.append(_bar(axis.at(bar[0]), axis.at(bar[1]), number) if bar else "")
            shape = f"{_SHAPES[number % len(_SHAPES)]}<title>{tip}</title>"
            marks.append(
                f'<svg x="{axis.at(row.values[name])}" y="13" class="s{number}" overflow="visible">{shape}</svg>'
            )
    first = row.values.get(series[0])
    value = f"{_number(first)}" if first is not None else ""
    remark = f"<small>{escape(row.remark)}</small>" if row.remark else ""
    track = f'<svg height="26" aria-hidden="true">{"".join(marks)}</svg>'
    return f'<div class="row"><span>{escape(row.case)}{remark}</span>{track}<b>{value}</b></div>'


def _bar(low: str, high: str, number: int) -> str:
    """An error bar between two places, with a cap at each end."""
    caps = "".join(f'<line x1="{at}" x2="{at}" y1="9" y2="17"/>' for at in (low, high))
    return f'<g class="spread b{number}"><line x1="{low}" x2="{high}" y1="13" y2="13"/>{caps}</g>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


class Line(NamedTuple):
    """A line of a chart: its name and its points."""

    name: str
    points: Sequence[tuple[float, float]]


def lines(name: str, title: str, note: str, axes: tuple[str, str], of: Sequence[Line]) -> Chart:
    """Lines over two logarithmic axes, in powers of two; the last point of each has its name."""
    across = [x for line in of for x, _ in line.points]
    up = [y for line in of for _, y in line.points if y > 0]
    left, right, low, high = math.log2(min(across)), math.log2(max(across)), math.log2(min(up)), math.log2(max(up))
    high = max(high, low + 1)
    height, top = 190.0, 8.0

    def at(x: float, y: float) -> tuple[float, float]:
        return 100 * (math.log2(x) - left) / (right - left), 100 * (high - math.log2(max(y, 2**low))) / (high - low)

    parts = []
    for y in [2.0**p for p in range(math.ceil(low), math.floor(high) + 1, max(1, round((high - low) / 5)))]:
        down = top + at(across[0], y)[1] * height / 100
        parts.append(f'<line class="axis" x1="0" x2="100%" y1="{down:.0f}" y2="{down:.0f}"/>')
        parts.append(f'<text x="0" y="{down - 4:.0f}">{_bytes(y)}</text>')
    for power in range(math.ceil(left), math.floor(right) + 1, 2):
        place = at(2.0**power, up[0])[0]
        anchor = "start" if place < 2 else "end" if place > 98 else "middle"
        parts.append(
            f'<text x="{place:.1f}%" y="{top + height + 18:.0f}" text-anchor="{anchor}">{_tokens(2**power)}</text>'
        )
    paths = []
    for number, line in enumerate(of):
        drawn = " ".join(f"{x:.2f},{y:.2f}" for x, y in (at(*point) for point in line.points))
        paths.append(f'<polyline class="l{number}" points="{drawn}" vector-effect="non-scaling-stroke"/>')
    parts.append(
        f'<svg x="0" y="{top:.0f}" width="100%" height="{height:.0f}" viewBox="0 0 100 100" '
        f'preserveAspectRatio="none" overflow="visible">{"".join(paths)}</svg>'
    )
    said = "; ".join(f"{line.name}: {_bytes(line.points[-1][1])} at {_tokens(int(line.points[-1][0]))}" for line in of)
    svg = described(name, title, said, parts, f'class="plot" height="{top + height + 26:.0f}"')
    legend = "".join(
        f'<li><svg class="mark" viewBox="-8 -8 16 16" aria-hidden="true"><path class="l{number}" d="M-8 0H8"/></svg>'
        f"{escape(line.name)}</li>"
        for number, line in enumerate(of)
    )
    picture = Markup(f'<ul class="series" aria-hidden="true">{legend}</ul>') + svg
    xs = sorted(set(across))
    table = [[int(x), *(dict(line.points).get(x) for line in of)] for x in xs]
    return Chart(name, title, note, picture, [axes[0], *(f"{line.name} ({axes[1]})" for line in of)], table)


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}"


def _tokens(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 else str(count)
