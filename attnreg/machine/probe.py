"""Probes kernel modules: whether each can be imported here and has the functions of the contract.

An import may hang, crash or end the process, so each is tried in a child process.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from attnreg.contract import missing_functions
from attnreg.errors import escaped, in_words

# seconds for one import; the longest is that of torch on a slow disk
LIMIT = 60.0
_CHILD = """
import json, sys
given = json.load(sys.stdin)
sys.path[:] = given["path"]
from attnreg.machine.probe import answer
answer(given["modules"], given["limit"])
"""
_FRAME = re.compile(r'^  File "(?!<)(.+)", line (\d+) in', re.MULTILINE)


def probe(modules: Sequence[str], limit: float = LIMIT, *, files: set[str] | None = None) -> dict[str, str | None]:
    """Module -> None if it can be imported and has the functions of the contract, else the reason in words.

    - limit: seconds after which one import counts as hanging.
    - files: a set that gets the files that the processes of the imports had loaded at their ends.
    """
    reasons: dict[str, str | None] = {}
    left = list(dict.fromkeys(modules))
    while left:
        found, begun, ending, loaded = _run(left, limit)
        if files is not None:
            files.update(loaded)
        reasons |= found
        if begun is None and not found:
            # the process ended before the first module
            return reasons | dict.fromkeys(left, ending)
        if begun is not None:
            reasons[begun] = ending
        left = [module for module in left if module not in reasons]
    return {module: reasons[module] for module in modules}


def _run(modules: Sequence[str], limit: float) -> tuple[dict[str, str | None], str | None, str, list[str]]:
    """The answers of a process, the module during whose import it ended, if any, how it ended, and its files."""
    if not sys.executable:
        return {}, None, "there is no Python to probe it with: sys.executable is empty", []
    given = json.dumps({"path": sys.path, "modules": list(modules), "limit": limit})
    # files instead of pipes: a process that a module starts may keep a pipe open
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            # -P: Python imports no module from the working directory
            command = [sys.executable, "-P", "-c", _CHILD]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err)
        except OSError as e:
            return {}, None, f"Python cannot be started to probe it: {e}", []
        with child:
            stuck = False
            try:
                # the process ends itself after the limit; this timeout is for a process that cannot
                child.communicate(given.encode(), timeout=limit * len(modules) + LIMIT)
            except subprocess.TimeoutExpired:
                stuck = True
                child.kill()
        out.seek(0)
        err.seek(0)
        lines, errors = out.read().decode().splitlines(), err.read().decode(errors="replace")
    answers: dict[str, str | None] = {}
    begun: str | None = None
    loaded: list[str] = []
    for line in lines:
        module, *reason = json.loads(line)
        if not module:
            loaded = reason
        elif reason:
            answers[module], begun = reason[0], None
        else:
            begun = module
    return answers, begun, _ending(child.returncode, errors, limit, stuck), loaded


def _ending(status: int, errors: str, limit: float, stuck: bool) -> str:
    """How a process ended before its last answer. stuck: whether `_run` had to kill it."""
    _, timeout, traceback = errors.rpartition("Timeout (")
    if timeout or stuck:
        frame = _FRAME.search(traceback)
        where = escaped(f" (in {frame[1]}:{frame[2]})") if frame else ""
        return f"its import did not end within {limit:g} s{where}"
    if status < 0:
        name = next((s.name for s in signal.Signals if s == -status), f"signal {-status}")
        return f"its import crashed the process: {name}"
    return f"its import ended the process with exit status {status}"


def answer(modules: Sequence[str], limit: float) -> None:
    """Prints two lines of JSON for each module, before its import and after it with the reason. Ends the process.

    The last line has no module, and the files that the process has loaded.
    """
    # the output of a module must not mix with the answers
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in modules:
        print(json.dumps([module]), file=out, flush=True)
        faulthandler.dump_traceback_later(limit, exit=True)
        reason = _reason(module)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps([module, reason]), file=out, flush=True)
    print(json.dumps(["", *loaded_files()]), file=out, flush=True)
    # ends without waiting for threads and exit handlers of the modules
    os._exit(0)


def _reason(module: str) -> str | None:
    try:
        missing = missing_functions(importlib.import_module(module))
    # an import may raise anything, SystemExit and KeyboardInterrupt included
    except BaseException as e:
        return escaped(" ".join(in_words(e).split()))
    return f"{module} has no {', '.join(missing)}" if missing else None


def loaded_files() -> list[str]:
    """The files of the modules and of the shared libraries that this process has loaded."""
    files = {str(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        files |= {path for line in lines if (path := line[73:]).startswith("/") and not path.endswith(" (deleted)")}
    return sorted(file for file in files if not file.startswith(("/dev/", "/memfd:", "/proc/")))
