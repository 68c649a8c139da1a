"""Processes that are the ranks of a process group, and that run a function for a test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# seconds after which a test gives up waiting for its ranks
PATIENCE = 120


class Ranks:
    """So many processes, which meet through a file: gloo on the processor, NCCL with a GPU for each."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory()
        place = (self._folder.name, world_size, backend)
        self._pools = [
            ProcessPoolExecutor(1, get_context("spawn"), _begin, (*place, rank)) for rank in range(world_size)
        ]

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The result of a function on every rank, which is called with the rank first; an error is its result."""
        waiting = [pool.submit(_call, function, rank, arguments) for rank, pool in enumerate(self._pools)]
        try:
            return [future.result(PATIENCE) for future in waiting]
        except TimeoutError:
            self.close()
            raise

    def close(self) -> None:
        for pool in self._pools:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)
        self._folder.cleanup()


def _begin(folder: str, world_size: int, backend: str, rank: int) -> None:
    import torch
    import torch.distributed as dist

    # multicast would reach beyond the process's own GPUs
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{Path(folder, 'meeting')}", rank=rank, world_size=world_size,
        timeout=timedelta(seconds=PATIENCE / 2),
    )  # fmt: skip


def _call(function: Callable[..., Any], rank: int, arguments: tuple[Any, ...]) -> Any:
    try:
        return function(rank, *arguments)
    except Exception as e:
        # not every error can be pickled
        return Failure(type(e).__name__, str(e))


class Failure:
    """An error of a rank: the name of its class, and its words."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind, self.text = kind, text

    def __repr__(self) -> str:
        return f"{self.kind}: {self.text}"
