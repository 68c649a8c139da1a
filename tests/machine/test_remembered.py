"""What `doctor` remembers of imports: successes alone, and only while nothing changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from attnreg.compile.cache import cache_file
from attnreg.machine import remembered as module
from attnreg.machine.remembered import probe_and_remember, remembered

KERNEL = "def kv_cache_shape(): ...\ndef plan(): ...\ndef write_kv(): ...\ndef forward(): ...\n"
HERE = "one GPU"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two modules that were probed. `vexed_kernel` cannot be imported."""
    place = tmp_path / "site"
    place.mkdir()
    (place / "fine_kernel.py").write_text(f"import fine_helper\n{KERNEL}")
    (place / "fine_helper.py").write_text("")
    (place / "vexed_kernel.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    found = probe_and_remember(["fine_kernel", "vexed_kernel"], HERE)
    assert (found["fine_kernel"], bool(found["vexed_kernel"])) == (None, True)
    return place


def test_a_success_is_remembered_and_a_failure_is_not(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "probe", lambda *_, **__: pytest.fail("a module was imported"))
    assert remembered(["fine_kernel"], HERE) == {"fine_kernel": None}
    assert remembered([], HERE) == {}
    assert remembered(["fine_kernel", "vexed_kernel"], HERE) is None


def memory() -> Path:
    file = cache_file("imports")
    assert file is not None
    return file


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "its file": lambda site, _: (site / "fine_kernel.py").write_text(KERNEL),
    "a file that it imports": lambda site, _: (site / "fine_helper.py").write_text("raise ValueError\n"),
    "a file that is gone": lambda site, _: (site / "fine_helper.py").unlink(),
    "a new module on the path": lambda site, _: (site / "torch.py").write_text(""),
    "a variable": lambda site, patch: patch.setenv("LD_LIBRARY_PATH", "/elsewhere"),
    "the path": lambda site, patch: patch.syspath_prepend(str(site.parent)),
    "no memory": lambda site, _: memory().unlink(),
    "a memory that others may write": lambda site, _: memory().chmod(0o666),
    "a memory that is a link": lambda site, _: (memory().rename(site / "m"), memory().symlink_to(site / "m")),
    "a memory that is cut": lambda site, _: memory().write_text(memory().read_text()[:-9]),
    "a memory of another form": lambda site, _: memory().write_text('{"key": 1, "modules": {}, "files": []}'),
    "a memory that is no object": lambda site, _: memory().write_text("[" * 100_000),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_forgets_it(change: str, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a change within the resolution of a file system's clock must count too
    os.utime(site, ns=(1, 1))
    probe_and_remember(["fine_kernel"], HERE)
    assert remembered(["fine_kernel"], HERE) is not None
    CHANGES[change](site, monkeypatch)
    assert remembered(["fine_kernel"], HERE) is None


def test_another_machine_forgets_it(site: Path) -> None:
    assert remembered(["fine_kernel"], "another GPU") is None


def test_no_value_of_a_variable_is_written(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_TOKEN", "sk-a-secret-of-mine")
    probe_and_remember(["fine_kernel"], HERE)
    text = memory().read_text()
    assert "secret" not in text
    assert json.loads(text).keys() == {"key", "modules", "files"}


def test_without_a_cache_directory_nothing_is_remembered(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert probe_and_remember(["fine_kernel"], HERE) == {"fine_kernel": None}
    assert remembered(["fine_kernel"], HERE) is None
