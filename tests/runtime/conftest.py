"""Fixtures of tests that run layers."""

from support.layers.layers import cpu, make, one_thread

__all__ = ["cpu", "make", "one_thread"]
