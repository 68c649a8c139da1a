"""Finds missing parts of an installed Triton and of the tools that it calls. It does not import Triton."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

_PCI = Path("/sys/bus/pci/devices")
_AGAIN = "install triton again, in the version that torch brings"
# the variable names an assembler other than the package's
_ASSEMBLER = "TRITON_PTXAS_PATH"


def missing_parts(platforms: Collection[str]) -> list[str]:
    """A sentence for each missing part that Triton needs to compile and launch kernels here.

    platforms: those of this machine's devices. A machine without a GPU needs no driver and no C compiler. If Triton
    itself is not installed, its own parts are not reported.
    """
    return [*_of_package(platforms), *_of_machine(platforms)]


def _of_package(platforms: Collection[str]) -> Iterator[str]:
    folder = _folder()
    if folder is None:
        return
    if not any((folder / "_C").glob("libtriton*.so")):
        yield f"triton is installed in part: {folder}/_C has no libtriton.so, its compiler; {_AGAIN}"
    # a build for AMD's GPUs has no assembler for NVIDIA's
    if "rocm" in platforms:
        return
    file = Path(os.environ.get(_ASSEMBLER) or folder / "backends" / "nvidia" / "bin" / "ptxas")
    if not file.is_file():
        yield f"triton is installed in part: {file}, its assembler for NVIDIA GPUs, is missing; {_AGAIN}"
    elif not os.access(file, os.X_OK):
        yield f"{file}, Triton's assembler for NVIDIA GPUs, cannot be executed; {_AGAIN}"


def _of_machine(platforms: Collection[str]) -> Iterator[str]:
    if "cuda" in platforms:
        if not _loads("libcuda.so.1"):
            yield "NVIDIA's driver is installed in part: there is no libcuda.so.1, through which kernels are launched"
    elif any(_displays("0x10de")):
        yield "there is an NVIDIA GPU, and no driver for it: libnvidia-ml.so.1 cannot be loaded, or finds no device"
    if {"cuda", "rocm"} & set(platforms) and _folder() is not None:
        compiler = os.environ.get("CC")
        if not (shutil.which(compiler) if compiler else shutil.which("gcc") or shutil.which("clang")):
            named = f"$CC names {compiler}, which is not there" if compiler else "neither gcc nor clang is on the path"
            yield f"Triton needs a C compiler to launch kernels: {named}"


def _folder() -> Path | None:
    """The folder of the package; None if it is not installed."""
    try:
        spec = importlib.util.find_spec("triton")
    # a broken entry of sys.path, or a module of another kind with this name
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _displays(vendor: str) -> Iterator[Path]:
    """The GPUs of a vendor on the PCI bus, whether they have a driver or not."""
    for device in sorted(_PCI.glob("*")):
        try:
            found, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        # 0x03: a display controller
        if found == vendor and kind.startswith("0x03"):
            yield device
