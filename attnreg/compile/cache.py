"""Keeps the bundled registries, compiled, in the user's cache directory, from one process to the next.

Compiling one takes most of a cold command: the parser, the models of its files, and what is made of them. What is kept
counts only where it was made of the same bytes: of every bundled table, of the first lines of the samples beside them,
of the code that compiles, and of Python. It is read only from a file of this user that no other may write, and names
nothing but attnreg's own tables. Where it cannot be read or written, the registry is compiled. It may be deleted at any
time.
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

# before any module of attnreg was read; the package itself stands above this floor
_BEGAN: float = vars(sys.modules["attnreg"])["_BEGAN"]
_PACKAGE = Path(__file__).resolve().parent.parent
# the packages that make a registry, beside the modules at the top
_CODE = (".", "compile", "compile/inputs", "compile/schema", "compile/source", "language")
_MOST_BYTES = 1 << 24
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
# what stands in a kept registry beside the classes and the predicates of these modules
_PLAIN = {("builtins", "frozenset"), ("functools", "partial"), ("_operator", "eq")}
# what a process and a thread of these numbers are writing
_UNFINISHED = re.compile(r".+-[0-9a-f]{16}-[\w-]+\.([0-9]{1,18})\.[0-9]{1,20}")
_OWN = ("attnreg.errors", "attnreg.registry", "attnreg.language.")


def kept(name: str, compiled: Callable[[], Registry]) -> Registry:
    """A bundled registry as it is kept, or else as ``compiled`` makes it, which then is kept."""
    file = _file(name)
    stamp = None if file is None else _stamp()
    if file is None or stamp is None:
        return compiled()
    registry = _read(file, stamp)
    if registry is None:
        registry = compiled()
        # of tables that changed in between nothing is kept
        if _stamp() == stamp:
            _write(file, stamp, registry)
    return registry


def _stamp() -> bytes | None:
    """A hash of all that a bundled registry is made of; None where this process runs other code than the files have."""
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


def _file(name: str) -> Path | None:
    """The file in which a registry of this installation is kept; None where this user has no directory for it."""
    if not hasattr(os, "geteuid"):
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = hashlib.sha256(os.fsencode(_PACKAGE)).hexdigest()[:16]
    return Path(home, "attnreg", f"{name}-{place}-{sys.implementation.cache_tag}") if os.path.isabs(home) else None


def _method(words: frozenset[Any], name: str) -> Any:
    """A method of a set of words, which is what some predicates are."""
    if type(words) is not frozenset:
        raise pickle.UnpicklingError(f"{name} is no method of a set")
    return getattr(words, name)


class _Writer(pickle.Pickler):
    """Writes the fields of a table as the arguments of its class: a state takes thrice as long to read."""

    def reducer_override(self, value: Any) -> Any:
        """The class and the arguments that make a value; what pickle knows by itself is left to it."""
        if isinstance(value, type) or not is_dataclass(value):
            return NotImplemented
        return type(value), tuple(getattr(value, f.name) for f in fields(value) if f.init)


class _TableUnpickler(pickle.Unpickler):
    """Reads what a registry is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or the function of a name; a method is taken of sets alone."""
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
    """The registry that a file keeps; None where it keeps none of this stamp, or is not this user's alone."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_MAY_WRITE or not stat.S_ISREG(status.st_mode):
                return None
            if opened.read(len(stamp)) != stamp:
                return None
            digest, data = opened.read(hashlib.sha256().digest_size), opened.read(_MOST_BYTES)
        if hashlib.sha256(data).digest() != digest:
            return None
        return unpickled(data)
    # a file that is broken is as good as none
    except Exception:
        return None


def _write(file: Path, stamp: bytes, registry: Registry) -> None:
    """Keep a registry. Another process may write the same file: each renames a whole one into place."""
    new = f"{file}.{os.getpid()}.{threading.get_ident()}"
    try:
        if not _has_directory(file.parent):
            return
        _sweep(file.parent)
        data = pickled(registry)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(b"".join((stamp, hashlib.sha256(data).digest(), data)))
        os.replace(new, file)
    except BaseException as e:
        # what a full disk holds of it is of no use, and takes room
        with suppress(OSError):
            os.unlink(new)
        if not isinstance(e, OSError):
            raise


def _has_directory(directory: Path) -> bool:
    """Whether the directory of kept registries is there now. It and the one above it are made: no home, none in /."""
    above = next(parent for parent in (directory, *directory.parents) if parent.exists())
    # as root with the home of a user, nothing is left there that the user cannot replace
    if os.stat(above).st_uid != os.geteuid():
        return False
    if above not in (directory, directory.parent, directory.parent.parent) or above == Path(directory.anchor):
        return False
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return True


def _sweep(directory: Path) -> None:
    """Remove what processes left that were killed while they wrote: the files with their numbers."""
    for entry in os.scandir(directory):
        if (left := _UNFINISHED.fullmatch(entry.name)) is not None:
            try:
                os.kill(int(left[1]), 0)
            except ProcessLookupError:
                with suppress(OSError):
                    os.unlink(entry.path)
            # it runs, and is another user's; or no process can have the number
            except (OSError, OverflowError):
                continue
