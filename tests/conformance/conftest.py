"""Fixtures of the tests of conformance."""

from __future__ import annotations

import pytest
from support.layers.layers import cpu, make, one_thread

from attnreg import Platform, Registry
from attnreg.conformance.claims import Claims

__all__ = ["cpu", "make", "one_thread"]


@pytest.fixture(scope="module")
def claims(default: Registry, cpu: Platform) -> Claims:
    return Claims("CPU_ATTN", cpu, default)
