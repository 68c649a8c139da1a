"""The index of the search: the words of every section of every page. MiniSearch (assets/minisearch.js) ranks them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from html import unescape

_WORD = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
# elements whose words are left out, elements without content, and elements that do not separate words
_SKIPPED = {"script", "style", "svg", "nav"}
_VOID = {"br", "col", "hr", "img", "input", "link", "meta", "wbr"}
_PIECE = re.compile(r"<(/?)([a-z][a-z0-9]*)([^>]*)>|<!--.*?-->|([^<]+)", re.DOTALL)
_ID = re.compile(r'\bid="([^"]*)"')
_WITHIN = {"a", "b", "code", "em", "i", "small", "span", "strong", "wbr"}


class Index:
    """The pages with their titles and kinds, and the words of their sections."""

    def __init__(self) -> None:
        self.pages: list[tuple[str, str, str]] = []
        # page, anchor, heading, words
        self.sections: list[tuple[int, str, str, str]] = []

    def add(self, path: str, title: str, kind: str, html: str) -> None:
        """Add a page."""
        reader = _Sections()
        reader.feed(html)
        for part in reader.sections:
            words = dict.fromkeys(_WORD.findall("".join(part.text).lower()))
            self.sections.append(
                (len(self.pages), part.anchor, " ".join("".join(part.heading).split()), " ".join(words))
            )
        self.pages.append((path, title, kind))

    def script(self) -> str:
        """The index as a script: a page opened from a disk may load a script, but may not fetch a file."""
        data = {"pages": self.pages, "sections": self.sections}
        return f"window.attnregIndex={json.dumps(data, ensure_ascii=False, separators=(',', ':'))};\n"


@dataclass
class _Section:
    anchor: str
    heading: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class _Sections:
    """The sections of <main>, cut at headings of the second level; the first section has no heading."""

    def __init__(self) -> None:
        self.sections = [_Section("")]
        self._in_heading = False
        self._skipped: list[str] = []

    def feed(self, html: str) -> None:
        """Read a page of the site: a tag ends at its first >, because templates write &gt; into attributes."""
        main = html.partition("<main")[2].rpartition("</main>")[0].partition(">")[2]
        for close, tag, attributes, text in _PIECE.findall(main):
            if tag:
                self._tag(tag, attributes, bool(close))
            elif text and not self._skipped:
                part = self.sections[-1]
                (part.heading if self._in_heading else part.text).append(unescape(text))

    def _tag(self, tag: str, attributes: str, closes: bool) -> None:
        if closes:
            if self._skipped and tag == self._skipped[-1]:
                self._skipped.pop()
            self._in_heading &= tag != "h2"
        elif self._skipped or tag in _SKIPPED or "data-unsearched" in attributes:
            self._skipped += [tag] if tag not in _VOID and not attributes.endswith("/") else []
        elif tag == "h2":
            anchor = _ID.search(attributes)
            self.sections.append(_Section(anchor[1] if anchor else ""))
            self._in_heading = True
        if tag not in _WITHIN:
            self.sections[-1].text.append(" ")
