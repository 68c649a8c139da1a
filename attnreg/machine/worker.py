"""Worker: a process that answers what it is asked. One that ends, at whatever moment, is named with its signal.

The process is started with nothing but the name of its protocol: it imports no main module of a script, and what it
needs follows through its pipe once it has said that it is there. So nothing waits for a process that is gone.
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

# seconds until a process is there and has its arguments; on a slow disk the import of torch takes one minute
STARTING = 120.0
# seconds that a process has to end once it was killed
_ENDING = 10.0
# seconds between two looks at whether a process still runs: one that it started may hold its pipe open
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
    """Raised for a process that cannot be started, ended, or does not answer; the text says which, and how it ended.

    late: it did not answer in time, and was ended.
    """

    def __init__(self, text: str, *, late: bool = False) -> None:
        super().__init__(text)
        self.late = late


class Worker:
    """A process that calls ``start(*arguments)`` once, and its result with every request.

    start: a function of a module, or a class. What it returns is called with a request and returns the answer; where
    its attribute ``over`` is true after that, the process ends.
    """

    def __init__(self, start: Callable[..., Any], *arguments: Any) -> None:
        """Raises `WorkerError` where no process can be started. It does not wait for the process."""
        if not sys.executable:
            raise WorkerError("no process could be started: sys.executable is empty")
        self._ready = self._writes = False
        self._word = secrets.token_hex(8)
        self._asked: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
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
        """The answer to the request that was asked first. patience: seconds until the process is ended; None: any.

        Raises `WorkerError` for a process that ended, with how, and for one that did not answer in time.
        """
        self.wait_until_ready(STARTING if patience is None else patience)
        return self._next(patience)

    def wait_until_ready(self, patience: float = STARTING) -> None:
        """Wait until the process has its arguments: before that it begins with no request. Raises as `answer` does."""
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
        """End the process, whatever it does. One that its driver holds is not waited for long."""
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_ENDING)
        self._asked.put(None)
        if not self._writes and self.process.stdin is not None:
            self.process.stdin.close()

    def _next(self, patience: float | None) -> Any:
        until = math.inf if patience is None else time.monotonic() + patience
        looks = 0
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, min(_LOOK, until - time.monotonic())))
            except queue.Empty:
                # what it wrote before it ended may still be on its way
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
        self._asked.put(len(data).to_bytes(8, "big") + data)

    def _read(self) -> None:
        """Read what the process says, in a thread, until it ends."""
        assert self.process.stdout is not None
        try:
            with io.BufferedReader(self.process.stdout) as said:  # type: ignore[type-var]
                # what the start of Python prints is not its own
                while (line := said.readline()).strip() != self._word.encode():
                    if not line:
                        return
                self._writes = True
                threading.Thread(target=self._write, daemon=True).start()
                while True:
                    self._answers.put(pickle.loads(_message(said)))
        except (OSError, ValueError, EOFError):
            pass
        finally:
            self._answers.put(_Ended())

    def _write(self) -> None:
        """Send what is asked, in a thread: a pipe may be full, and its process may not read."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            while (data := self._asked.get()) is not None:
                view = memoryview(data)
                while view:
                    view = view[self.process.stdin.write(view) :]
        with suppress(OSError):
            self.process.stdin.close()


class _Ended:
    """Stands behind the last answer of a process."""


def serve(answers: int) -> None:
    """Answer what standard input asks, in the process. It ends with its standard input, whatever it does then."""
    # an interrupt is for the run, which ends its processes itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    status = 0
    try:
        _serve(answers, asked)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    # the thread that listens would hold up a usual end
    os._exit(status)


def _serve(answers: int, asked: queue.SimpleQueue[bytes]) -> None:
    start, arguments = pickle.loads(asked.get())
    handle = start(*arguments)
    _say(answers, _READY)
    while not getattr(handle, "over", False):
        _say(answers, handle(pickle.loads(asked.get())))


def _listen(asked: queue.SimpleQueue[bytes]) -> None:
    """Take what comes. The processes of a run that was killed end here: a kernel that hangs would keep the device."""
    with suppress(OSError, EOFError, ValueError):
        while True:
            asked.put(_message(sys.stdin.buffer))
    os._exit(1)


def _say(answers: int, value: Any) -> None:
    data = pickle.dumps(value)
    view = memoryview(len(data).to_bytes(8, "big") + data)
    while view:
        view = view[os.write(answers, view) :]


def _message(file: BinaryIO) -> bytes:
    """A message of a pipe. Raises EOFError where it ends before."""
    head = file.read(8)
    data = file.read(int.from_bytes(head, "big")) if len(head) == 8 else b""
    if len(head) < 8 or len(data) < int.from_bytes(head, "big"):
        raise EOFError
    return data
