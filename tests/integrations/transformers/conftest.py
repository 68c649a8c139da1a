"""What the tests of the integrations share."""

from __future__ import annotations

import pytest

import attnreg.integrations.transformers as attention
from attnreg import Registry


@pytest.fixture(autouse=True)
def registered(default: Registry) -> None:
    """As a user begins, with a record that is empty; whatever the environment says."""
    attention.register(registry=default)
