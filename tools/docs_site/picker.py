"""The pages that answer in the browser."""

from __future__ import annotations

from collections.abc import Iterator

from docs_site.frame import Asset, Page, Site


def pages(site: Site) -> Iterator[Page | Asset]:
    """The pages of the picker, and the data that they read."""
    yield from ()
