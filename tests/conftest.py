"""Fixtures that several test files share."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

import attnreg

# a registry is loaded within many an example
settings.register_profile("attnreg", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("attnreg")


@pytest.fixture(scope="session")
def default() -> attnreg.Registry:
    """The registry that ships with attnreg, whatever the environment says."""
    return attnreg.load_registry("default")
