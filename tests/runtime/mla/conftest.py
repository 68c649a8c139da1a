"""Fixtures of tests that run layers of MLA."""

from support.layers.layers import cpu, one_thread

__all__ = ["cpu", "one_thread"]
