"""Which keys a query sees by position, as step 4 of the contract says; for attention that has no kernel of its own."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Band(NamedTuple):
    """The keys that a query sees: those up to its own (``causal``) or all, and of those the nearest ``window``.

    A window of w holds the query's own position and the w - 1 before it, and where the band is not causal as many
    after it. None: no window.
    """

    causal: bool
    window: int | None

    def sees(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        """Whether queries at some positions see keys at others; the tensors broadcast."""
        return in_band(query_at, key_at, causal=self.causal, window=self.window)

    def touches(self, near: Tensor, far: Tensor) -> Tensor:
        """Whether a query sees a key at some distance (query - key) from ``near`` to ``far``."""
        found = far >= 0 if self.causal else far == far
        if self.window is not None:
            found = found & (near < self.window) & (-far < self.window)
        return found

    def covers(self, near: Tensor, far: Tensor) -> Tensor:
        """Whether a query sees the keys at every distance (query - key) from ``near`` to ``far``."""
        found = near >= 0 if self.causal else near == near
        if self.window is not None:
            found = found & (far < self.window) & (-near < self.window)
        return found


def in_band(query_at: Tensor, key_at: Tensor, *, causal: bool, window: int | Tensor | None) -> Tensor:
    """As `Band.sees`, with a window that may be a tensor: a compiler would make a constant of a number."""
    seen = query_at >= key_at if causal else (query_at == query_at) & (key_at == key_at)
    if window is not None:
        distance = query_at - key_at
        seen = seen & (distance < window)
        # a causal query sees no later key anyway
        seen = seen if causal else seen & (-distance < window)
    return seen


def together(begin: Tensor, end: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:
    """Whether a query and a key both lie in the half-open range from ``begin`` to ``end``; the tensors broadcast."""
    return ((query_at >= begin) & (query_at < end)) & ((key_at >= begin) & (key_at < end))
