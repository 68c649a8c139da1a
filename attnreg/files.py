"""Reads and writes the files that a user names. Only regular files and the shell's pipes are read, up to a size."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from attnreg.errors import Location, Problem, RequestError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_UNKNOWN = "out of reach"
# the help for files that `outside` refuses
ALLOW = "give --allow-outside (in Python: allow_outside=True) where you trust who wrote it"
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


class FileError(ValueError):
    """Raised for a file that cannot be read or written; ``problem`` has the place and the fault."""

    def __init__(self, file: str, message: str, line: int = 1, column: int = 1) -> None:
        self.problem = Problem(Location(file, line, column), message)
        super().__init__(str(self.problem))

    def __reduce__(self) -> tuple[type[FileError], tuple[str, str, int, int]]:
        where = self.problem.where
        return FileError, (where.file, self.problem.message, where.line, where.column)


def kind_of(path: Path) -> str:
    """The kind of file at a path, such as ``a directory``; "" if there is no file.

    An anonymous pipe, which a shell names /dev/stdin or /dev/fd/63, is ``a pipe``.
    """
    try:
        mode = os.stat(path).st_mode
    except ValueError:  # a NUL in the name
        return ""
    except OSError as e:
        if e.errno not in _ABSENT:
            return _UNKNOWN
        return f"a link to {os.readlink(path)}, where there is nothing" if os.path.islink(path) else ""
    if stat.S_ISFIFO(mode) and os.path.realpath(path).startswith(("/proc/", "/dev/fd/")):
        return "a pipe"
    return _KINDS.get(stat.S_IFMT(mode), "not a regular file")


def outside(name: str, folder: Path, start: Path | None = None) -> str:
    """Why a name in data is not a file or directory below a folder; "" if it is one, or if it does not exist.

    name: a relative path from the folder. start: a directory that replaces the folder as the base of the name; the name
    may then be absolute. Links are followed, and must not lead out of the folder.
    """
    try:
        place = os.path.realpath(os.path.join(start or folder, name))
        root = os.path.realpath(folder)
        if os.path.isabs(name) and start is None:
            return "is an absolute path"
        if os.path.commonpath([root, place]) != root:
            return f"leads out of {'the current directory' if folder == Path() else f'{folder}{os.sep}'}"
    except ValueError:  # a NUL in the name, or another drive
        return "" if "\0" in name else f"leads out of {folder}{os.sep}"
    kind = kind_of(Path(place))
    return f"is {kind}" if kind not in ("", _KINDS[stat.S_IFREG], _KINDS[stat.S_IFDIR]) else ""


def require_directory() -> None:
    """Raises `RequestError` if the current directory is gone: PyTorch would end the process with an unclear message."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise RequestError("the current directory is gone", "change to one that exists") from None


def read_bytes(path: Path, limit: int, label: str = "") -> bytes:
    """The bytes of a file, which messages call ``label``. Raises `FileError` for a file of more than ``limit`` bytes.

    It never waits for a writer: a named pipe is refused. A pipe of the shell is read to its end.
    """
    label = label or str(path)
    try:
        kind = kind_of(path)
        if kind not in ("a regular file", "a directory", "a pipe", _UNKNOWN, ""):
            raise FileError(label, f"cannot be read: it is {kind}")
        # without O_NONBLOCK, some files of /proc wait for data
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        if kind == "a pipe":
            os.set_blocking(descriptor, True)
        with open(descriptor, "rb") as file:
            data = file.read(limit + 1) or b""
    except OSError as e:
        raise FileError(label, f"cannot be read: {e.strerror or e}") from None
    except ValueError as e:
        raise e if isinstance(e, FileError) else FileError(label, f"cannot be read: {e}") from None
    if len(data) > limit:
        raise FileError(label, f"over {limit:,} bytes: nothing that large is read")
    return data


def first_line(path: Path, limit: int) -> bytes:
    """The first line of a regular file; nothing where there is none, or it has more than ``limit`` bytes."""
    if kind_of(path) != _KINDS[stat.S_IFREG]:
        return b""
    with suppress(OSError), open(path, "rb") as file:
        line = file.readline(limit + 1)
        return line if len(line) <= limit else b""
    return b""


def read_text(path: Path, limit: int, label: str = "") -> str:
    """The text of a file, read with `read_bytes`. Raises `FileError` for text that is not UTF-8."""
    data = read_bytes(path, limit, label)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        data = e.object  # without a byte order mark
        line, column = data.count(b"\n", 0, e.start) + 1, e.start - data.rfind(b"\n", 0, e.start)
        raise FileError(label or str(path), f"not UTF-8 text: {e.reason} at byte {e.start}", line, column) from None


def read_json(path: Path, limit: int, label: str = "") -> object:
    """The value in a JSON file, read with `read_text`. Raises `FileError` with the place of a fault."""
    return parse_json(read_text(path, limit, label), label or str(path))


def parse_json(text: str, label: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> object:
    """The value of JSON text from a file that messages call ``label``. Raises `FileError` with the place of a fault.

    pairs: the function from an object's keys and values to its value; by default a dict with the last of repeated keys.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as e:
        raise FileError(label, f"not JSON: {e.msg}", e.lineno, e.colno) from None
    except ValueError:
        raise FileError(label, "not JSON: a number of too many digits") from None
    except RecursionError:
        raise FileError(label, "not JSON: nested too deeply") from None


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to a file. Raises `FileError`; it never waits for the reader of a named pipe.

    A regular file is replaced after the new one is complete, so that it never has a mix of both.
    """
    try:
        if kind_of(path) in ("", _KINDS[stat.S_IFREG]):
            _replace(os.path.realpath(path), text)
        else:
            _write(path, os.O_TRUNC | getattr(os, "O_NONBLOCK", 0), text)
    except (OSError, ValueError) as e:
        raise FileError(str(path), f"cannot be written: {getattr(e, 'strerror', None) or e}") from None


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Lock a file that a run writes, until the run ends. Raises `FileError` with the process number if another run has
    it.

    The lock is on a file beside it, ``NAME.lock``. A lock that a killed run has left is free. Without locks in the file
    system, and for anything but a regular file, nothing is locked.
    """
    if fcntl is None or kind_of(path) not in ("", _KINDS[stat.S_IFREG]):
        yield
        return
    lock = f"{os.path.realpath(path)}.lock"
    descriptor = _locked(path, lock)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                os.unlink(lock)
            os.close(descriptor)


def _locked(path: Path, lock: str) -> int | None:
    """The descriptor of a lock that this process now holds; None if the file system has no locks."""
    assert fcntl is not None
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except OSError as e:
            raise FileError(str(path), f"cannot be written: {e.strerror or e}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the previous owner may have removed the file after this process opened it
            if os.path.exists(lock) and os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                # on a full disk the lock has no process number
                with suppress(OSError):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"{os.getpid()}\n".encode())
                return descriptor
        except BlockingIOError:
            number = os.pread(descriptor, 20, 0).strip()
            os.close(descriptor)
            who = f"process {int(number)}" if number.isdigit() else "another process"
            raise FileError(str(path), f"{who} is writing it: wait until it has ended, or name another file") from None
        except OSError:
            with suppress(OSError):
                os.unlink(lock)
            os.close(descriptor)
            return None
        os.close(descriptor)


def _replace(path: str, text: str) -> None:
    new = f"{path}.{os.getpid()}.new"
    try:
        _write(new, os.O_EXCL, text)
        if os.path.exists(path):
            os.chmod(new, stat.S_IMODE(os.stat(path).st_mode))
        os.replace(new, path)
    except OSError:
        if os.path.lexists(new):
            os.unlink(new)
        raise


def _write(path: str | Path, flags: int, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o666)
    os.set_blocking(descriptor, True)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fsync(file.fileno())
