"""Fixtures that several test files share."""

from __future__ import annotations

import pytest

import attnreg


@pytest.fixture(scope="session")
def default() -> attnreg.Registry:
    """The registry that ships with attnreg, whatever the environment says."""
    return attnreg.load_registry("default")
