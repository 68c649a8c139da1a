"""Fixtures of the tests in a real browser: the built site, and a headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pages.browser import Browser, missing
from support.pages.site import build_site


@pytest.fixture(scope="session")
def site_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    return build_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def _window() -> Iterator[Browser]:
    if why := missing():
        pytest.skip(why)
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(_window: Browser) -> Iterator[Browser]:
    """A window as wide as a desk's, light, with scripts. The test fails if a page reports an error."""
    _window.size(1280)
    _window.dark(False)
    _window.scripts(True)
    _window.errors()
    _window.requests()
    yield _window
    assert _window.errors() == []
