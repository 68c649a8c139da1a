"""The static site for tests: how it is built, and its pages and its search as a reader without a browser sees them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from attnreg.environment import PLUGINS_VARIABLE
from support import ROOT


def build_site(folder: Path) -> Path:
    """The folder, with the site of this checkout in it."""
    with (
        mock.patch.object(sys, "path", [str(ROOT / "tools"), *sys.path]),
        mock.patch.dict("os.environ", {PLUGINS_VARIABLE: "off"}),
    ):
        import docs_site

        docs_site.build(ROOT, folder)
    return folder


def read_index(folder: Path) -> Mapping[str, Any]:
    """The index of the search, as its script gives it."""
    text = (folder / "assets/search-index.js").read_text(encoding="utf-8")
    data: Mapping[str, Any] = json.loads(text.removeprefix("window.attnregIndex=").rstrip(";\n"))
    return data


def search(index: Mapping[str, Any], query: str) -> list[str]:
    """The paths of the pages that assets/search.js finds, the best first."""
    wanted = _words(query)
    hits = [_sections(index, word) for word in wanted]
    best: dict[int, float] = {}
    for number in set.intersection(*map(set, hits)) if hits else ():
        page, _, heading = index["sections"][number]
        _, title, kind = index["pages"][page]
        score = 0.0 if kind == "guide" else 2.0
        for word, hit in zip(wanted, hits, strict=True):
            score += hit[number] + _weight(title, word, 12, 6) + _weight(heading, word, 4, 2)
        score -= len(_parts(title)) / 8
        best[page] = max(score, best.get(page, -1e9))
    return [index["pages"][page][0] for page in sorted(best, key=lambda p: (-best[p], p))]


def _words(text: str) -> list[str]:
    return [re.sub("[._]", "-", word) for word in re.findall(r"[a-z0-9]+(?:[._-][a-z0-9]+)*", text.lower())]


def _parts(text: str) -> list[str]:
    return [part for word in _words(text) for part in ([word, *word.split("-")] if "-" in word else [word])]


def _sections(index: Mapping[str, Any], word: str) -> dict[int, int]:
    out: dict[int, int] = {}
    for longer, gaps in index["words"].items():
        if longer.startswith(word):
            number = 0
            for gap in gaps:
                number += gap
                out[number] = max(out.get(number, 0), 2 if longer == word else 1)
    return out


def _weight(text: str, word: str, exact: int, prefix: int) -> int:
    names = _parts(text)
    return exact if word in names else prefix if any(name.startswith(word) for name in names) else 0
