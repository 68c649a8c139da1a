"""Runs the command in a process forked for it, within limits, and tells what it did beside what it printed."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# of processor time, which a busy machine stretches little, and of memory: the checks of a whole registry take 6 s
SECONDS, BYTES = 30, 500 << 20
# of the clock: a command that waits for something takes no processor time
WAITED = 120
_STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn")
_REACHES = ("socket.connect", "socket.getaddrinfo", "socket.bind", "urllib.Request")
_WRITES = os.O_WRONLY | os.O_RDWR


@dataclass
class Ran:
    """What a run did. status: the exit status, or minus the signal that ended it.

    seconds: of the processor. memory: the most bytes it had beyond those of the process that it was forked from.
    did: what it started, reached and wrote outside its directory, and the modules that it imported from there.
    """

    status: int
    printed: str
    seconds: float
    memory: int
    did: list[str] = field(default_factory=list)

    def problems(self, secrets: Sequence[str]) -> list[str]:
        """What an honest command never does, each in words. secrets: texts that no message may hold."""
        found = [f"it {one}" for one in self.did]
        found += ["it printed a secret" for secret in secrets if secret in self.printed]
        if "Traceback (most recent call last)" in self.printed or "internal error" in self.printed:
            found.append("it printed a traceback")
        if self.status not in range(4):
            found.append(
                f"it was ended by {signal.Signals(-self.status).name}" if self.status < 0 else f"status {self.status}"
            )
        if self.seconds > SECONDS:
            found.append(f"it took {self.seconds:.0f} s of the processor")
        if self.memory > BYTES:
            found.append(f"it took {self.memory >> 20} MB")
        return found


def run(
    command: Callable[[Sequence[str]], int], arguments: Sequence[str], place: Path, environment: Mapping[str, str]
) -> Ran:
    """Run a command with arguments in a directory, in a process forked from this one.

    environment: what it has beside this process's variables. What it prints, and what it did, are kept in files beside
    the directory.
    """
    printed, told = place.with_suffix(".printed"), place.with_suffix(".told")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            status = _in_child(command, arguments, place, environment, printed, told)
        finally:
            os._exit(status)
    usage = _waited(child)
    # nothing is told by one that was killed
    said = json.loads(told.read_text()) if told.exists() else {"did": [], "memory": 0}
    return Ran(
        status=os.waitstatus_to_exitcode(usage[1]),
        printed=printed.read_text(encoding="utf-8", errors="replace") if printed.exists() else "",
        seconds=usage[2].ru_utime + usage[2].ru_stime,
        **said,
    )


def _kilobytes(name: str) -> int:
    """A size of this process's memory, as Linux tells it."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) if found else 0


def _waited(child: int) -> tuple[int, int, Any]:
    end = time.monotonic() + WAITED
    while True:
        found = os.wait4(child, os.WNOHANG)
        if found[0]:
            return found
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            return os.wait4(child, 0)
        time.sleep(0.005)


def _in_child(
    command: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    place: Path,
    environment: Mapping[str, str],
    printed: Path,
    told: Path,
) -> int:
    os.setsid()
    os.chdir(place)
    os.environ |= environment
    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, number)
    # those of who tests it may write elsewhere
    sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", closefd=False, errors="replace") for n in (1, 2))  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS + 2, SECONDS + 3))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # the machine's own: what is over `BYTES` is told, and not cut
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    sys.dont_write_bytecode = True
    before = set(sys.modules)
    small = _kilobytes("VmRSS")
    did: list[str] = []
    allowed = (str(place), str(place.parent / "cache"), os.devnull)

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event in _STARTS or event in _REACHES:
            did.append(f"called {event}{given[:2]!r}"[:200])
        elif event == "open" and isinstance(given[2], int) and given[2] & _WRITES and isinstance(given[0], str | bytes):
            name = os.path.abspath(os.fsdecode(given[0]))
            if not name.startswith(allowed):
                did.append(f"opened {name} to write")

    sys.addaudithook(hook)
    try:
        status = command(arguments)
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else 1
    except BaseException:  # what a user would see as a traceback
        import traceback

        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    sys.stderr.flush()
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(place)):
            did.append(f"imported {name} from the directory")
    allowed = (str(told),)
    told.write_text(json.dumps({"did": did, "memory": (_kilobytes("VmHWM") - small) << 10}))
    return status
