# mypy: disable-error-code="import-untyped"
"""The targets of kernels in Gluon: anything but SM 9.0 is refused before a kernel is compiled, which would end the
process there."""

from __future__ import annotations

import torch

from attnreg.kernels.triton.target import Target, target_of
from attnreg.runtime.interface import SpecError


def require(device: torch.device) -> Target:
    """The target for a device. Raises `SpecError` where it is not a GPU of compute capability 9.0."""
    if device.type == "cuda":
        target = target_of(device)
        if (target.backend, target.arch) == ("cuda", 90):
            return target
        found = f"{device} is {target.backend} {target.arch}"
    else:
        found = f"the device is {device}"
    raise SpecError(f"{found}; these kernels are compiled for NVIDIA GPUs of compute capability 9.0 alone")
