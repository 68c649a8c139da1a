"""Plugins are those of the environment: what lies in the current directory, `python -m` or not, is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT
from support.registries.plugins import Install, install

__all__ = ["install"]

ASK_NAME = "import attnreg; print(attnreg.load_registry('default').name)"
ASK_COMMAND = "attnreg", "explain", "--registry", "default", "--arch", "sm90", "--head-size", "128", "--brief"


def asked_in(folder: Path, *arguments: str, paths: tuple[Path, ...] = ()) -> str:
    """What a fresh Python prints in a directory; ``paths`` are site directories, as that of an environment is."""
    sites = "".join(f"import site; site.addsitedir({str(path)!r})\n" for path in paths)
    (start := folder.parent / "start").mkdir(exist_ok=True)
    (start / "sitecustomize.py").write_text(sites)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ATTNREG")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (start, ROOT)))
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@pytest.mark.slow(reason="processes of their own")
@pytest.mark.parametrize("arguments", [("-c", ASK_NAME), ("-m", *ASK_COMMAND)], ids=["-c", "-m"])
def test_what_lies_in_the_current_directory_is_not_installed(arguments: tuple[str, ...], install: Install) -> None:
    checkout = install().parent
    assert "acme" not in asked_in(checkout, *arguments)
    # installed from elsewhere, it is
    (elsewhere := checkout.parent / "elsewhere").mkdir()
    assert "acme" in asked_in(elsewhere, *arguments, paths=(checkout,))
    # also where that is the current directory, which then stands in the path twice
    assert "acme" in asked_in(checkout, *arguments, paths=(checkout,))


@pytest.mark.slow(reason="processes of their own")
def test_a_package_in_the_current_directory_hides_no_plugin(install: Install) -> None:
    site = install().parent
    (checkout := site.parent / "checkout").mkdir()
    (checkout / "acme_attn").mkdir()
    (checkout / "acme_attn/__init__.py").touch()
    (checkout / "acme_attn/attnreg.yaml").write_text("backends: []\n")
    assert asked_in(checkout, "-c", ASK_NAME, paths=(site,)) == "default+acme\n"


@pytest.mark.slow(reason="processes of their own")
def test_a_plugin_that_is_installed_to_be_edited_takes_part(install: Install) -> None:
    """Its metadata are in the environment, and its package in a checkout: on the path, or known to a finder."""
    checkout = install().parent
    (site := checkout.parent / "environment").mkdir()
    (checkout / "acme-1.0.dist-info").rename(site / "acme-1.0.dist-info")
    (site / "acme.pth").write_text(f"{checkout}\n")
    assert asked_in(checkout, "-c", ASK_NAME, paths=(site,)) == "default+acme\n"
    (site / "acme.pth").write_text("import acme_finder\n")
    (site / "acme_finder.py").write_text(FINDER.format(str(checkout / "acme_attn/__init__.py")))
    assert asked_in(site.parent, "-c", ASK_NAME, paths=(site,)) == "default+acme\n"
    assert asked_in(checkout, "-c", ASK_NAME, paths=(site,)) == "default+acme\n"


FINDER = """\
import importlib.util, sys
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, {0!r}) if name == "acme_attn" else None
sys.meta_path.append(Finder)
"""
