"""The static site: a page for every backend, architecture, model, feature and KV dtype of the bundled registries."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from docs_site import architectures, backends, changes, guides, measured, models, picker, registries, words
from docs_site.frame import Asset, Page, Site, assets


def build(root: Path, folder: Path) -> list[str]:
    """Build the site of the checkout at ``root`` in a folder, in place of what it holds; the paths of its files."""
    site = Site(root)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    return site.write(folder, items(site))


def items(site: Site) -> Iterator[Page | Asset]:
    """Everything that the site is made of."""
    for part in (registries, backends, architectures, words, models, changes, measured, guides, picker):
        yield from part.pages(site)
    yield from assets()
