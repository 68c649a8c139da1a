"""`attnreg new backend`: the package that it writes is accepted as it is, and it overwrites nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.pages.schemas import validator

from attnreg.compile.source.yaml_source import Document

FILES = {
    "pyproject.toml",
    "zephyr_attn/__init__.py",
    "zephyr_attn/attnreg.yaml",
    "zephyr_attn/kernels.py",
    "tests/test_zephyr_attn.py",
}


@pytest.fixture
def written(run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a new package."""
    monkeypatch.chdir(tmp_path)
    assert run("new", "backend", "ZEPHYR_ATTN").status == 0
    return tmp_path / "zephyr-attn"


def test_the_files_of_a_new_package(written: Path) -> None:
    assert {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()} == FILES
    project = tomllib.loads((written / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"attnreg.registries": {"zephyr-attn": "zephyr_attn"}}
    validator("overlay").validate(Document.load(written / "zephyr_attn/attnreg.yaml").data)
    assert not [path for path in written.rglob("*") if path.is_file() and "$" in path.read_text()]


def test_nothing_is_overwritten(run: Callable[..., Any], written: Path) -> None:
    kernel = written / "zephyr_attn/kernels.py"
    kernel.write_text("mine")
    (written / "pyproject.toml").unlink()
    status, out, err = run("new", "backend", "ZEPHYR_ATTN")
    assert (status, out) == (2, "")
    assert "is there already, and is not overwritten" in err
    assert kernel.read_text() == "mine"
    assert not (written / "pyproject.toml").exists()
    assert run("new", "backend", "ZEPHYR_ATTN", "-o", "other").status == 0
    assert (written.parent / "other/zephyr_attn/kernels.py").is_file()


REFUSED = ["zephyr", "ZEPHYR ATTN", "../ZEPHYR", "A__B", "_A", "1A", "A" * 61, "", "TORCH", "JSON", "CPU_ATTN", "Ä"]


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_are_refused(
    run: Callable[..., Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run("new", "backend", name)
    assert (status, out) == (2, "")
    assert "\n  help: " in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow(reason="builds and installs a wheel, and runs the cases of a kernel")
def test_a_new_package_is_verified_as_it_is(written: Path, tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(wheels)]
    subprocess.run(build, cwd=written, check=True, capture_output=True)
    (wheel,) = wheels.glob("zephyr_attn-*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True, capture_output=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ATTNREG", "TRITON"))}
    environment |= {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    for arguments, said in [
        (["verify", "ZEPHYR_ATTN", "--device", "cpu", "--size", "claims"], "ZEPHYR_ATTN: proven; "),
        (["check"], ", 0 findings"),
    ]:
        command = [sys.executable, "-m", "attnreg", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        assert said in " ".join(done.stdout.split())
