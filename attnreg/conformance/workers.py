"""Workers: calls of a function in processes, so that one that crashes ends neither the others nor this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """Processes that call functions with the same first arguments; with ``jobs`` None, this process calls them."""

    def __init__(self, jobs: int | None, *shared: Any) -> None:
        self.jobs = jobs
        self.shared = shared
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def map(self, function: Callable[..., R], items: Sequence[T]) -> Iterator[tuple[T, R | None]]:
        """Each item with what ``function(*shared, item)`` returns, in order; None for an item that ends its process."""
        if self.jobs is None:
            yield from ((item, function(*self.shared, item)) for item in items)
            return
        done, jobs = 0, self.jobs
        while done < len(items):
            try:
                for result in self._started(jobs).map(partial(_call, function), items[done:]):
                    yield items[done], result
                    done += 1
            except BrokenProcessPool:
                self._end()
                # of several that were running it may be any: from here on they run one by one
                if jobs == 1:
                    yield items[done], None
                    done += 1
                jobs = 1

    def _started(self, jobs: int) -> ProcessPoolExecutor:
        if self._pool is None:
            # spawned, because a forked process cannot use the GPU. The shared arguments are sent once, as a process
            # starts: one that ends while it is sent something large can leave its pool waiting for ever
            context = get_context("spawn")
            self._pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_share, initargs=self.shared)
        return self._pool

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None


# in a process of the pool: the arguments that its calls share
_shared: tuple[Any, ...] = ()


def _share(*shared: Any) -> None:
    global _shared
    _shared = shared


def _call(function: Callable[..., R], item: Any) -> R:
    return function(*_shared, item)
