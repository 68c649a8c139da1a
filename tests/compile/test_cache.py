"""Kept registries: equal to compiled ones, never older than what they are made of, and read from no one else's file."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

import attnreg
from attnreg import loader
from attnreg.compile import cache
from attnreg.compile.inputs import bundled
from attnreg.selection.selector import evaluate_anew

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="registries are kept where users have numbers")

GPT_OSS = attnreg.AttentionRequest(
    head_size=64, num_heads=64, num_kv_heads=8, features=frozenset({"sinks", "sliding_window"})
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "attnreg"


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the bundled registries, in their place."""
    copy = tmp_path / "registry"
    shutil.copytree(ROOT / "registry", copy, ignore=shutil.ignore_patterns("evidence", "models"))
    monkeypatch.setattr(bundled, "registry_root", lambda: copy)
    return copy


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The sources of all registries that are compiled from here on."""
    sources: list[object] = []
    compile_: Callable[..., attnreg.Registry] = loader._compiled

    def counted(source: object, *args: object) -> attnreg.Registry:
        sources.append(source)
        return compile_(source, *args)

    monkeypatch.setattr(loader, "_compiled", counted)
    return sources


def the_file(home: Path) -> Path:
    (file,) = home.iterdir()
    return file


def replace_data(file: Path, data: bytes) -> None:
    """Put other data, with its right digest, into a file that keeps a registry."""
    stamp = file.read_bytes()[:32]
    file.write_bytes(stamp + hashlib.sha256(data).digest() + data)


@pytest.mark.parametrize("name", attnreg.bundled_registries())
def test_a_kept_registry_is_the_compiled_one(name: str, home: Path, compiled: list[object]) -> None:
    first, second = attnreg.load_registry(name), attnreg.load_registry(name)
    assert compiled == [name]
    assert second == first
    assert second is not first
    # the predicates of conditions are not compared: what they answer is, with the line of each reason
    for request in (GPT_OSS, attnreg.AttentionRequest(head_size=100, kv_dtype="fp8_e5m2")):
        for arch in first.vocabulary.architectures.values():
            platform = attnreg.Platform(platform=arch.platform, arch=arch.name)
            answers = [evaluate_anew(request, platform, registry, None) for registry in (first, second)]
            assert answers[0].candidates == answers[1].candidates


@pytest.mark.slow(reason="a process of its own")
def test_a_kept_registry_selects_alike_in_another_process(home: Path) -> None:
    command = [sys.executable, "-m", "attnreg", "explain", "--platform", "cuda", "--head-size", "64", "--json"]
    done = [subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT) for _ in range(2)]
    assert done[0].stdout == done[1].stdout
    # nothing of what compiles is imported for it
    code = "import attnreg, sys; attnreg.load_registry('default'); print({'yaml', 'pydantic'} & set(sys.modules))"
    done = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)]
    assert done[0].stdout == "set()\n"


def test_a_change_of_the_tables_counts_at_once(home: Path, tables: Path, compiled: list[object]) -> None:
    before = attnreg.load_registry("vllm-0.24.0")
    file = tables / "engines" / "vllm-0.33.0" / "backends.yaml"
    text, times = file.read_text(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    # of the same length and time, in the release that this one is the difference to
    file.write_text(text.replace("summary: F", "summary: f", 1))
    os.utime(file, ns=times)
    after = attnreg.load_registry("vllm-0.24.0")
    assert (len(compiled), before == after) == (2, False)
    file.write_text(text)
    assert attnreg.load_registry("vllm-0.24.0") == before


def test_a_new_file_counts(home: Path, tables: Path, compiled: list[object]) -> None:
    attnreg.load_registry("default")
    (tables / "steps.yaml").write_text("steps: []\n")
    assert "registry/steps.yaml" in attnreg.load_registry("default").files
    assert len(compiled) == 2


def test_nothing_is_kept_of_tables_that_change_meanwhile(
    home: Path, tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps = iter([b"1" * 32, b"2" * 32])
    monkeypatch.setattr(cache, "_stamp", lambda: next(stamps))
    attnreg.load_registry("default")
    assert not home.exists()


def test_other_code_than_the_files_have_keeps_and_reads_nothing(
    home: Path, compiled: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    attnreg.load_registry("default")
    # as if the files had changed after this process began
    monkeypatch.setattr(cache, "_BEGAN", (ROOT / "attnreg" / "compile" / "compiler.py").stat().st_ctime)
    attnreg.load_registry("default")
    assert len(compiled) == 2


def test_a_change_of_the_code_counts(home: Path, compiled: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = cache._stamp()
    read = cache._files
    monkeypatch.setattr(cache, "_files", lambda place, suffix: read(place, suffix)[1:])
    assert stamp is not None
    assert cache._stamp() not in (stamp, None)


class Harmful:
    """An object whose pickle runs a command."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (f"{ROOT}/.cache/harm",)


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps(Harmful()), pickle.dumps({"a": 1})])
def test_a_file_of_something_else_is_replaced(data: bytes, home: Path, compiled: list[object]) -> None:
    registry = attnreg.load_registry("vllm-0.24.0")
    replace_data(the_file(home), data)
    assert attnreg.load_registry("vllm-0.24.0") == registry
    assert not (ROOT / ".cache" / "harm").exists()
    assert attnreg.load_registry("vllm-0.24.0") == registry
    assert len(compiled) == 2


@pytest.mark.parametrize("name", ["builtins.eval", "os.system", "builtins.getattr", "attnreg.registry.replace"])
def test_only_parts_of_a_registry_are_named(name: str) -> None:
    module, _, function = name.rpartition(".")
    reader = cache._TableUnpickler.__new__(cache._TableUnpickler)
    if name == "builtins.getattr":
        with pytest.raises(pickle.UnpicklingError, match="no method of a set"):
            reader.find_class(module, function)(os, "system")
    else:
        with pytest.raises(pickle.UnpicklingError, match="no part of a registry"):
            reader.find_class(module, function)


def test_bytes_of_a_registry_are_read_and_others_are_not() -> None:
    default = attnreg.load_registry("default")
    assert cache.unpickled(cache.pickled(default)) == default
    for data in (pickle.dumps(os.getcwd), pickle.dumps(frozenset({1})), b"nothing"):
        with pytest.raises(pickle.UnpicklingError):
            cache.unpickled(data)


@pytest.mark.parametrize("damage", ["cut", "turned"])
def test_a_damaged_file_is_replaced(damage: str, home: Path, compiled: list[object]) -> None:
    registry = attnreg.load_registry("vllm-0.24.0")
    data = the_file(home).read_bytes()
    at = len(data) // 2
    the_file(home).write_bytes(data[:at] if damage == "cut" else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert attnreg.load_registry("vllm-0.24.0") == registry
    assert the_file(home).read_bytes() != data[:at]
    assert len(compiled) == 2


def test_a_file_that_others_may_write_is_not_read(home: Path, compiled: list[object]) -> None:
    attnreg.load_registry("vllm-0.24.0")
    assert (the_file(home).stat().st_mode & 0o777, home.stat().st_mode & 0o777) == (0o600, 0o700)
    the_file(home).chmod(0o666)
    attnreg.load_registry("vllm-0.24.0")
    assert len(compiled) == 2
    # nor one that a link names
    file = the_file(home)
    file.rename(home.parent / "elsewhere")
    file.symlink_to(home.parent / "elsewhere")
    attnreg.load_registry("vllm-0.24.0")
    assert len(compiled) == 3


def test_a_file_of_another_user_is_not_read(
    home: Path, compiled: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    attnreg.load_registry("vllm-0.24.0")
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    before = the_file(home).read_bytes()
    attnreg.load_registry("vllm-0.24.0")
    # and into the directory of another nothing is written
    assert (len(compiled), the_file(home).read_bytes()) == (2, before)


@pytest.mark.parametrize("where", ["relative", "/dev/null", "/proc/none"])
def test_without_a_directory_everything_works(
    where: str, compiled: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", where)
    assert attnreg.load_registry("vllm-0.24.0") == attnreg.load_registry("vllm-0.24.0")
    assert len(compiled) == 2
    assert list(tmp_path.iterdir()) == []


def test_what_is_laid_over_a_registry_is_compiled(home: Path, compiled: list[object]) -> None:
    attnreg.load_registry("default")
    denied = {"choices": [{"deny": "FLASH_ATTN", "because": "a test"}]}
    assert attnreg.load_registry("default", denied).choices[0].backends == ("FLASH_ATTN",)
    assert attnreg.load_registry("default", trust=["mine"]).trusted == {"mine"}
    assert attnreg.load_registry("default").choices == ()
    assert len(compiled) == 3


def test_threads_that_keep_the_same_registry(home: Path) -> None:
    found: list[attnreg.Registry] = []
    threads = [threading.Thread(target=lambda: found.append(attnreg.load_registry("vllm-0.24.0"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({registry.title for registry in found}) == 1
    assert cache._read(the_file(home), the_file(home).read_bytes()[:32]) == found[0]


def test_a_full_disk_leaves_nothing_behind(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(file: Any, *mode: Any) -> Any:
        if isinstance(file, int) and mode == ("wb",):
            os.close(file)
            return Full()
        return open(file, *mode)

    monkeypatch.setattr(cache, "open", full, raising=False)
    attnreg.load_registry("default")
    assert [*home.iterdir()] == []


def test_an_interrupt_while_it_is_written_leaves_nothing_behind(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*ignored: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attnreg.load_registry("default")
    assert [*home.iterdir()] == []


def test_what_killed_processes_left_is_removed(home: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    home.mkdir(parents=True, mode=0o700)
    kept = "default-0123456789abcdef-cpython-311"
    left = {f"{kept}.{gone.pid}.140000000000000", f"other-0123456789abcdef-cpython-313.{gone.pid}.1"}
    stays = {kept, f"{kept}.{os.getpid()}.7", f"notes.{gone.pid}.1", f"{kept}.{'9' * 18}.1.txt"}
    for name in left | stays:
        (home / name).write_bytes(b"x")
    attnreg.load_registry("default")
    found = {path.name for path in home.iterdir()}
    assert stays <= found
    assert not left & found
    assert len(found) == len(stays) + 1


@pytest.mark.parametrize(
    ("variable", "value", "made"),
    [
        ("HOME", "nobody", False),
        ("HOME", "", True),
        ("XDG_CACHE_HOME", "one", True),
        ("XDG_CACHE_HOME", "one/two", False),
    ],
)
def test_no_home_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, made: bool
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / value))
    attnreg.load_registry("default")
    assert any(tmp_path.rglob("default-*")) == made
    assert any(tmp_path.iterdir()) == made


def test_nothing_is_made_in_the_root_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", lambda *ignored, **more: pytest.fail("a directory is made"))
    for place in ("/attnreg", "/absent/attnreg", "/absent/.cache/attnreg"):
        assert not cache.has_directory(Path(place))
