"""Which parts of a Triton that is installed in part are named: of its package, and of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnreg.machine import triton_parts
from attnreg.machine.triton_parts import missing_parts


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole Triton, before any other on the path, on a machine with a driver, a C compiler and no GPU on its bus."""
    folder = tmp_path / "site" / "triton"
    binaries = folder / "backends" / "nvidia" / "bin"
    (folder / "_C").mkdir(parents=True)
    binaries.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('doctor imports no triton')")
    (folder / "_C" / "libtriton.so").touch()
    (binaries / "ptxas").touch(0o755)
    (tmp_path / "gcc").touch(0o755)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "TRITON_PTXAS_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(triton_parts, "_PCI", tmp_path / "devices")
    monkeypatch.setattr(triton_parts, "_loads", lambda library: True)
    # another test may have imported the installed one
    monkeypatch.setattr(triton_parts.importlib.util, "find_spec", _find(folder))
    return folder


def _find(folder: Path):  # type: ignore[no-untyped-def]
    from importlib.machinery import PathFinder

    return lambda name: PathFinder.find_spec(name, [str(folder.parent)])


def gpu(package: Path, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    device = package.parents[1] / "devices" / "0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


def test_nothing_is_said_of_a_whole_one(package: Path) -> None:
    assert missing_parts(["cuda", "cpu"]) == missing_parts(["rocm", "cpu"]) == missing_parts(["cpu"]) == []


def test_a_package_without_its_compiler(package: Path) -> None:
    (package / "_C" / "libtriton.so").unlink()
    for platforms in (["cuda"], ["rocm"], ["cpu"]):
        [said] = missing_parts(platforms)
        assert said.startswith(f"triton is installed in part: {package}/_C has no libtriton.so, its compiler; install")


def test_a_package_without_its_assembler(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ptxas = package / "backends" / "nvidia" / "bin" / "ptxas"
    ptxas.chmod(0o644)
    # everything may be executed by root
    monkeypatch.setattr(triton_parts.os, "access", lambda path, mode: bool(Path(path).stat().st_mode & 0o111))
    [said] = missing_parts(["cuda"])
    assert said.startswith(f"{ptxas}, Triton's assembler for NVIDIA GPUs, cannot be executed; install triton again")
    ptxas.unlink()
    [said] = missing_parts(["cuda"])
    assert said.startswith(f"triton is installed in part: {ptxas}, its assembler for NVIDIA GPUs, is missing; install")
    # AMD's builds have none
    assert missing_parts(["rocm"]) == []
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(package.parents[1] / "gcc"))
    assert missing_parts(["cuda"]) == []
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/nowhere/ptxas")
    assert "/nowhere/ptxas" in missing_parts(["cuda"])[0]


def test_a_gpu_without_a_driver(package: Path) -> None:
    gpu(package)
    said = "there is an NVIDIA GPU, and no driver for it: libnvidia-ml.so.1 cannot be loaded, or finds no device"
    assert missing_parts(["cpu"]) == [said]


@pytest.mark.parametrize(("vendor", "kind"), [("0x10de", "0x020700"), ("0x1002", "0x030000")])
def test_other_devices_need_no_driver_of_nvidias(package: Path, vendor: str, kind: str) -> None:
    gpu(package, vendor, kind)
    assert missing_parts(["cpu"]) == []


def test_half_a_driver(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_parts, "_loads", lambda library: False)
    said = "NVIDIA's driver is installed in part: there is no libcuda.so.1, through which kernels are launched"
    assert missing_parts(["cuda"]) == [said]
    assert missing_parts(["rocm"]) == []


def test_no_c_compiler(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package.parents[1] / "gcc").unlink()
    said = "Triton needs a C compiler to launch kernels: neither gcc nor clang is on the path"
    assert missing_parts(["cuda"]) == missing_parts(["rocm"]) == [said]
    assert missing_parts(["cpu"]) == []
    monkeypatch.setenv("CC", "acme-cc")
    assert missing_parts(["cuda"]) == [
        said.replace("neither gcc nor clang is on the path", "$CC names acme-cc, which is not there")
    ]


def test_without_triton_nothing_of_it_is_missing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_parts.importlib.util, "find_spec", lambda name: None)
    assert missing_parts(["cuda", "cpu"]) == []
