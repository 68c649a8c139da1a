"""Masks by position (step 4 of the contract), for backends that compute them in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from attnreg.runtime.interface import AttentionSpec, BatchMetadata


class Band(NamedTuple):
    """The keys that a query sees: all keys, or with ``causal`` those up to its own position; within ``window``, if any.

    A window of w holds the query's own position and the w - 1 positions before it. Without ``causal`` it also holds the
    w - 1 positions after it. None: no window.
    """

    causal: bool
    window: int | None

    def sees(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        """Whether each query position sees each key position; the tensors broadcast."""
        return in_band(query_at, key_at, causal=self.causal, window=self.window)

    def touches(self, near: Tensor, far: Tensor) -> Tensor:
        """Whether a query sees a key at any distance (query - key) from ``near`` to ``far``."""
        seen = far >= 0 if self.causal else far == far
        if self.window is not None:
            seen = seen & (near < self.window) & (-far < self.window)
        return seen

    def covers(self, near: Tensor, far: Tensor) -> Tensor:
        """Whether a query sees the keys at every distance (query - key) from ``near`` to ``far``."""
        seen = near >= 0 if self.causal else near == near
        if self.window is not None:
            seen = seen & (far < self.window) & (-near < self.window)
        return seen


def in_band(query_at: Tensor, key_at: Tensor, *, causal: bool, window: int | Tensor | None) -> Tensor:
    """`Band.sees`, for a window that may be a tensor: a compiler does not bake a tensor into the code as a constant."""
    seen = query_at >= key_at if causal else (query_at == query_at) & (key_at == key_at)
    if window is not None:
        distance = query_at - key_at
        seen = seen & (distance < window)
        # a causal query sees no later key anyway
        seen = seen if causal else seen & (-distance < window)
    return seen


def seen_by_position(
    spec: AttentionSpec, batch: BatchMetadata, request: Tensor, query_at: Tensor, key_at: Tensor
) -> Tensor:
    """Whether queries see keys: [n, queries, keys] bool, for n requests of any lengths.

    request [n, 1], query_at [n, queries] and key_at [n, keys]: the requests, and positions in them.
    """
    p, k = query_at[:, :, None], key_at[:, None, :]
    left, right = spec.sides(batch.causal)
    in_window = p - k <= left if left >= 0 else (p == p) & (k == k)
    seen = in_window & (k - p <= right) if right >= 0 else in_window
    if isinstance(batch.causal, Tensor):
        seen = seen & ((k <= p) | ~batch.causal[request][:, :, None])
    if spec.chunk is not None:
        seen = seen & (p // spec.chunk == k // spec.chunk)
    if batch.mm_prefix is not None:
        # [n, ranges, 1, 1] against [n, 1, queries, 1] and [n, 1, 1, keys]
        for begin, end in (pair.unbind(-1) for pair in batch.mm_prefix[request[:, 0]].unbind(1)):
            beside = together(begin[:, None, None], end[:, None, None], p, k)
            seen = seen | (beside & in_window if "mm_prefix_in_window" in spec.features else beside)
    if batch.tree_mask is not None:
        seen = seen & _in_tree(batch, batch.tree_mask, request, query_at, key_at)
    return seen


def _in_tree(batch: BatchMetadata, tree: Tensor, request: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:
    """Whether a batch's tree_mask lets queries see keys; arguments and shapes as in `seen_by_position`."""
    starts = batch.query_start_loc
    context = batch.seq_lens[request] - (starts[request + 1] - starts[request])
    query, column = query_at - context, (key_at - context)[:, None, :]
    # clamps the positions of padding: what padding sees does not matter
    row = (starts[request] + query).clamp(0, tree.shape[0] - 1).long()[:, :, None]
    return tree[row, column.clamp(0, tree.shape[1] - 1).long()] | (column < 0) | (column == query[:, :, None])


def together(begin: Tensor, end: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:
    """Whether a query and a key both lie in the half-open range from ``begin`` to ``end``; the tensors broadcast."""
    return ((query_at >= begin) & (query_at < end)) & ((key_at >= begin) & (key_at < end))
