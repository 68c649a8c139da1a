"""Counters from which the programs of a launch of the kernel in `kernel` take their work: 16 bytes for each launch.

The last block of threads of a launch sets its counters to zero again. So no launch needs another one before it that
writes zeros.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import torch
from torch import Tensor

# int32 numbers of a launch: prompts (or all tiles) taken; other requests taken; blocks that have ended; padding
NUMBERS = 4
# how many launches may be under way at once (a device's queues hold fewer), and how many graphs may hold
UNDER_WAY, CAPTURED = 2**16, 2**15


class Counters:
    """The places of a device's counters.

    Each launch takes the next place, in a ring; the launch that used it before has ended long ago. A launch in a graph
    keeps its place for ever: the graph may be replayed at any time, though never beside itself.
    """

    def __init__(self, device: torch.device) -> None:
        # in a thread of its own, without the caller's modes and memory pools: these numbers outlive them
        with ThreadPoolExecutor(1) as thread:
            self.numbers = thread.submit(_written_zeros, device).result()
        self._passing, self._captured = count(), count(UNDER_WAY)

    def next_place(self, captured: bool) -> int | None:
        """The place of the next launch; None if graphs hold all places that are for graphs."""
        place = next(self._captured) if captured else next(self._passing) % UNDER_WAY
        return place if place < UNDER_WAY + CAPTURED else None


def _written_zeros(device: torch.device) -> Tensor:
    """Zeros for every place, already written when this returns, so that launches on any stream see them."""
    shape = UNDER_WAY + CAPTURED, NUMBERS
    if device.type != "cuda":
        return torch.zeros(shape, dtype=torch.int32, device=device)
    # on a stream of its own, which does not wait for the caller's work
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
    """Zeros [NUMBERS] int32 for the next launch. The launch sets them to zero again when it ends."""
    captured, counters = is_captured(device), _counters.get(device)
    if counters is None and not captured:
        # no counters are made during a capture: the graph would own them, and zero them at each replay
        counters = _counters.setdefault(device, Counters(device))
    place = None if counters is None else counters.next_place(captured)
    if counters is None or place is None:
        return torch.zeros(NUMBERS, dtype=torch.int32, device=device)
    return counters.numbers[place]
