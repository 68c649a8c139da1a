"""What the search finds: the words of every section of every page. MiniSearch (assets/minisearch.js) ranks them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

_WORD = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
# what a section's words are not taken from, what holds nothing, and what does not part words
_SKIPPED = {"script", "style", "svg", "nav"}
_VOID = {"br", "hr", "img", "input", "link", "meta", "wbr"}
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
        """The index as a script, which pages opened from a disk may load where they may not fetch."""
        data = {"pages": self.pages, "sections": self.sections}
        return f"window.attnregIndex={json.dumps(data, ensure_ascii=False, separators=(',', ':'))};\n"


@dataclass
class _Section:
    anchor: str
    heading: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class _Sections(HTMLParser):
    """The sections of <main>, cut at headings of the second level; what is before them has no heading."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.sections = [_Section("")]
        self._in_main = self._in_heading = False
        self._skipped: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._in_main |= tag == "main"
        if self._skipped or tag in _SKIPPED or "data-unsearched" in given:
            self._skipped += [tag] if tag not in _VOID else []
        elif tag == "h2":
            self.sections.append(_Section(given.get("id") or ""))
            self._in_heading = True
        self._part(tag)

    def handle_endtag(self, tag: str) -> None:
        self._in_main &= tag != "main"
        if self._skipped and tag == self._skipped[-1]:
            self._skipped.pop()
        self._in_heading &= tag != "h2"
        self._part(tag)

    def _part(self, tag: str) -> None:
        if tag not in _WITHIN:
            self.sections[-1].text.append(" ")

    def handle_data(self, data: str) -> None:
        if self._in_main and not self._skipped:
            part = self.sections[-1]
            (part.heading if self._in_heading else part.text).append(data)
