"""Workers: call a function in child processes, so that a crash ends neither the other calls nor this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from attnreg.machine.worker import Worker, WorkerError

T = TypeVar("T")
R = TypeVar("R")
# the most processes in a row that end before they begin an item, for any cause and by themselves
_MOST_STARTS, _MOST_OF_ITSELF = 12, 3


class Ended(NamedTuple):
    """The result of a call whose process ended: how it ended."""

    how: str


class _Failed(NamedTuple):
    error: Exception


class Workers:
    """Processes that call functions with the same first arguments; with ``jobs`` None, this process calls them.

    ended: how each process ended that did so outside a call; a new process replaces it.
    """

    def __init__(self, jobs: int | None, *shared: Any) -> None:
        self.jobs = jobs
        self.shared = shared
        self.ended: list[str] = []
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._over = True
            self.ended += [f"its process ended with {w.ending} between two cases" for w in self._idle if not w.alive]
            workers = [*self._idle, *self._busy]
        for worker in workers:
            worker.end()
        for thread in self._threads:
            thread.join()

    def map(self, function: Callable[..., R], items: Sequence[T]) -> Iterator[tuple[T, R | Ended]]:
        """Each item with the result of ``function(*shared, item)``, in order; `Ended` for an item that ends its
        process.

        Raises `attnreg.machine.worker.WorkerError` if several processes in a row end before they begin.
        """
        if self.jobs is None:
            yield from ((item, function(*self.shared, item)) for item in items)
            return
        left, done = iter(range(len(items))), queue.SimpleQueue[tuple[int, Any]]()

        def work() -> None:
            while not self._over:
                with self._lock:
                    index = next(left, None)
                if index is None:
                    break
                try:
                    result: Any = self._call(function, items[index])
                # a process that does not begin, or an argument that pickle cannot send: `map` raises the error
                except Exception as e:
                    result = _Failed(e)
                done.put((index, result))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.jobs, len(items)))]
        self._threads += threads
        for thread in threads:
            thread.start()
        found: dict[int, Any] = {}
        for index, item in enumerate(items):
            while index not in found:
                number, result = done.get()
                if isinstance(result, _Failed):
                    raise result.error
                found[number] = result
            yield item, found.pop(index)

    def _call(self, function: Callable[..., R], item: T) -> R | Ended:
        endings: list[WorkerError] = []
        while True:
            worker = self._worker()
            worker.ask((function, item))
            try:
                worker.wait_until_ready()
            except WorkerError as e:
                self._drop(worker)
                endings.append(e)
                of_itself = sum("signal" not in str(ending) for ending in endings)
                if self._over or e.late or len(endings) == _MOST_STARTS or of_itself == _MOST_OF_ITSELF:
                    raise WorkerError("; ".join(map(str, endings)), late=e.late) from None
                with self._lock:
                    self.ended.append(f"{e} before it began")
                continue
            try:
                answer: R = worker.answer()
            except WorkerError as e:
                self._drop(worker)
                return Ended(str(e))
            with self._lock:
                self._busy.discard(worker)
                self._idle.append(worker)
            return answer

    def _worker(self) -> Worker:
        """An idle process, or a new one."""
        with self._lock:
            if self._over:
                raise WorkerError("the run is over")
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    break
                self.ended.append(f"its process ended with {worker.ending} between two cases")
            else:
                worker = Worker(_Caller, *self.shared)
            self._busy.add(worker)
            return worker

    def _drop(self, worker: Worker) -> None:
        worker.end()
        with self._lock:
            self._busy.discard(worker)


class _Caller:
    """The callable in a child process: it calls functions with the shared arguments."""

    def __init__(self, *shared: Any) -> None:
        self.shared = shared

    def __call__(self, request: tuple[Callable[..., Any], Any]) -> Any:
        function, item = request
        return function(*self.shared, item)
