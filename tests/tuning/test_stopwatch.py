"""The time of a call on a GPU, by events that a machine without one plays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnreg.tuning import stopwatch
from attnreg.tuning.stopwatch import Stopwatch


class Device:
    """A device that sleeps for so many cycles of a call, which the host takes others to queue."""

    def __init__(self, host: int, *, waits: bool = False) -> None:
        self.host, self.waits, self.slept = host, waits, list[int]()

    def _sleep(self, cycles: int) -> None:
        self.slept.append(cycles)

    def synchronize(self) -> None:
        pass

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802 (PyTorch's name)
        assert enable_timing
        return SimpleNamespace(
            record=lambda: None,
            query=lambda: self.waits or self.host > self.slept[-1],
            # what falls between the events: the call, and what the host took longer than the device slept
            elapsed_time=lambda end: (1000 + max(0, self.host - self.slept[-1])) / 1e3,
        )


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch, "_FLUSHED", 16)


def timed(monkeypatch: pytest.MonkeyPatch, device: Device, calls: int = 1) -> list[float]:
    watch = Stopwatch(torch.device("cpu"))
    monkeypatch.setattr(torch, "cuda", device)
    return [watch.us(lambda: None) for _ in range(calls)]


@pytest.mark.usefixtures("_small")
def test_no_time_of_the_host_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = Device(400_000), Device(1_500_000)
    assert timed(monkeypatch, fast) == [1000]
    assert fast.slept == [500_000]
    # the host is found to be slower once, and is left the time from then on
    assert timed(monkeypatch, slow, 2) == [1000, 1000]
    assert slow.slept == [500_000, 1_000_000, 2_000_000, 2_000_000]


@pytest.mark.usefixtures("_small")
def test_a_call_that_waits_for_the_device_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(0, waits=True)
    assert timed(monkeypatch, device) == [1000]
    assert device.slept == [500_000 << i for i in range(6)]
