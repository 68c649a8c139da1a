"""The time of a call on a GPU, without that of the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

# larger than any L2 cache, in bytes
_FLUSHED = 256 << 20
# cycles that the device sleeps while the host queues a call, and the most: on an H200 250 us and 8 ms
_ASLEEP, _LONGEST = 500_000, 16_000_000


class Stopwatch:
    """Times calls on one device, each with a cold L2 cache.

    The device sleeps while the host queues a call, so that no host time falls between two events. Where the host takes
    longer than that, the time is of both: it is taken again, after twice the sleep. A call that waits for the device
    itself takes the host's time however long the sleep is, and that is its time.
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
