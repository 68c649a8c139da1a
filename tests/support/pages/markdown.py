"""Parsing of Markdown for the tests of the docs: tables, links and anchors."""

from __future__ import annotations

import functools
import itertools
import re

from markdown_it import MarkdownIt
from markdown_it.token import Token


@functools.cache
def parsed(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text)


def inline(text: str) -> list[Token]:
    return [child for token in parsed(text) for child in token.children or ()]


def links(text: str) -> list[str]:
    """The targets of all links and images."""
    keys = {"link_open": "href", "image": "src"}
    return [str(t.attrs[keys[t.type]]) for t in inline(text) if t.type in keys]


@functools.cache
def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of headings, and those written by hand."""
    found = set(re.findall(r'<a id="([^"]+)"></a>', text))
    tokens = parsed(text)
    for opening, heading in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            words = "".join(t.content for t in heading.children or ())
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            found.add(slug if slug not in found else next(s for i in range(1, 99) if (s := f"{slug}-{i}") not in found))
    return found


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of every table, as the text that a reader sees."""
    out: list[tuple[list[str], list[list[str]]]] = []
    tokens = parsed(text)
    for opening, token in itertools.pairwise(tokens):
        if opening.type == "table_open":
            out.append(([], []))
        elif opening.type == "tr_open" and token.type == "td_open":
            out[-1][1].append([])
        elif opening.type in ("th_open", "td_open"):
            header, rows = out[-1]
            cells = header if opening.type == "th_open" else rows[-1]
            cells.append("".join(t.content for t in token.children or () if t.type in ("text", "code_inline")))
    return out
