# mypy: disable-error-code="import-untyped"
"""Targets: the GPUs that kernels are compiled for, with their features and the sizes of their resources."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from attnreg.kernels.triton.fp8 import fp8_to_float16
from attnreg.runtime.interface import DeviceError


class Target(NamedTuple):
    """A GPU to compile for: ``backend`` and ``arch`` as Triton names them, its multiprocessors and their memory."""

    backend: str
    arch: int | str
    num_sms: int
    shared_memory: int

    @property
    def rdna(self) -> bool:
        """Whether this is one of AMD's graphics GPUs, whose warps have half the threads, and so half the registers."""
        return self.backend == "hip" and not str(self.arch).startswith("gfx9")

    @property
    def matrix_units(self) -> bool:
        """Whether Triton uses matrix units on this GPU; it does not support those before Ampere."""
        return self.backend != "cuda" or int(self.arch) >= 80

    @property
    def warpgroup_mma(self) -> bool:
        """Whether the matrix units read their operands from shared memory, for four warps at once."""
        return self.backend == "cuda" and int(self.arch) // 10 in (9, 10)

    @property
    def dependent_launch(self) -> bool:
        """Whether a kernel can start setting up while the kernel that it depends on still runs."""
        return self.backend == "cuda" and int(self.arch) >= 90

    def registers(self, warps: int) -> int:
        """The most registers of a thread with which a multiprocessor holds this many warps; 0: no limit."""
        registers = _REGISTERS // (warps * 32) // 8 * 8
        return registers if self.backend == "cuda" and registers < 256 else 0

    def converts(self, dtype: torch.dtype) -> bool:
        """Whether the hardware converts this 8-bit format. On AMD integer code does, the same on every GPU."""
        ocp = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        return ocp and self.backend == "cuda" and int(self.arch) >= 89


# registers of an NVIDIA multiprocessor
_REGISTERS = 65536
# bytes of shared memory of a block of threads
SHARED_MEMORY: dict[int | str, int] = {
    80: 166912,
    86: 101376,
    87: 166912,
    89: 101376,
    90: 232448,
    100: 232448,
    103: 232448,
    110: 232448,
    120: 101376,
    121: 101376,
    "gfx950": 163840,
}


def target_for(backend: str, arch: int | str, num_sms: int) -> Target:
    """The target with its shared memory; 64 KiB if that is unknown."""
    return Target(backend, arch, num_sms, SHARED_MEMORY.get(arch, 65536))


@functools.cache
def target_of(device: torch.device) -> Target:
    """The target for a device; on the CPU, Triton's interpreter stands for a small A100.

    Raises `DeviceError` for a device other than a GPU, if Triton compiles kernels.
    """
    if device.type != "cuda":
        # a JITFunction: Triton compiles kernels; otherwise it interprets them
        if isinstance(fp8_to_float16, triton.JITFunction):
            raise DeviceError(
                f"Triton cannot compile for {device}; move the tensors to a GPU or set TRITON_INTERPRET=1"
            )
        return target_for("interpreter", 80, 4)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return target_for("hip", properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return target_for("cuda", properties.major * 10 + properties.minor, properties.multi_processor_count)
