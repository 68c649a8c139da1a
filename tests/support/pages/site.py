"""The static site for tests: how it is built, and what its pages hold."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import re
import sys
from collections.abc import Iterator, Mapping
from html import unescape
from pathlib import Path
from typing import Any
from unittest import mock

from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.environment import PLUGINS_VARIABLE
from attnreg.loader import bundled_registries
from support import ROOT
from support.suite.examples import FULL, some

VOID = {"br", "col", "hr", "img", "input", "link", "meta", "wbr"}


def shown() -> tuple[str, ...]:
    """The registries of the site that the suite builds: of each engine the first release and the last two, or all."""
    names = tuple(bundled_registries())
    by_engine: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: [*map(int, re.findall(r"\d+", name))]):
        by_engine.setdefault(name.rpartition("-")[0] or name, []).append(name)
    return names if FULL else tuple(name for some in by_engine.values() for name in (*some[:1], *some[1:][-2:]))


def asked() -> tuple[str, ...]:
    """The bundled models whose answers the site of the suite has: a third of them, others in each run, or all."""
    return tuple(some(list(bundled_configs()), len(bundled_configs()) // 3))


def build_site(folder: Path, names: tuple[str, ...] = (), models: tuple[str, ...] = ()) -> Path:
    """The folder, with the site of this checkout in it: that of some registries and answers of some models, or all."""
    path = mock.patch.object(sys, "path", [str(ROOT / "tools"), *sys.path])
    with path, mock.patch.dict("os.environ", {PLUGINS_VARIABLE: "off"}):
        import docs_site

        with without_collector():
            docs_site.build(ROOT, folder, names, models)
    return folder


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Let what makes very many objects, and few circles, not be looked through for those again and again."""
    gc.disable()
    try:
        yield
    finally:
        # they stay, so no later look through them finds anything
        gc.freeze()
        gc.enable()


def read_index(folder: Path) -> Mapping[str, Any]:
    """The index of the search, as its script gives it."""
    text = (folder / "assets/search-index.js").read_text(encoding="utf-8")
    data: Mapping[str, Any] = json.loads(text.removeprefix("window.attnregIndex=").rstrip(";\n"))
    return data


class Element:
    """An element of a page: its tag, attributes, place among the elements above it, and text."""

    def __init__(self, tag: str, attributes: dict[str, str], above: tuple[Element, ...], pieces: list[str]) -> None:
        self.tag = tag
        self.attributes = attributes
        self.above = above
        # the texts of the whole page, and where those of this element begin and end
        self._pieces = pieces
        self._start = self.end = len(pieces)

    @property
    def text(self) -> str:
        return " ".join("".join(self._pieces[self._start : self.end]).split())

    def inside(self, tag: str) -> bool:
        return any(element.tag == tag for element in self.above)


_VALUE = r"""="[^"]*"|='[^']*'|=[^\s"'>]+"""
_TOKEN = re.compile(
    rf"""<(script|style)\b((?:\s+[^\s=>/"']+(?:{_VALUE})?)*)\s*>(.*?)</\1>"""
    rf"""|<(/?)([a-z][a-z0-9-]*)((?:\s+[^\s=>/"']+(?:{_VALUE})?)*)\s*(/?)>"""
    r"""|<!--.*?-->|<!doctype[^>]*>|([^<]+)""",
    re.DOTALL | re.IGNORECASE,
)
_ATTRIBUTE = re.compile(rf"""\s+([^\s=>/"']+)({_VALUE})?""")


@functools.lru_cache(maxsize=1 << 14)
def _attributes(text: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """The attributes of a tag, and the names that it has twice."""
    found = [(name.lower(), unescape(value[1:].strip("\"'"))) for name, value in _ATTRIBUTE.findall(text)]
    names = [name for name, _ in found]
    return dict(found), tuple(sorted({name for name in names if names.count(name) > 1}))


def read_page(text: str) -> tuple[list[Element], list[str]]:
    """The elements of a page, and what is wrong with how it is written and they are nested.

    It reads what the site's templates write, in a third of the time of a reader of whatever browsers accept.
    """
    elements: list[Element] = []
    opened: list[Element] = []
    problems: list[str] = []
    pieces: list[str] = []
    above: tuple[Element, ...] = ()
    place = 0
    for token in _TOKEN.finditer(text):
        if token.start() != place:
            problems.append(f"no HTML: {text[place : place + 80]!r}")
        place = token.end()
        raw, of_raw, inside, close, tag, given, alone, data = token.groups()
        if data:
            pieces.append(unescape(data) if "&" in data else data)
        elif close:
            if not opened or opened[-1].tag != tag:
                problems.append(f"</{tag}> closes <{opened[-1].tag if opened else ''}>")
            else:
                opened.pop().end = len(pieces)
                above = tuple(opened)
        elif raw or tag:
            attributes, twice = _attributes(of_raw if raw else given)
            problems += [f"<{raw or tag}> has {name} twice" for name in twice]
            element = Element(raw or tag, attributes, above, pieces)
            elements.append(element)
            if raw:
                pieces.append(inside)
                element.end = len(pieces)
            elif tag not in VOID and not alone:
                opened.append(element)
                above = tuple(opened)
    if place != len(text):
        problems.append(f"no HTML: {text[place : place + 80]!r}")
    return elements, problems + [f"<{element.tag}> is not closed" for element in opened]
