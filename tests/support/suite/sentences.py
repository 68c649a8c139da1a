"""Sentences of a test module, kept in one text file beside it: `sentences/<module>.txt`.

A test states what a message is about and where it points. How the message reads is in the file, to be reviewed as
text. `ATTNREG_REWRITE=1 python -m pytest -n 0 tests/compile/test_wrong_names.py` writes the file of a module anew.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import pytest

_TITLE = "== "
_PLACE = re.compile(r"^[^\s:]+:(\d+:\d+): ", re.MULTILINE)


class Sentences:
    """The kept sentences of the test that runs."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.file = request.path.with_name("sentences") / f"{request.path.stem}.txt"
        self.title = request.node.name
        module = (item for item in request.session.items if item.path == request.path)
        self.of_module = {item.name for item in module}

    def check(self, text: str, places: str | None = None) -> None:
        """Assert that a message is the kept one. places: the line and column of each of its problems."""
        if places is not None:
            assert " ".join(_PLACE.findall(text)) == places
        if os.environ.get("ATTNREG_REWRITE"):
            self._write(text)
        assert kept(self.file).get(self.title) == text, "read the sentence, then write it: support/suite/sentences.py"

    def _write(self, text: str) -> None:
        blocks = {title: block for title, block in kept(self.file).items() if title in self.of_module}
        blocks[self.title] = text
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text("\n".join(f"{_TITLE}{title}\n{block}\n" for title, block in sorted(blocks.items())))
        kept.cache_clear()


@functools.cache
def kept(file: Path) -> dict[str, str]:
    """Name of a test -> its text."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    blocks = re.split(rf"^{_TITLE}", text, flags=re.MULTILINE)[1:]
    return {title: block.rstrip("\n") for title, _, block in (block.partition("\n") for block in blocks)}


@pytest.fixture
def sentences(request: pytest.FixtureRequest) -> Sentences:
    """The kept sentences of this test."""
    return Sentences(request)
