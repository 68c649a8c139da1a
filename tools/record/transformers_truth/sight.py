"""What a mask means: which keys a query sees before and after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

META, CPU = torch.device("meta"), torch.device("cpu")


@dataclass(frozen=True)
class Sight:
    """What a query sees of the keys before and after it, in tokens; None is everything."""

    causal: bool | str
    left: int | None = None
    right: int | None = None
    chunk: int | None = None


_FAR = 3 * (1 << 20) + 12_345


def sight_of_rule(rule: Callable[..., Tensor]) -> Sight | None:
    """The rule's meaning, asked at far positions; None where it cannot be asked there."""

    def sees(q: int, kv: int) -> bool:
        return bool(rule(torch.tensor(q, device=CPU), torch.tensor(kv, device=CPU)).item())

    def reach(q: int, sign: int, limit: int) -> int:
        if limit < 1 or not sees(q, q + sign):
            return 0
        low, high = 1, 2
        while high <= limit and sees(q, q + sign * high):
            low, high = high, high * 2
        high = min(high, limit + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sees(q, q + sign * middle) else (low, middle)
        return low

    try:
        left = reach(_FAR, -1, _FAR)
        right = reach(_FAR, 1, _FAR)
        if left == _FAR:
            return Sight(right == 0, None, None if right == _FAR else right)
        if reach(_FAR + 1, -1, _FAR) == left:
            return Sight(right == 0, left, None if right == _FAR else right)
        start = _FAR - left
        chunk = 1 + reach(start - 1, -1, start)
        ahead = [(reach(q, -1, q), reach(q, 1, _FAR)) for q in range(start, start + min(chunk, 256))]
        if all(behind == i for i, (behind, _) in enumerate(ahead)):
            return Sight(right == 0, None, 0 if right == 0 else None, chunk)
        # blocks that also see some blocks before them: the farthest that a query sees
        return Sight(right == 0, max(b for b, _ in ahead), max(a for _, a in ahead))
    except (IndexError, RuntimeError):
        return None


def sight_of_grid(seen: Tensor, local_size: int | None = None) -> Sight:
    """The meaning of a dense [queries, keys] boolean mask."""
    n, m = seen.shape
    if n != m:
        return Sight(False)
    q, kv = torch.arange(n, device=CPU)[:, None], torch.arange(m, device=CPU)[None, :]
    rows = seen.any(-1)
    after = seen & (kv > q)
    far_left = int(((q - kv) * seen).max().clamp(min=0).item())
    far_right = int(((kv - q) * seen).max().clamp(min=0).item())
    band = (q - kv <= far_left) & (kv - q <= far_right)
    left = None if far_left >= n - 1 else far_left
    right = None if far_right >= m - 1 else far_right
    if bool((band == seen)[rows].all()):
        return Sight(far_right == 0, left, right)
    if not bool(after.any()):
        starts = torch.where(seen, kv, m).amin(-1)
        edges = sorted({int(s) for s in starts[rows]})
        if len(edges) > 1 and all(b % edges[1] == 0 for b in edges):
            return Sight(True, None, 0, edges[1])
        return Sight(True, left, 0)
    return Sight("prefix", None if local_size is None else local_size - 1, None)
