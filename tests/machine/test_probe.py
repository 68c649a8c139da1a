"""Probing kernel modules in a process of its own: whatever an import does there is a reason in words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.registries.plugins import KERNELS, UNFIT

from attnreg.machine import probe as probing
from attnreg.machine.probe import probe


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "acme_attn").mkdir()
    (tmp_path / "acme_attn/__init__.py").touch()
    (tmp_path / "good.py").write_text(f"print('noise')\n{KERNELS}")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("text", "reason"), UNFIT.values(), ids=UNFIT)
def test_a_module_that_cannot_be_used_and_one_after_it_that_can(text: str | None, reason: str, site: Path) -> None:
    if text is not None:
        (site / "acme_attn/kernels.py").write_text(text)
    assert probe(["acme_attn.kernels", "good"]) == {"acme_attn.kernels": reason, "good": None}
    # this process has imported neither
    assert {"acme_attn", "good"} & sys.modules.keys() == set()


def test_an_import_that_hangs_says_where(site: Path) -> None:
    (site / "slow.py").write_text("import time\n\ntime.sleep(600)\n")
    reason = f"its import did not end within 0.5 s (in {site}/slow.py:3)"
    assert probe(["good", "slow", "acme_attn"], limit=0.5) == {
        "good": None,
        "slow": reason,
        "acme_attn": "acme_attn has no kv_cache_shape, plan, write_kv, forward",
    }


def test_nothing_to_probe_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing.subprocess, "Popen", None)
    assert probe([]) == {}


def test_where_no_process_can_be_started_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", "")
    assert probe(["good"]) == {"good": "there is no Python to probe it with: sys.executable is empty"}
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    assert probe(["good"]) == {"good": "its import ended the process with exit status 7"}
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    assert probe(["good"])["good"].startswith("Python cannot be started to probe it: ")  # type: ignore[union-attr]


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (40, "signal 40")])
def test_a_signal_that_ends_an_import_is_named(site: Path, number: int, name: str) -> None:
    # the system kills a process that takes too much memory: that is no import without an end
    (site / "dying.py").write_text(f"import os\n\nos.kill(os.getpid(), {number})\n")
    assert probe(["dying", "good"]) == {"dying": f"its import crashed the process: {name}", "good": None}


def test_no_module_is_taken_from_the_directory_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "re", "tempfile"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w'); raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    assert probe(["attnreg.kernels.cpu_attn"]) == {"attnreg.kernels.cpu_attn": None}
    assert not (tmp_path / "ran").exists()
