"""Guides that only the site has: tables of engines' registries, of their changes, and of the model families.

A change of a row changes thousands of their lines. So the checkout has only their written text, in `pages/`, and the
build adds the generated parts. Their links are relative to the guides of docs/.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import docs.page
from docs.changes import change_blocks
from docs.markdown import fill
from docs.models import family_blocks
from docs.registries import bundled
from docs.releases import releases_block

from attnreg.loader import bundled_registries

PAGES = Path(__file__).parent / "pages"
WRITTEN = {f"docs/{file.relative_to(PAGES).as_posix()}" for file in PAGES.rglob("*.md")}
CHANGE = "docs/engines/vllm-0.20-to-0.33.md"


def guides(registries: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The path that each guide would have in the checkout, and its Markdown.

    registries: the names of those whose changes are listed.
    """
    for file, blocks in _blocks(registries):
        written = (PAGES / file.removeprefix("docs/")).read_text(encoding="utf-8")
        yield file, fill(file, written, blocks)


def _blocks(registries: Iterable[str]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The path of each guide, and the name of each of its generated blocks with its Markdown."""
    yield "docs/model_families.md", family_blocks()
    for name, path in bundled_registries(releases=False).items():
        if name != "default":
            yield f"docs/engines/{path.name}.md", docs.page.blocks(bundled(name))
    yield CHANGE, change_blocks("vllm-0.20.0", "vllm-0.33.0")
    yield "docs/engines/releases.md", {"releases": releases_block(registries)}
