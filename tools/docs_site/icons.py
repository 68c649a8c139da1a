"""The icons of the pages, as SVG inside them: those of Lucide (icons/LICENSE.txt), by Lucide's names."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from markupsafe import Markup

_FILE = Path(__file__).parent / "icons/lucide.tsv"


@cache
def _shapes() -> dict[str, str]:
    return dict(line.split("\t") for line in _FILE.read_text(encoding="utf-8").splitlines())


@cache
def icon(name: str) -> Markup:
    """An icon beside words that say the same: readers of the page aloud skip it. Raises KeyError for an unknown one."""
    return Markup('<svg class="icon" viewBox="0 0 24 24" aria-hidden="true">{}</svg>').format(Markup(_shapes()[name]))
