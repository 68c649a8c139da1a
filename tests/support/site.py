"""The static site for tests: how it is built, and what its pages hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

from attnreg.environment import PLUGINS_VARIABLE
from support import ROOT

VOID = {"br", "hr", "img", "input", "link", "meta", "wbr"}


def build_site(folder: Path) -> Path:
    """The folder, with the site of this checkout in it."""
    path = mock.patch.object(sys, "path", [str(ROOT / "tools"), *sys.path])
    with path, mock.patch.dict("os.environ", {PLUGINS_VARIABLE: "off"}):
        import docs_site

        docs_site.build(ROOT, folder)
    return folder


def read_index(folder: Path) -> Mapping[str, Any]:
    """The index of the search, as its script gives it."""
    text = (folder / "assets/search-index.js").read_text(encoding="utf-8")
    data: Mapping[str, Any] = json.loads(text.removeprefix("window.attnregIndex=").rstrip(";\n"))
    return data


class Element:
    """An element of a page: its tag, attributes, place among the elements above it, and text."""

    def __init__(self, tag: str, attributes: dict[str, str], above: tuple[Element, ...]) -> None:
        self.tag = tag
        self.attributes = attributes
        self.above = above
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())

    def inside(self, tag: str) -> bool:
        return any(element.tag == tag for element in self.above)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self.open: list[Element] = []
        self.problems: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        self.problems += [f"<{tag}> has {name} twice" for name in {*names} if names.count(name) > 1]
        element = Element(tag, {name: value or "" for name, value in attrs}, tuple(self.open))
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1].tag != tag:
            self.problems.append(f"</{tag}> closes <{self.open[-1].tag if self.open else ''}>")
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.texts.append(data)


def read_page(text: str) -> tuple[list[Element], list[str]]:
    """The elements of a page, and what is wrong with how they are nested."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    return reader.elements, reader.problems + [f"<{element.tag}> is not closed" for element in reader.open]
