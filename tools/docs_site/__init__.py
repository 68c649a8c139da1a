"""The static site: a page for every backend, architecture, model, feature and KV dtype of the bundled registries."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from docs_site import (
    architectures,
    backends,
    changes,
    grid,
    guides,
    landing,
    measured,
    models,
    picker,
    pictures,
    registries,
    resolved,
    words,
)
from docs_site.frame import Asset, Page, Site, assets

PARTS = (landing, grid, registries, backends, architectures, words, resolved, models, changes, measured, guides, picker)
# a file of every built site: the next build replaces only a folder that has it
MARK = ".attnreg-site"


def build(root: Path, folder: Path, shown: tuple[str, ...] = (), asked: tuple[str, ...] = ()) -> list[str]:
    """Build the site of the checkout at ``root`` in a folder, and return the paths of its files.

    shown: the names of the registries that have pages; empty for all. asked: the bundled models whose answers are
    computed for the picker; empty for all. It replaces an earlier site. Raises ValueError for a folder with anything
    else, before any change.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise ValueError(f"{folder} holds files, and no earlier site; name an empty folder or a new one")
    site = Site(root, shown, asked)
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
    return site.write(folder, items(site))


def items(site: Site) -> Iterator[Page | Asset]:
    """All pages and assets of the site."""
    for part in PARTS:
        yield from part.pages(site)
    yield from assets()


def pictures_of(root: Path) -> dict[str, str]:
    """Path of each picture of the site that README shows -> its SVG, with colours of its own."""
    site = Site(root)
    title, selection = registries.example(site.registries["default"])
    machine, figures = measured.figures(root)
    own = [figure for figure in figures if figure["backend"] == "TRITON_ATTN" and figure["peers"]]
    drawn = {
        "path": pictures.path("path", selection, title),
        "evidence": pictures.heat_map(site.registries["default"], measured.proofs(), site.serving("default")),
        "speed": pictures.bars("speed", "TRITON_ATTN", machine, own),
    }
    return {f"docs/images/{name}.svg": pictures.standalone(picture) for name, picture in drawn.items()}
