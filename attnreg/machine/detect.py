"""Detection of this machine's devices and installed packages. It imports no package, not even torch."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform as host
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from attnreg.environment import FLAGS_VARIABLE
from attnreg.packages.installed import installed_packages
from attnreg.platforms import Platform

if TYPE_CHECKING:
    from attnreg.language.vocabulary import Vocabulary

_KFD = Path("/sys/class/kfd/kfd/topology/nodes")
_DRM = Path("/sys/class/drm")
_AMD_DRIVER = Path("/sys/module/amdgpu/version")
_CPUINFO = Path("/proc/cpuinfo")
# PCI ids of devices and of their virtual functions, from libdrm's amdgpu.ids
_AMD_DEVICES = {
    0x740F: "MI210", 0x7408: "MI250X", 0x74A0: "MI300A", 0x74A1: "MI300X", 0x74B5: "MI300X", 0x74A2: "MI308X",
    0x74A5: "MI325X", 0x74B9: "MI325X", 0x75A0: "MI350X", 0x75A3: "MI355X",
}  # fmt: skip


class Gpu(NamedTuple):
    """One GPU of this machine: its name as the driver prints it ("" if unknown), its memory in bytes, its driver."""

    platform: str
    arch: str
    name: str
    memory: int | None = None
    driver: str = ""


class _NvmlMemory(ctypes.Structure):
    """NVML's nvmlMemory_t, in bytes."""

    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


def detect(vocabulary: Vocabulary | None = None, *, environ: Mapping[str, str] | None = None) -> Platform:
    """This machine: its first accelerator or else its processor, its packages, and the flags of $ATTNREG_FLAGS.

    ``vocabulary`` (the default registry's, if None) names the packages to look for. No package is imported.
    """
    return detect_all(vocabulary, environ=environ)[0]


def detect_all(
    vocabulary: Vocabulary | None = None, *, environ: Mapping[str, str] | None = None
) -> tuple[Platform, ...]:
    """A platform for every kind of device of this machine, accelerators first and the processor last."""
    if vocabulary is None:
        from attnreg.loader import default_registry

        vocabulary = default_registry().vocabulary
    environ = os.environ if environ is None else environ
    flags = frozenset(w for w in map(str.strip, environ.get(FLAGS_VARIABLE, "").split(",")) if w)
    packages = installed_packages(vocabulary.packages)
    found = [*gpus(environ), Gpu("cpu", _processor(), "")]
    devices = dict.fromkeys((gpu.platform, gpu.arch, vocabulary.device(gpu.name)) for gpu in found)
    return tuple(
        Platform(platform=p, arch=a, flags=flags, packages=packages, device=d)  # type: ignore[arg-type]
        for p, a, d in devices
    )


def gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs of this machine, each with its memory and the version of its driver, where the system tells them."""
    return (*_nvidia(environ), *_amd(), *_intel())


def _nvidia(environ: Mapping[str, str]) -> Iterator[Gpu]:
    # NVML, not CUDA: after cuInit in a process, CUDA fails in every child that the process forks
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # no NVIDIA driver
        return
    if nvml.nvmlInit_v2():
        return
    count, major, minor, name = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(96)
    memory, driver = _NvmlMemory(), ctypes.create_string_buffer(80)
    known = not nvml.nvmlSystemGetDriverVersion(driver, len(driver))
    version = driver.value.decode(errors="replace") if known else ""
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in _visible(count.value, environ.get("CUDA_VISIBLE_DEVICES")):
        device = ctypes.c_void_p()
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
        if not (failed or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))):
            named = not nvml.nvmlDeviceGetName(device, name, len(name))
            total = None if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) else memory.total
            title = name.value.decode(errors="replace") if named else ""
            yield Gpu("cuda", f"sm{major.value}{minor.value}", title, total, version)
    nvml.nvmlShutdown()


def _visible(count: int, text: str | None) -> Iterable[int]:
    """The indices of the GPUs in CUDA_VISIBLE_DEVICES; all if it has UUIDs, as a machine rarely mixes models."""
    words = [word.strip() for word in (text or "").split(",")]
    if text is None or any(word.startswith(("GPU-", "MIG-")) for word in words):
        return range(count)
    # as in CUDA, a word that is not an index hides the devices after it
    return itertools.takewhile(range(count).__contains__, (int(w) if w.isdecimal() else -1 for w in words))


def _amd() -> Iterator[Gpu]:
    driver = _text(_AMD_DRIVER)
    for file in sorted(_KFD.glob("*/properties"), key=_number):
        try:
            numbers = dict(re.findall(r"^(gfx_target_version|device_id) (\d+)$", file.read_text(), re.MULTILINE))
        except (OSError, ValueError):
            continue
        # 90402 is gfx942, 110000 is gfx1100: major, minor and stepping, the last two in hexadecimal; 0 is a processor
        version = int(numbers.get("gfx_target_version", 0))
        if version:
            name = _AMD_DEVICES.get(int(numbers.get("device_id", 0)), "")
            arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
            yield Gpu("rocm", arch, name, _amd_memory(file.parent), driver)


def _amd_memory(node: Path) -> int | None:
    """The bytes of memory of a node of the kernel driver: the sum of its banks; None if they cannot be read."""
    sizes = [
        int(size)
        for bank in sorted(node.glob("mem_banks/*/properties"))
        for size in re.findall(r"^size_in_bytes (\d+)$", _text(bank), re.MULTILINE)
    ]
    return sum(sizes) or None


def _text(path: Path) -> str:
    """The text of a small file of the system; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _intel() -> Iterator[Gpu]:
    for card in sorted(_DRM.glob("card[0-9]*/device"), key=_number):
        try:
            vendor, device = (card / "vendor").read_text().strip(), int((card / "device").read_text(), 16)
        except (OSError, ValueError):
            continue
        # device ids of Ponte Vecchio and of Battlemage, from the Linux driver xe
        if vendor == "0x8086" and 0x0BD0 <= device <= 0x0BE5:
            yield Gpu("xpu", "xe_hpc", "")
        elif vendor == "0x8086" and 0xE200 <= device <= 0xE22F:
            yield Gpu("xpu", "xe2", "")


def _number(path: Path) -> int:
    """The number in the name of a file's directory, the sort key of devices."""
    return int(re.sub(r"\D", "", path.parent.name) or 0)


def _processor() -> str:
    machine = host.machine().lower()
    if machine in ("arm64", "aarch64"):
        return "aarch64"
    if machine in ("x86_64", "amd64"):
        try:
            flags = set(_CPUINFO.read_text(errors="replace").partition("flags")[2].partition("\n")[0].split())
        except OSError:
            flags = set()
        return "x86_64_amx" if "amx_tile" in flags else "x86_64_avx512" if "avx512f" in flags else "x86_64"
    return machine
