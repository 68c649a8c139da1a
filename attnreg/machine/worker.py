"""Worker: a child process that answers requests. If it ends early, the error has its signal or exit status.

The child imports no main module of a script. It writes a word when it is ready, and then reads its path, function and
arguments from a pipe. So the parent never blocks on a process that has ended.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

# seconds until a process has started and has its arguments; on a slow disk the import of torch takes one minute
STARTING = 120.0
# seconds that a killed process has to end
_ENDING = 10.0
# seconds between two checks that a process still runs: a child of the process may hold its pipe open
_LOOK = 0.2
_CHILD = """
import os, pickle, sys
answers = os.dup(1)
os.dup2(2, 1)
os.write(answers, sys.argv[1].encode() + b"\\n")
sys.path[:] = pickle.loads(sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), "big")))
from attnreg.machine.worker import serve
serve(answers)
"""
_READY = "ready"


class WorkerError(RuntimeError):
    """Raised if a process cannot start, has ended, or does not answer; the text says which, and how it ended.

    late: it did not answer in time, and the worker ended it.
    """

    def __init__(self, text: str, *, late: bool = False) -> None:
        super().__init__(text)
        self.late = late


class Worker:
    """A process that calls ``handle = start(*arguments)`` once, and then ``handle(request)`` for every request.

    start: a function of a module, or a class. The value of ``handle(request)`` is the answer. If ``handle.over`` is
    true after an answer, the process ends.
    """

    def __init__(self, start: Callable[..., Any], *arguments: Any) -> None:
        """Raises `WorkerError` if no process can be started. It does not wait for the process."""
        if not sys.executable:
            raise WorkerError("no process could be started: sys.executable is empty")
        self._ready = self._writes = False
        self._word = secrets.token_hex(8)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._put(sys.path)
        self._put((start, arguments))
        # -P: no module is imported from the directory in which this runs
        command = [sys.executable, "-P", "-c", _CHILD, self._word]
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        except OSError as e:
            raise WorkerError(f"no process could be started: {e.strerror or e}") from None
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, request: Any) -> None:
        """Send a request, without waiting. If it cannot be sent, `answer` raises the error."""
        self._put(request)

    def answer(self, patience: float | None = None) -> Any:
        """The answer to the oldest unanswered request. patience: seconds until the worker ends the process; None: no
        limit.

        Raises `WorkerError` for a process that ended or did not answer in time; the text says how it ended.
        """
        self.wait_until_ready(STARTING if patience is None else patience)
        return self._next(patience)

    def wait_until_ready(self, patience: float = STARTING) -> None:
        """Wait until the process has its arguments; it reads no request before that. Raises as `answer` does."""
        if not self._ready:
            answer = self._next(patience)
            assert answer == _READY, answer
            self._ready = True

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def ending(self) -> str:
        """How the process ended: ``signal 9 (SIGKILL)``, ``exit status 1``."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_ENDING)
        code = self.process.returncode
        if code is None:
            return "nothing said"
        if code >= 0:
            return f"exit status {code}"
        name = next((f" ({s.name})" for s in signal.Signals if s == -code), "")
        return f"signal {-code}{name}"

    def end(self) -> None:
        """Kill the process, and wait at most ten seconds: a GPU driver may hold it."""
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_ENDING)
        self._requests.put(None)
        if not self._writes and self.process.stdin is not None:
            self.process.stdin.close()

    def _next(self, patience: float | None) -> Any:
        until = math.inf if patience is None else time.monotonic() + patience
        looks = 0
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, min(_LOOK, until - time.monotonic())))
            except queue.Empty:
                # its last output may still be in the pipe
                looks += not self.alive
                if looks > 1:
                    raise WorkerError(f"its process ended with {self.ending}") from None
                if time.monotonic() >= until and not looks:
                    self.end()
                    raise WorkerError(f"no answer within {patience:.0f} s", late=True) from None
                continue
            if isinstance(answer, _Ended):
                raise WorkerError(f"its process ended with {self.ending}")
            return answer

    def _put(self, value: Any) -> None:
        data = pickle.dumps(value)
        self._requests.put(len(data).to_bytes(8, "big") + data)

    def _read(self) -> None:
        """Read the output of the process, in a thread, until it ends."""
        assert self.process.stdout is not None
        try:
            with io.BufferedReader(self.process.stdout) as output:  # type: ignore[type-var]
                # skip what Python prints while it starts
                while (line := output.readline()).strip() != self._word.encode():
                    if not line:
                        return
                self._writes = True
                threading.Thread(target=self._write, daemon=True).start()
                while True:
                    self._answers.put(pickle.loads(_message(output)))
        except (OSError, ValueError, EOFError):
            pass
        finally:
            self._answers.put(_Ended())

    def _write(self) -> None:
        """Send the requests, in a thread: the pipe may be full while the process does not read."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            while (data := self._requests.get()) is not None:
                view = memoryview(data)
                while view:
                    view = view[self.process.stdin.write(view) :]
        with suppress(OSError):
            self.process.stdin.close()


class _Ended:
    """The marker after the last answer of a process."""


def serve(answers: int) -> None:
    """The child's main loop: it answers the requests of standard input. The process ends when its input ends."""
    # the parent gets an interrupt, too, and ends its processes itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    status = 0
    try:
        _serve(answers, requests)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    # sys.exit would wait for the thread that reads
    os._exit(status)


def _serve(answers: int, requests: queue.SimpleQueue[bytes]) -> None:
    start, arguments = pickle.loads(requests.get())
    handle = start(*arguments)
    _send(answers, _READY)
    while not getattr(handle, "over", False):
        _send(answers, handle(pickle.loads(requests.get())))


def _listen(requests: queue.SimpleQueue[bytes]) -> None:
    """Read requests. If the parent was killed, the input ends, and so does this process: it would keep the device."""
    with suppress(OSError, EOFError, ValueError):
        while True:
            requests.put(_message(sys.stdin.buffer))
    os._exit(1)


def _send(answers: int, value: Any) -> None:
    data = pickle.dumps(value)
    view = memoryview(len(data).to_bytes(8, "big") + data)
    while view:
        view = view[os.write(answers, view) :]


def _message(file: BinaryIO) -> bytes:
    """One message from a pipe. Raises EOFError if the pipe ends first."""
    head = file.read(8)
    data = file.read(int.from_bytes(head, "big")) if len(head) == 8 else b""
    if len(head) < 8 or len(data) < int.from_bytes(head, "big"):
        raise EOFError
    return data
