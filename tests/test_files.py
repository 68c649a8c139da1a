"""The reader of files that a user names: what it takes, and what it says of everything else."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support import ROOT

from attnreg import files
from attnreg.errors import RequestError
from attnreg.files import FileError, held, kind_of, read_json, read_text, require_directory, write_text


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


STRANGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("absent", lambda p: None, "cannot be read: No such file or directory"),
    ("directory", Path.mkdir, "cannot be read: Is a directory"),
    ("named pipe", fifo, "cannot be read: it is a named pipe"),
    ("socket", listening, "cannot be read: it is a socket"),
    ("device", lambda p: p.symlink_to("/dev/zero"), "cannot be read: it is a device"),
    ("link to nothing", lambda p: p.symlink_to("gone"), "cannot be read: it is a link to gone, where there is nothing"),
    ("circle of links", lambda p: p.symlink_to(p), "cannot be read: Too many levels of symbolic links"),
    ("too large", lambda p: p.write_bytes(b"1" * 101), "over 100 bytes: nothing that large is read"),
]


@pytest.mark.parametrize(("make", "message"), [s[1:] for s in STRANGE], ids=[s[0] for s in STRANGE])
def test_what_is_not_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], message: str
) -> None:
    # a socket's path is limited to about 100 characters
    monkeypatch.chdir(tmp_path)
    make(Path("it"))
    with pytest.raises(FileError) as e:
        read_text(Path("it"), 100, "it.yaml")
    assert str(e.value) == f"it.yaml:1:1: {message}"
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)


def test_a_file_without_permission_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "it").write_text("text")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FileError, match="it:1:1: cannot be read: Permission denied"):
        read_text(tmp_path / "it", 100)


def test_a_pipe_of_the_shell_is_read_to_its_end() -> None:
    receiving, sending = os.pipe()
    path = Path(f"/dev/fd/{receiving}")
    assert kind_of(path) == "a pipe"

    def send() -> None:
        with open(sending, "wb") as pipe:
            pipe.write(b'{"text":')
            pipe.flush()
            pipe.write(b' "in two parts"}')

    writer = threading.Thread(target=send)
    writer.start()
    try:
        assert read_json(path, 100) == {"text": "in two parts"}
    finally:
        writer.join()
        os.close(receiving)


def test_a_pipe_has_the_limit_too() -> None:
    receiving, sending = os.pipe()
    try:
        os.write(sending, b"1" * 101)
        with pytest.raises(FileError, match="over 100 bytes"):
            read_text(Path(f"/dev/fd/{receiving}"), 100)
    finally:
        os.close(receiving)
        os.close(sending)


JSON = [
    (b'{"a": 1,\n "b": }', "2:7: not JSON: Expecting value"),
    (b"[" * 100_000, "1:1: not JSON: nested too deeply"),
    (b"9" * 5000, "1:1: not JSON: a number of too many digits"),
    (b'{"a": "\xff"}', "1:8: not UTF-8 text: invalid start byte at byte 7"),
    ("{}".encode("utf-16"), "1:1: not UTF-8 text: invalid start byte at byte 0"),
]


@pytest.mark.parametrize(("data", "message"), JSON, ids=[row[1].partition(": ")[2] for row in JSON])
def test_what_is_no_json_is_said_with_its_place(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "it").write_bytes(data)
    with pytest.raises(FileError) as e:
        read_json(tmp_path / "it", 1 << 20, "it.json")
    assert str(e.value) == f"it.json:{message}"


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(b"\xef\xbb\xbf{}")
    assert read_json(tmp_path / "it", 100) == {}


UNWRITABLE: list[tuple[str, str, str]] = [
    ("no directory", "absent/it", "No such file or directory"),
    ("a directory", ".", "Is a directory"),
    ("a pipe that nobody reads", "pipe", "No such device or address"),
    ("a full device", "/dev/full", "No space left on device"),
]


@pytest.mark.parametrize(("name", "why"), [u[1:] for u in UNWRITABLE], ids=[u[0] for u in UNWRITABLE])
def test_what_is_not_written_is_said(tmp_path: Path, name: str, why: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError) as e:
        write_text(tmp_path / name, "text")
    assert str(e.value) == f"{tmp_path / name}:1:1: cannot be written: {why}"


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    for text in ("a longer text", "é"):
        write_text(tmp_path / "it", text)
        assert read_text(tmp_path / "it", 100) == text


HOLDS = """
import sys, time
from pathlib import Path
from attnreg.files import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="files are held where the system has locks of files")
def test_a_file_that_another_run_holds_is_refused_and_is_free_once_that_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    with subprocess.Popen([sys.executable, "-c", HOLDS, file], stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(FileError) as caught, held(file):
            raise AssertionError
        why = "is writing it: wait until it has ended, or name another file"
        assert str(caught.value) == f"{file}:1:1: process {other.pid} {why}"
        other.kill()
    with held(file):
        # in one process too
        with pytest.raises(FileError, match=f"process {os.getpid()} is writing it"), held(file):
            raise AssertionError
        # a link names the same file
        (tmp_path / "link").symlink_to(file)
        file.touch()
        with pytest.raises(FileError, match="is writing it"), held(tmp_path / "link"):
            raise AssertionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out.jsonl"]
    with held(file):
        pass


def test_where_there_are_no_locks_nothing_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*ignored: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", none)
    with held(tmp_path / "a"), held(tmp_path / "a"):
        pass
    monkeypatch.setattr(files, "fcntl", None)
    with held(tmp_path / "a"), held(tmp_path / "a"):
        pass
    assert not [*tmp_path.iterdir()]


def test_on_a_full_disk_a_file_is_held_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*ignored: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with held(tmp_path / "a"):
        with pytest.raises(FileError, match="another process is writing it"), held(tmp_path / "a"):
            raise AssertionError
        assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]
    assert not [*tmp_path.iterdir()]


def test_a_file_in_no_directory_cannot_be_held(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written: No such file or directory"), held(tmp_path / "no/a"):
        raise AssertionError


def test_a_current_directory_that_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_directory()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(RequestError, match="the current directory is gone"):
        require_directory()
