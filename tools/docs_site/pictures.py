"""Pictures of the data as SVG: what is proven where, speed beside peers, and a selection's way through its order.

Each has a title and a description for readers who do not see it. It takes its colours from the page; `standalone` adds
colours, for a file outside a page.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from attnreg.registry import Registry
from attnreg.selection.trace import Selection
from docs_site.ways import VERDICTS, way

if TYPE_CHECKING:
    from docs_site.measured import Proof
    from docs_site.serving import Serving

_COLOUR = re.compile(r"--([a-z-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)")


# kind of a stop -> the colour of its mark, and the mark
_MARKS = {"chosen": ("good", "✓"), "spare": ("muted", "○"), "refused": ("bad", "✗"), "fails": ("bad", "✗")}
_VIEW = re.compile(r'viewBox="0 0 (\d+) (\d+)"')
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>")


@cache
def colours() -> Mapping[str, tuple[str, str]]:
    """Name of each colour of the site's style sheet -> its light and its dark value."""
    sheet = (Path(__file__).parent / "assets/tokens.css").read_text(encoding="utf-8")
    return {name: (light, dark) for name, light, dark in _COLOUR.findall(sheet)}


def described(name: str, title: str, description: str, parts: Sequence[str], attributes: str = "") -> Markup:
    """An SVG element with a title and a description; ``attributes`` are HTML."""
    head = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" {1} role="img" aria-labelledby="{0}-title {0}-text" font-size="13">\n'
        '<title id="{0}-title">{2}</title>\n<desc id="{0}-text">{3}</desc>\n'
    ).format(name, Markup(attributes), title, description)
    return head + Markup("\n".join(parts) + "\n</svg>")


def _svg(name: str, width: float, height: float, title: str, description: str, parts: Sequence[str]) -> Markup:
    """A picture with its title and its description."""
    return described(name, title, description, parts, f'viewBox="0 0 {width:.0f} {height:.0f}"')


def standalone(picture: Markup) -> str:
    """A picture as a file, light or dark like the reader's system."""
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in colours().items()) for i in (0, 1))
    style = f"<style>svg{{{light};font-family:system-ui,sans-serif}}"
    style += f"@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    head, end, rest = str(picture).partition("</desc>\n")
    # adds the title, which a page has above the picture
    head = _VIEW.sub(lambda view: f'viewBox="0 -34 {view[1]} {int(view[2]) + 34}"', head)
    title = _TITLE.search(head)
    caption = f'<text x="14" y="-10" fill="var(--fg)" font-weight="600">{title[1]}</text>' if title else ""
    ground = '<rect y="-34" width="100%" height="100%" rx="8" fill="var(--bg)"/>'
    return f"{head}{end}{style}\n{ground}\n{caption}\n{rest}\n"


def _text(x: float, y: float, text: str, fill: str = "fg", **more: str) -> str:
    given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="var(--{fill})"{given}>{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, edge: str = "", opacity: float = 1) -> str:
    stroke = f' stroke="var(--{edge})"' if edge else ""
    shown = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{max(width, 1):.0f}" height="{height:.0f}" rx="3" '
        f'fill="var(--{fill})"{shown}{stroke}/>'
    )


def heat_map(registry: Registry, proofs: Mapping[str, Sequence[Proof]], serving: Serving) -> Markup:
    """Backends with a kernel module × architectures: the proven cases, and the claims that no case has tried."""
    rows = [row for row in registry.backends.values() if row.modules]
    archs = list(registry.vocabulary.architectures.values())
    cell, row_height, left, top = 34, 24, 190, 92
    parts = []
    for column, arch in enumerate(archs):
        x = left + column * cell + cell / 2 + 4
        parts.append(
            _text(x, top - 10, arch.name, "muted", transform=f"rotate(-55 {x:.0f} {top - 10})", font_size="12")
        )
    said = []
    for number, row in enumerate(rows):
        y = top + number * row_height
        parts.append(_text(left - 10, y + 16, row.name, text_anchor="end", font_size="12"))
        for column, arch in enumerate(archs):
            x = left + column * cell
            runs = [p for p in proofs.get(row.name, ()) if not p.earlier]
            some = [p for p in runs if (p.record.platform, p.record.arch) == (arch.platform, arch.name)]
            if some:
                cases, elsewhere = sum(p.result["cases"] for p in some), all(p.record.stands_in for p in some)
                colour = "warn" if elsewhere else "good"
                parts.append(_box(x + 1, y + 1, cell - 2, row_height - 2, f"{colour}-soft", colour))
                parts.append(_text(x + cell / 2, y + 16, str(cases), colour, text_anchor="middle", font_size="11"))
                place = f" on {some[0].record.device} in its place" * elsewhere
                said.append(f"{row.name} for {arch.name}: {cases} cases{place}")
            elif any(place.row is row for place in serving.on[arch.name]):
                parts.append(_box(x + 1, y + 1, cell - 2, row_height - 2, "soft", "line"))
    width, bottom = left + len(archs) * cell + 44, top + len(rows) * row_height + 12
    legend = (
        ("good-soft", "good", "proven there against float64: cases"),
        ("warn-soft", "warn", "proven on another platform's device in its place"),
        ("soft", "line", "claims to serve, not run there"),
    )
    x = 30.0
    for fill, edge, words in legend:
        parts += [_box(x, bottom, 18, 16, fill, edge), _text(x + 26, bottom + 13, words, "muted", font_size="12")]
        x += 60 + 7 * len(words)
    title = "What is proven where"
    text = "Rows are backends with a kernel module, columns are architectures. Proven: " + "; ".join(said) + "."
    return _svg("evidence-map", width, bottom + 30, title, text, parts)


def bars(name: str, backend: str, machine: str, figures: Sequence[Mapping[str, Any]]) -> Markup:
    """The time of each case beside its peers in the same run; a bar's length is its time beside the slowest's."""
    left, span, height = 250, 420, 17
    parts, said = [], []
    y = 14.0
    for figure in figures:
        parts.append(_text(left - 10, y + 12, figure["case"], text_anchor="end"))
        times = {backend: figure["us"], **figure.get("peers", {})}
        known = {who: us for who, us in times.items() if us is not None}
        most = max(known.values())
        for who, us in known.items():
            own = who == backend
            parts.append(
                _box(left, y, span * us / most, height - 3, "accent" if own else "edge", opacity=1 if own else 0.55)
            )
            label = f"{us:,.1f} µs {who}"
            parts.append(_text(left + span * us / most + 6, y + 11, label, "fg" if own else "muted", font_size="11"))
            y += height
        said.append(f"{figure['case']}: " + ", ".join(f"{who} {us:,.1f} µs" for who, us in known.items()))
        y += 9
    title = f"{backend} beside its peers, {machine}; shorter is faster"
    return _svg(name, left + span + 230, y, title, "; ".join(said), parts)


def scatter(name: str, title: str, axes: tuple[str, str], points: Sequence[tuple[str, float, float, bool]]) -> Markup:
    """Points with their names, on a horizontal axis from 0 and a logarithmic vertical one; attnreg's are marked."""
    left, top, width, height = 84.0, 20.0, 640.0, 330.0
    most = max(x for _, x, _, _ in points) * 1.25
    low = math.floor(math.log10(min(y for _, _, y, _ in points)))
    high = math.ceil(math.log10(max(y for _, _, y, _ in points)))
    parts = []
    for power in range(low, high + 1):
        y = top + height * (high - power) / (high - low)
        parts += [_box(left, y, width, 1, "line"), _text(left - 8, y + 4, f"1e{power}", "muted", text_anchor="end")]
    for step in range(0, int(most) + 1, 32):
        parts.append(_text(left + width * step / most, top + height + 18, str(step), "muted", text_anchor="middle"))
    for label, x, y, own in points:
        across = left + width * x / most
        down = top + height * (high - math.log10(y)) / (high - low)
        parts.append(_circle(across, down, "accent" if own else "edge"))
        parts.append(_text(across + 12, down + 4, label, "fg" if own else "muted", font_size="11"))
    parts.append(_text(left + width / 2, top + height + 38, axes[0], text_anchor="middle"))
    parts.append(_text(left - 70, top - 6, axes[1]))
    said = "; ".join(f"{label}: {x:g}, {y:.2g}" for label, x, y, _ in points)
    return _svg(name, left + width + 60, top + height + 48, title, said, parts)


def path(name: str, selection: Selection, title: str) -> Markup:
    """A selection as its way through the order: each candidate, the reasons against it, and the chosen one."""
    parts: list[str] = []
    said: list[str] = []
    before = 0.0
    left, width, y = 36, 860, 14.0
    for number, stop in enumerate(way(selection)):
        won = stop.kind == "chosen"
        mark, sign = _MARKS[stop.kind]
        reasons = [text + (f" ({where.short})" if where else "") for text, where in stop.reasons]
        lines = [line for reason in reasons for line in textwrap.wrap(reason, 78, subsequent_indent="  ")]
        high = 26 + max(len(lines) - 1, 0) * 16
        middle = y + 13
        if number:
            parts.append(_line(left - 18, before + 9, middle - 9))
        parts.append(_box(left, y, width, high, "good-soft" if won else "soft", mark if won else "line"))
        parts.append(_circle(left - 18, middle, mark))
        parts.append(_text(left - 18, y + 18, sign, mark, text_anchor="middle", font_size="12"))
        parts.append(_text(left + 10, y + 17, stop.name, "fg", font_weight="600" if won else "400"))
        for index, line in enumerate(lines):
            parts.append(_text(left + 260, y + 17 + index * 16, line, "good" if won else "muted", font_size="12"))
        said.append(f"{stop.name}, {VERDICTS[stop.kind]}: {'; '.join(reasons)}")
        before = middle
        y += high + 12
    if selection.chosen is None:
        parts.append(_text(left, y + 6, "No backend takes the request.", "bad", font_weight="600"))
        said.append("No backend takes the request")
        y += 20
    return _svg(name, left + width + 12, y + 6, title, ". ".join(said) + ".", parts)


def _line(x: float, top: float, bottom: float) -> str:
    return f'<path d="M{x:.0f} {top:.0f}V{bottom:.0f}" stroke="var(--edge)" stroke-width="2"/>'


def _circle(x: float, y: float, edge: str) -> str:
    return f'<circle cx="{x:.0f}" cy="{y:.0f}" r="9" fill="var(--bg)" stroke="var(--{edge})" stroke-width="2"/>'
