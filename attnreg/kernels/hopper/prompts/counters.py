"""The numbers of programs that were taken, a place in memory for each launch of the kernel in `kernel`.

The last block of threads of a launch leaves zeros there, so that none has to be preceded by one that writes zeros.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import torch
from torch import Tensor

# of each launch: of prompts, or all; of other requests; the blocks of threads that have ended; one to fill 16 bytes
NUMBERS = 4
# launches that may be on their way at once: a device's queues hold fewer; and launches that graphs may hold
UNDER_WAY, CAPTURED = 2**16, 2**15


class Counters:
    """The places of a device.

    A launch takes the place after that of the launch before it, and so one that was left long ago. Those that a graph
    holds are given to no other launch: a graph repeats them at any time, though never beside itself.
    """

    def __init__(self, device: torch.device) -> None:
        # a caller's modes and pools of memory are those of its thread, and these numbers outlive them
        with ThreadPoolExecutor(1) as thread:
            self.numbers = thread.submit(_written_zeros, device).result()
        self._passing, self._captured = count(), count(UNDER_WAY)

    def next_place(self, captured: bool) -> int | None:
        """The place of the next launch; None where graphs hold all that are theirs."""
        place = next(self._captured) if captured else next(self._passing) % UNDER_WAY
        return place if place < UNDER_WAY + CAPTURED else None


def _written_zeros(device: torch.device) -> Tensor:
    """Zeros for every place, which are there for launches on any stream."""
    shape = UNDER_WAY + CAPTURED, NUMBERS
    if device.type != "cuda":
        return torch.zeros(shape, dtype=torch.int32, device=device)
    # on a stream of its own, which waits for none of the caller's work
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        numbers = torch.zeros(shape, dtype=torch.int32, device=device)
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        written.record()
        while not written.query():  # type: ignore[no-untyped-call]
            time.sleep(0)
    return numbers


_counters: dict[torch.device, Counters] = {}


def is_captured(device: torch.device) -> bool:
    """Whether a graph is being captured on a device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def taken(device: torch.device) -> Tensor:
    """Zeros [NUMBERS] int32 for the next launch, which leaves zeros."""
    captured, counters = is_captured(device), _counters.get(device)
    if counters is None and not captured:
        # what is made during a capture is the graph's, and is made zero whenever it is replayed
        counters = _counters.setdefault(device, Counters(device))
    place = None if counters is None else counters.next_place(captured)
    if counters is None or place is None:
        return torch.zeros(NUMBERS, dtype=torch.int32, device=device)
    return counters.numbers[place]
