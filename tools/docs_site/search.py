"""The index of the search: the words of every section of every page. assets/search.js reads it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator

_WORD = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
_MAIN = re.compile(r"<main\b.*</main>", re.DOTALL)
# what has no words of a section, and what does not part words
_SKIPPED = re.compile(r"<(script|style|svg|nav)\b.*?</\1>|<div[^>]* data-unsearched\b.*?</div>", re.DOTALL)
_WITHIN = re.compile(r"</?(?:a|b|code|em|i|small|span|strong|wbr)\b[^>]*>")
_TAG = re.compile(r"<[^>]*>")
_HEADING = re.compile(r"<h2(?: id=\"([^\"]*)\")?[^>]*>(.*?)</h2>", re.DOTALL)


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

    def add(self, path: str, title: str, kind: str, page: str) -> None:
        """Add a page, which is HTML."""
        self.pages.append((path, title, kind))
        for anchor, heading, text in _sections(page):
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


def _sections(page: str) -> Iterator[tuple[str, str, str]]:
    """(anchor, heading, text) of each section of a page; what is before the first heading has neither of the two."""
    main = _MAIN.search(page)
    before, *parts = _HEADING.split(_SKIPPED.sub(" ", main[0] if main else ""))
    yield "", "", _plain(before)
    for anchor, heading, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        yield anchor or "", " ".join(_plain(heading).split()), _plain(text)


def _plain(text: str) -> str:
    """HTML without its tags."""
    return html.unescape(_TAG.sub(" ", _WITHIN.sub("", text)))
