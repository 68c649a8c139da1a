"""Fixtures of tests that run kernels of MLA."""

from support.layers.layers import one_thread

__all__ = ["one_thread"]
