"""Caches compiled bundled registries in the user's cache directory, from one process to the next.

Compiling one takes most of a cold command: it imports the parser, validates the files and builds the tables. A cached
registry counts only if all its inputs are unchanged. The inputs are every bundled table, the first lines of the samples
beside them, the code that compiles, and Python's version. The file must belong to this user, and no other user may be
able to write it. It can name only attnreg's own classes and a few of Python's. If it cannot be read or written, the
registry is compiled. It may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from attnreg.compile.inputs.bundled import bundled_registries
from attnreg.compile.inputs.measured import MAX_HEAD
from attnreg.files import first_line
from attnreg.registry import Registry

# a time before Python read any other module of attnreg. It is read from sys.modules, because this module may not import
# the package `attnreg`
_BEGAN: float = vars(sys.modules["attnreg"])["_BEGAN"]
_PACKAGE = Path(__file__).resolve().parent.parent
# the folders of the code that makes a registry
_CODE = (".", "compile", "compile/inputs", "compile/schema", "compile/source", "language")
_MOST_BYTES = 1 << 24
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
# names in a cached registry that do not belong to the modules of _OWN
_PLAIN = {("builtins", "frozenset"), ("functools", "partial"), ("_operator", "eq")}
# an unfinished file: its name ends with the numbers of the process and the thread that write it
_UNFINISHED = re.compile(r".+-[0-9a-f]{16}-[\w-]+\.([0-9]{1,18})\.[0-9]{1,20}")
_OWN = ("attnreg.errors", "attnreg.registry", "attnreg.language.")


def cached(name: str, compiled: Callable[[], Registry]) -> Registry:
    """A bundled registry from the cache; if it is not there, from ``compiled()``, and the cache keeps it."""
    file = cache_file(name)
    stamp = None if file is None else _stamp()
    if file is None or stamp is None:
        return compiled()
    registry = _read(file, stamp)
    if registry is None:
        registry = compiled()
        # not cached if the files changed meanwhile
        if _stamp() == stamp:
            _write(file, stamp, registry)
    return registry


def _stamp() -> bytes | None:
    """A hash of all inputs of a bundled registry; None if the code's files changed after this process began."""
    digest = hashlib.sha256(f"{sys.implementation.cache_tag} {sys.version}".encode())
    try:
        code = [file for part in _CODE for file in _files(_PACKAGE / part, ".py")]
        if not code or any(os.stat(file).st_ctime >= _BEGAN for file in code):
            return None
        places = bundled_registries().values()
        tables = [file for place in places for file in _files(place, ".yaml")]
        samples = [place / "measurements" for place in places]
        for file in (file for place in samples if place.is_dir() for file in _files(place, ".jsonl")):
            digest.update(first_line(Path(file), MAX_HEAD))
        for file in (*code, *tables):
            with open(file, "rb") as opened:
                data = opened.read()
            digest.update(f"{file[-40:]} {len(data)}\n".encode())
            digest.update(data)
    except OSError:
        return None
    return digest.digest()


def _files(directory: Path, suffix: str) -> list[str]:
    return sorted(entry.path for entry in os.scandir(directory) if entry.name.endswith(suffix))


def cache_file(name: str) -> Path | None:
    """The cache file of a name, such as a registry's, of this installation; None if there is no cache directory."""
    if not hasattr(os, "geteuid"):
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = hashlib.sha256(os.fsencode(_PACKAGE)).hexdigest()[:16]
    return Path(home, "attnreg", f"{name}-{place}-{sys.implementation.cache_tag}") if os.path.isabs(home) else None


def _method(words: frozenset[Any], name: str) -> Any:
    """A method of a frozenset of words; some predicates are such methods."""
    if type(words) is not frozenset:
        raise pickle.UnpicklingError(f"{name} is no method of a set")
    return getattr(words, name)


class _Writer(pickle.Pickler):
    """Pickles each dataclass as its class with arguments: pickle's own form takes three times as long to read."""

    def reducer_override(self, value: Any) -> Any:
        """The class and the arguments of a dataclass; pickle handles all other values itself."""
        if isinstance(value, type) or not is_dataclass(value):
            return NotImplemented
        return type(value), tuple(getattr(value, f.name) for f in fields(value) if f.init)


class _TableUnpickler(pickle.Unpickler):
    """Reads only the classes and functions that a registry consists of."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or the function of a name; ``getattr`` is allowed only for methods of a frozenset."""
        if (module, name) == ("builtins", "getattr"):
            return _method
        if (module, name) in _PLAIN or module.startswith(_OWN):
            found = super().find_class(module, name)
            if (module, name) in _PLAIN or getattr(found, "__module__", None) == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a registry")


def pickled(registry: Registry) -> bytes:
    """A registry as bytes, which `unpickled` reads: the same in every version of Python."""
    buffer = io.BytesIO()
    _Writer(buffer, pickle.HIGHEST_PROTOCOL).dump(registry)
    return buffer.getvalue()


def unpickled(data: bytes) -> Registry:
    """The registry of some bytes of `pickled`. Raises whatever pickle raises for other bytes."""
    registry = _TableUnpickler(io.BytesIO(data)).load()
    if not isinstance(registry, Registry):
        raise pickle.UnpicklingError("the bytes hold no registry")
    return registry


def _read(file: Path, stamp: bytes) -> Registry | None:
    """The registry in a file; None if its stamp differs, or if another user could have written the file."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            if others_may_write(os.fstat(opened.fileno())):
                return None
            if opened.read(len(stamp)) != stamp:
                return None
            digest, data = opened.read(hashlib.sha256().digest_size), opened.read(_MOST_BYTES)
        if hashlib.sha256(data).digest() != digest:
            return None
        return unpickled(data)
    # a broken file counts as no file
    except Exception:
        return None


def _write(file: Path, stamp: bytes, registry: Registry) -> None:
    """Write a registry to its file. Several processes may do so: each renames a complete file into place."""
    new = f"{file}.{os.getpid()}.{threading.get_ident()}"
    try:
        if not has_directory(file.parent):
            return
        _sweep(file.parent)
        data = pickled(registry)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(b"".join((stamp, hashlib.sha256(data).digest(), data)))
        os.replace(new, file)
    except BaseException as e:
        # the disk may be full: remove the incomplete file
        with suppress(OSError):
            os.unlink(new)
        if not isinstance(e, OSError):
            raise


def has_directory(directory: Path) -> bool:
    """Whether the cache directory exists now. It makes at most this directory and its parent, and nothing in /."""
    above = next(parent for parent in (directory, *directory.parents) if parent.exists())
    # for root with a user's home: write no file that the user cannot replace
    if os.stat(above).st_uid != os.geteuid():
        return False
    if above not in (directory, directory.parent, directory.parent.parent) or above == Path(directory.anchor):
        return False
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return True


def others_may_write(status: os.stat_result) -> bool:
    """Whether another user could have written a file of this status. A link counts as such a file."""
    return status.st_uid != os.geteuid() or bool(status.st_mode & _OTHERS_MAY_WRITE) or not stat.S_ISREG(status.st_mode)


def _sweep(directory: Path) -> None:
    """Remove the unfinished files of processes that no longer run."""
    for entry in os.scandir(directory):
        if (left := _UNFINISHED.fullmatch(entry.name)) is not None:
            try:
                os.kill(int(left[1]), 0)
            except ProcessLookupError:
                with suppress(OSError):
                    os.unlink(entry.path)
            # the process belongs to another user, or the number is too large
            except (OSError, OverflowError):
                continue
