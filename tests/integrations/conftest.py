"""What the tests of the integrations share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import attnreg.integrations.transformers as attention
from attnreg import Registry


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The models here are too small to share: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def registered(default: Registry) -> None:
    """As a user begins, with a record that is empty; whatever the environment says."""
    attention.register(registry=default)
