"""The index of the search: the words of every section of every page. assets/search.js reads it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

_WORD = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
# what a section's words are not taken from
_SKIPPED = {"script", "style", "svg", "nav"}
_VOID = {"br", "hr", "img", "input", "link", "meta", "wbr"}


def words(text: str) -> list[str]:
    """The words of a text: ``gpt-oss-120b`` is one, and so are its parts; ``_``, ``.`` and ``-`` are alike."""
    out = []
    for word in _WORD.findall(text.lower()):
        parts = re.split(r"[._-]", word)
        out += ["-".join(parts), *parts] if len(parts) > 1 else parts
    return out


class Index:
    """The pages with their titles and kinds, their sections, and for each word the numbers of its sections."""

    def __init__(self) -> None:
        self.pages: list[tuple[str, str, str]] = []
        # page, anchor, heading
        self.sections: list[tuple[int, str, str]] = []
        self.words: dict[str, list[int]] = {}

    def add(self, path: str, title: str, kind: str, html: str) -> None:
        """Add a page."""
        self.pages.append((path, title, kind))
        reader = _Sections()
        reader.feed(html)
        for anchor, heading, text in reader.sections():
            number = len(self.sections)
            self.sections.append((len(self.pages) - 1, anchor, heading))
            for word in dict.fromkeys(words(f"{title} {heading} {text}")):
                self.words.setdefault(word, []).append(number)

    def script(self) -> str:
        """The index as a script, which pages opened from a disk may load where they may not fetch."""
        postings = {word: _gaps(numbers) for word, numbers in sorted(self.words.items())}
        data = {"pages": self.pages, "sections": self.sections, "words": postings}
        return f"window.attnregIndex={json.dumps(data, ensure_ascii=False, separators=(',', ':'))};\n"


def _gaps(numbers: list[int]) -> list[int]:
    """Ascending numbers as the first and the distances between neighbours, which are shorter."""
    return [b - a for a, b in zip([0, *numbers], numbers, strict=False)]


@dataclass
class _Section:
    anchor: str
    heading: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class _Sections(HTMLParser):
    """The text of <main>, cut at headings of the second level that have an id."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._main = False
        self._skip: list[str] = []
        self._in_heading = False
        self._parts = [_Section("")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "main":
            self._main = True
        if self._skip or tag in _SKIPPED or "data-unsearched" in given:
            if tag not in _VOID:
                self._skip.append(tag)
        elif tag == "h2":
            self._parts.append(_Section(given.get("id") or ""))
            self._in_heading = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "main":
            self._main = False
        if self._skip and tag == self._skip[-1]:
            self._skip.pop()
        elif tag == "h2":
            self._in_heading = False

    def handle_data(self, data: str) -> None:
        if self._main and not self._skip:
            part = self._parts[-1]
            (part.heading if self._in_heading else part.text).append(data)

    def sections(self) -> list[tuple[str, str, str]]:
        """(anchor, heading, text) of each section; the part before the first heading has neither of the first two."""
        return [(p.anchor, " ".join("".join(p.heading).split()), " ".join(p.text)) for p in self._parts]
