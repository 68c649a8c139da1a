"""Copies of a device's values that the host needs, made while the device goes on working."""

from __future__ import annotations

import torch
from torch import Tensor

from attnreg.runtime.interface import UnclaimedError


class Fetched:
    """A copy of a tensor's present value on its way to host memory.

    `get` waits for the copy alone: later launches neither delay it nor are waited for.
    """

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._copied: torch.cuda.Event | None = None
        if not value.is_cuda:
            self._value = value.clone()
            return
        if torch.cuda.is_current_stream_capturing():
            raise UnclaimedError(
                "a CUDA graph is being captured, and attnreg reads the mask on the host, which no replay would repeat. "
                "Pass attention_mask=None and a cache whose length is a number, or capture continuous batching",
                "attnreg",
            )
        self._value = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        self._value.copy_(value, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(torch.cuda.current_stream(value.device))

    def get(self) -> Tensor:
        """The value in host memory."""
        # another thread may have waited already
        copied = self._copied
        if copied is not None:
            copied.synchronize()
            self._copied = None
        return self._value


def ends_of(seen: Tensor, stop: int) -> list[int] | None:
    """The first true column of each row, if exactly the columns from there to ``stop`` are true; else None.

    seen: [rows, columns] bool. The device sends three numbers of each row to the host.
    """
    if not stop:
        return None
    before = seen[:, :stop]
    numbers = torch.stack([before.view(torch.uint8).argmax(1), before.sum(1), seen.sum(1)])
    firsts, counts, all_counts = Fetched(numbers).get().tolist()
    if counts != all_counts or any(first + count != stop for first, count in zip(firsts, counts, strict=True)):
        return None
    return firsts  # type: ignore[no-any-return]
