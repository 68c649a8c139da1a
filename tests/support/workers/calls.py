"""Functions and handlers that workers of tests run in processes of their own: sound ones, and every way to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Handler:
    """Answers with what it is asked, times its factor; ends its process at a word."""

    over = False

    def __init__(self, factor: int, ballast: bytes = b"") -> None:
        self.factor = factor

    def __call__(self, request: Any) -> Any:
        if request == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if request == "exit":
            os._exit(3)
        if request == "hang":
            time.sleep(600)
        if request == "print":
            sys.stdout.write("said by a kernel\n")
            sys.stdout.flush()
            subprocess.run(["echo", "said by a program"], check=True)
        if request == "over":
            self.over = True
        if request == "large":
            return bytes(1 << 20)
        if request == "process":
            return os.getpid()
        return request if isinstance(request, str) else request * self.factor


def fails(ballast: bytes) -> Handler:
    """No handler comes of it."""
    raise ZeroDivisionError(f"after {len(ballast)} bytes")


def doubled(shared: dict[str, Any], item: int) -> int:
    """Twice the item; ends its process at the items of ``die``, each as often as it says, and waits ``seconds``."""
    time.sleep(shared.get("seconds", 0.0))
    if item in shared.get("die", ()):
        os.kill(os.getpid(), signal.SIGKILL)
    if "log" in shared:
        with Path(shared["log"]).open("a") as log:
            log.write(f"{os.getpid()}\n")
    return 2 * item


class Unwilling:
    """Ends the first ``times`` processes that it is sent to, before they begin; it counts them in a file."""

    def __init__(self, file: Path, times: int) -> None:
        self.file, self.times = file, times

    def __reduce__(self) -> Any:
        return _unwilling, (str(self.file), self.times)


def _unwilling(file: str, times: int) -> dict[str, Any]:
    number = len(Path(file).read_text()) if Path(file).exists() else 0
    if number < times:
        Path(file).write_text("x" * (number + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


class Broken:
    """Cannot be taken from the pipe."""

    def __reduce__(self) -> Any:
        return _broken, ()


def _broken() -> None:
    raise ZeroDivisionError("it cannot be made again")
