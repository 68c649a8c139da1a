"""Kernel modules beside versions of packages that they do not fit: an error that names the versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.registries import tiny

from attnreg import Registry
from attnreg.errors import VersionError
from attnreg.loader import load_kernel

Write = Callable[[str, str], Registry]
CONTRACT = "kv_cache_shape = plan = write_kv = forward = print\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Installs a version of lib and a kernel module with some code, whose row needs lib>=2."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(version: str, code: str) -> Registry:
        info = tmp_path / f"lib-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: lib\nVersion: {version}\n")
        # of another name in each test, because a package stays imported
        package = tmp_path / f"of_{tmp_path.name}"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "attention.py").write_text(code)
        row = tiny.row(module=f"{package.name}.attention", contract=1, requires={"packages": ["lib>=2"]})
        return tiny.load({"A": row}, trust=[package.name])

    return written


def test_a_version_that_fits(write: Write) -> None:
    assert load_kernel(write("2.1", CONTRACT), "A").plan is print


def test_one_that_is_too_old_is_refused_by_name_before_the_import(write: Write) -> None:
    with pytest.raises(VersionError, match=r"^A needs lib>=2; installed is lib 1\.9$"):
        load_kernel(write("1.9", "raise SystemExit('imported')"), "A")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("from math import gone", "ImportError: cannot import name 'gone' from 'math'"),
        ("import math; math.gone", "AttributeError: module 'math' has no attribute 'gone'"),
    ],
)
def test_a_name_that_a_later_one_moved_is_said_with_the_version(write: Write, code: str, why: str) -> None:
    with pytest.raises(VersionError, match=rf"^of_\w+\.attention does not fit lib 9\.0: {why}"):
        load_kernel(write("9.0", code), "A")


@pytest.mark.parametrize(
    ("code", "error"),
    [("import no_such_module_of_all", ModuleNotFoundError), ("raise RuntimeError('broken')", RuntimeError)],
)
def test_other_failures_are_their_own(write: Write, code: str, error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        load_kernel(write("9.0", code), "A")
    assert type(raised.value) is error
