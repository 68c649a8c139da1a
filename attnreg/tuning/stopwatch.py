"""Stopwatch: measures the time of a call on a GPU, without the host's time."""

from __future__ import annotations

from collections.abc import Callable

import torch

# bytes that are written to flush the L2 cache; more than any L2 cache has
_FLUSHED = 256 << 20
# cycles that the device sleeps while the host queues a call, and the most cycles: 250 µs and 8 ms on an H200
_ASLEEP, _LONGEST = 500_000, 16_000_000


class Stopwatch:
    """Times calls on one device, each with a cold L2 cache.

    The device sleeps while the host queues a call, so that no host time falls between the two events. If the host takes
    longer than the sleep, the time includes the host: it is measured again with twice the sleep. A call that itself
    waits for the device always includes the host's time, and that is its time.
    """

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(_FLUSHED, dtype=torch.int8, device=device)
        self._asleep = _ASLEEP

    def us(self, call: Callable[[], object]) -> float:
        """The microseconds of one call."""
        while True:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(self._asleep)  # type: ignore[no-untyped-call]
            self._flush.zero_()
            begin.record()
            call()
            end.record()
            ahead = not begin.query()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            if ahead or self._asleep >= _LONGEST:
                return float(begin.elapsed_time(end)) * 1e3
            self._asleep *= 2
