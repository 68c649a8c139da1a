"""Remembers which kernel modules could be imported here, so that `attnreg doctor` need not import them each time.

Only successes are kept, and only while nothing changed. These are compared: every file that the process of the imports
had loaded, every directory of Python's path, the GPUs with their drivers, and variables that loaders read.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from attnreg.compile.cache import cache_file, has_directory, others_may_write
from attnreg.files import FileError, write_text
from attnreg.machine.probe import probe

_NAME = "imports"
_MOST_BYTES = 1 << 23
# the variables by whose beginning an import may come out otherwise
_LOADERS = ("LD_", "DYLD_", "PYTHON", "CUDA", "NVIDIA", "HIP", "HSA", "ROC")
_VARIABLES = (*_LOADERS, "TRITON", "TORCH", "FLASHINFER", "ATTNREG")


def remembered(modules: Sequence[str], machine: object) -> dict[str, None] | None:
    """Module -> None for modules that could all be imported, if nothing changed since; else None.

    machine: the GPUs and their drivers; its repr is compared.
    """
    data = _read()
    if data.get("key") != _key(machine) or not set(modules) <= set(data["modules"]):
        return None
    return dict.fromkeys(modules) if all(_stamp(path) == stamp for path, stamp in data["files"].items()) else None


def probe_and_remember(modules: Sequence[str], machine: object) -> dict[str, str | None]:
    """The answers of `attnreg.machine.probe.probe`; those modules that can be imported are remembered."""
    files: set[str] = set()
    reasons = probe(modules, files=files)
    usable = [module for module, reason in reasons.items() if reason is None]
    if files and usable:
        stamps = {path: _stamp(path) for path in sorted(files)}
        _write({"key": _key(machine), "modules": usable, "files": stamps})
    return reasons


def _key(machine: object) -> str:
    """A hash of what an import may depend on beside the files that it loads."""
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES))
    paths = [(path, _stamp(path or os.curdir)) for path in sys.path]
    text = repr((sys.executable, sys.version, paths, variables, machine))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _stamp(path: str) -> list[int] | None:
    """The time of the last change and the size of a file; None if there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return [status.st_mtime_ns, status.st_size]


def _read() -> Mapping[str, Any]:
    """What was remembered; empty if there is none, or if another user could have written it."""
    file = cache_file(_NAME)
    try:
        if file is None or file.stat().st_size > _MOST_BYTES or others_may_write(os.lstat(file)):
            return {}
        data = json.loads(file.read_text(encoding="utf-8"))
        whole = isinstance(data["key"], str) and isinstance(data["modules"], list) and isinstance(data["files"], dict)
        return data if whole else {}
    # a broken file counts as no file
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _write(data: Mapping[str, Any]) -> None:
    file = cache_file(_NAME)
    with suppress(OSError, FileError):
        if file is not None and has_directory(file.parent):
            write_text(file, json.dumps(data))
