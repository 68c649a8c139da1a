"""The registry travels with the package and is found the same way from a checkout, an editable install and a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from support import ROOT

from attnreg.compile.inputs.bundled import joined_families
from attnreg.version import __version__

sys.path.insert(0, str(ROOT / "tools"))

from wheel_data import joined

PROBE = """
from attnreg.loader import load_registry
from attnreg.compile.inputs.bundled import registry_root
print(registry_root(), load_registry("default").title)
"""


def probe(python: Path, path: str = "") -> tuple[Path, str]:
    # the test environment lends its libraries; attnreg itself must come from where the test put it
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ATTNREG"))}
    environment["PYTHONPATH"] = path
    done = subprocess.run([python, "-c", PROBE], env=environment, capture_output=True, text=True, check=True, cwd="/")
    root, title = done.stdout.split()
    return Path(root), title


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def bare_python(directory: Path) -> tuple[Path, Path]:
    """An environment that has the libraries attnreg needs, but no attnreg; its interpreter and its site-packages."""
    venv.create(directory, with_pip=False)
    site = directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for item in Path(sysconfig.get_path("purelib")).iterdir():
        if "attnreg" not in item.name.lower() and not item.name.endswith((".pth", ".egg-link")):
            (site / item.name).symlink_to(item)
    return directory / "bin" / "python", site


def test_checkout(tmp_path: Path) -> None:
    python, _ = bare_python(tmp_path / "env")
    root, title = probe(python, path=str(ROOT))
    assert root == ROOT / "registry"
    assert title.startswith("default@")


def test_editable_install_and_wheel_read_the_same_data(tmp_path: Path, wheel: Path) -> None:
    python, site = bare_python(tmp_path / "env")
    editable, editable_site = bare_python(tmp_path / "editable")
    zipfile.ZipFile(wheel).extractall(site)
    # what an editable install leaves in site-packages: a path to the checkout
    (editable_site / "_attnreg.pth").write_text(f"{ROOT}\n")
    installed_root, installed = probe(python)
    editable_root, edited = probe(editable)
    assert installed_root == site / "attnreg" / "registry"
    assert editable_root == ROOT / "registry"
    assert installed == edited


def test_the_wheel_holds_the_data_and_nothing_of_the_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    models = ROOT / "registry/models"
    data = {str(p.relative_to(ROOT)) for p in (ROOT / "registry").rglob("*.yaml") if p.parent != models}
    data |= {str(p.relative_to(ROOT)) for p in (ROOT / "examples").rglob("config.json")}
    assert {f"attnreg/{name}" for name in data} <= set(names)
    assert "attnreg/py.typed" in names
    assert not [n for n in names if n.startswith(("tests/", "docs/", "benchmarks/", "tools/"))]
    metadata = next(n for n in names if n.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    core = [line for line in text.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert {line.split()[1].split(">")[0] for line in core} == {
        "click",
        "packaging",
        "pydantic",
        "pyyaml",
        "rich",
    }
    assert "License-Expression: Apache-2.0" in text


def test_the_wheel_is_small_and_has_each_model_family(tmp_path: Path, wheel: Path) -> None:
    """The families are one file in the wheel. Their texts, and the places in messages, are those of a checkout."""
    assert wheel.stat().st_size < 1_650_000
    zipfile.ZipFile(wheel).extractall(tmp_path)
    families = {file.stem: file.read_text(encoding="utf-8") for file in (ROOT / "registry/models").glob("*.yaml")}
    assert joined_families(tmp_path / "attnreg/registry/models") == families
    assert joined_families(ROOT / "registry/models") is None
    command = [sys.executable, "-m", "attnreg", "show", "gpt_oss", "--json"]
    shown = [
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(path)}, capture_output=True, check=True, cwd="/")
        for path in (ROOT, tmp_path)
    ]
    assert shown[0].stdout == shown[1].stdout
    assert b'"registry/models/gpt_oss.yaml:1:1"' in shown[1].stdout


def test_a_family_that_would_be_read_as_two_is_not_joined(tmp_path: Path) -> None:
    for text in ("model_type: a\n--- # b.yaml\nmodel_type: b\n", "--- # b.yaml\n", "model_type: a"):
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(ValueError, match=r"a\.yaml: a family's file is one YAML document that ends with a line"):
            joined([tmp_path / "a.yaml"])


def test_the_installed_wheel_is_the_command(tmp_path: Path, wheel: Path) -> None:
    python, site = bare_python(tmp_path / "env")
    zipfile.ZipFile(wheel).extractall(site)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ATTNREG"))}
    command = [python, "-m", "attnreg", "--version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip().endswith(__version__)


def test_the_sdist_makes_the_same_wheel(tmp_path: Path, wheel: Path) -> None:
    """What a source distribution holds is enough to build from, data included."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(tmp_path)]
    subprocess.run([*command, "--target", "sdist"], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    [source] = [path for path in tmp_path.iterdir() if path.is_dir()]
    subprocess.run([*command, "--target", "wheel"], cwd=source, check=True, capture_output=True)
    again = next(tmp_path.glob("*.whl"))
    assert again.name == wheel.name
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert {n: one.read(n) for n in one.namelist()} == {n: other.read(n) for n in other.namelist()}


def test_what_an_index_shows_is_complete(wheel: Path) -> None:
    """The metadata's description is README, as Markdown."""
    archive = zipfile.ZipFile(wheel)
    text = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    assert "Description-Content-Type: text/markdown" in text
    assert (ROOT / "README.md").read_text(encoding="utf-8").strip() in text
