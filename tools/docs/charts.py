"""Charts of measured figures as SVG files, which carry their own light and dark colours."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from docs_site.pictures import standalone
from markupsafe import Markup, escape

_LEFT, _WIDTH, _ROW, _TOP = 330.0, 520.0, 34.0, 18.0
_STEPS = (0.2, 0.25, 0.33, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)


class Dot(NamedTuple):
    """One case in a chart of ratios: its name, which a pointer shows, and its ratio."""

    name: str
    ratio: float


def ratios(name: str, title: str, axis: str, groups: Mapping[str, Sequence[Dot]]) -> str:
    """A dot for each case, a line of dots for each group, on a logarithmic axis of ratios. A bar is a geometric mean.

    axis: what a ratio below 1 means. Ratios below 1 are drawn in the colour of what is good. A line at 1 divides them.
    """
    every = [dot.ratio for dots in groups.values() for dot in dots]
    low, high = _ends(min(every), max(every))

    def x(ratio: float) -> float:
        return _LEFT + _WIDTH * math.log(ratio / low) / math.log(high / low)

    bottom = _TOP + _ROW * len(groups)
    parts: list[str] = []
    for step in (s for s in _STEPS if low <= s <= high):
        strong = step == 1
        parts.append(
            f'<path d="M{x(step):.1f} {_TOP:.0f}V{bottom:.0f}" stroke="var(--{"edge" if strong else "line"})" '
            f'stroke-width="{2 if strong else 1}"/>'
        )
        parts.append(_text(x(step), bottom + 18, f"{step:g}", "fg" if strong else "muted", "middle"))
    parts.append(_text(_LEFT + _WIDTH, bottom + 40, axis, "muted", "end"))
    said = []
    for number, (group, dots) in enumerate(groups.items()):
        y = _TOP + _ROW * (number + 0.5)
        mean = statistics.geometric_mean(dot.ratio for dot in dots)
        parts.append(_text(_LEFT - 16, y + 4, group, "fg", "end"))
        parts += [_circle(x(dot.ratio), y, dot) for dot in dots]
        parts.append(
            f'<rect x="{x(mean) - 1.5:.1f}" y="{y - 12:.0f}" width="3" height="24" fill="var(--fg)">'
            f"<title>geometric mean {mean:.2f}</title></rect>"
        )
        parts.append(_text(_LEFT + _WIDTH + 14, y + 4, f"{mean:.2f}", "fg", "start"))
        said.append(f"{group}: {mean:.2f} in the geometric mean of {len(dots)} cases")
    return _picture(name, bottom + 50, title, "; ".join(said), parts)


def bars(name: str, title: str, unit: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    """A group of bars for each case, one bar for each name, from 0; the first name has the colour of emphasis."""
    most = max(value for group in groups.values() for value in group.values())
    parts, said, y = [], [], _TOP
    for group, values in groups.items():
        for number, (who, value) in enumerate(values.items()):
            width = max(_WIDTH * 0.86 * value / most, 1)
            parts.append(
                f'<rect x="{_LEFT:.0f}" y="{y:.0f}" width="{width:.1f}" height="14" rx="2" '
                f'fill="var(--{"accent" if not number else "edge"})"/>'
            )
            parts.append(_text(_LEFT + width + 8, y + 11, f"{value:,.1f}", "fg", "start"))
            name_here, ink = (who, "muted") if number else (f"{group}, {who}", "fg")
            parts.append(_text(_LEFT - 12, y + 11, name_here, ink, "end"))
            y += 18
        said.append(f"{group}: " + ", ".join(f"{who} {value:,.1f} {unit}" for who, value in values.items()))
        y += 10
    return _picture(name, y + 4, title, "; ".join(said), parts)


def _ends(low: float, high: float) -> tuple[float, float]:
    """The steps of the axis around the ratios, and around 1."""
    below = [step for step in _STEPS if step <= min(low, 0.95)]
    above = [step for step in _STEPS if step >= max(high, 1.05)]
    return (below or [low])[-1], (above or [high])[0]


def _circle(x: float, y: float, dot: Dot) -> str:
    colour = "good" if dot.ratio < 1 else "warn"
    title = f"{escape(dot.name)}: {dot.ratio:.2f}"
    return (
        f'<circle cx="{x:.1f}" cy="{y:.0f}" r="5" fill="var(--{colour})" fill-opacity="0.55" '
        f'stroke="var(--{colour})"><title>{title}</title></circle>'
    )


def _text(x: float, y: float, text: str, fill: str, anchor: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="var(--{fill})" text-anchor="{anchor}">{escape(text)}</text>'


def _picture(name: str, height: float, title: str, text: str, parts: Sequence[str]) -> str:
    head = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:.0f} {1:.0f}" role="img" '
        'aria-labelledby="{2}-title {2}-text" font-size="13">\n'
        '<title id="{2}-title">{3}</title>\n<desc id="{2}-text">{4}</desc>\n'
    ).format(_LEFT + _WIDTH + 60, height, name, title, text)
    return standalone(head + Markup("\n".join(parts) + "\n</svg>"))
