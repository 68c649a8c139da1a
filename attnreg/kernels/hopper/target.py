# mypy: disable-error-code="import-untyped"
"""Where kernels in Gluon run. Targets other than SM 9.0 are refused before a kernel is compiled, because compiling for
them would end the process. Batches that these kernels do not compute go to TRITON_ATTN's."""

from __future__ import annotations

from collections.abc import Set
from typing import TypeGuard

import torch
from torch import Tensor

from attnreg.kernels.triton.target import Target, target_of
from attnreg.runtime.interface import AttentionSpec, DeviceError


def require(device: torch.device) -> Target:
    """The target for a device. Raises `DeviceError` if it is not a GPU of compute capability 9.0."""
    if device.type == "cuda":
        target = target_of(device)
        if (target.backend, target.arch) == ("cuda", 90):
            return target
        found = f"{device} is {target.backend} {target.arch}"
    else:
        found = f"the device is {device}"
    raise DeviceError(f"{found}; these kernels are compiled for NVIDIA GPUs of compute capability 9.0 alone")


def computes(causal: bool | Tensor, spec: AttentionSpec, features: Set[str]) -> TypeGuard[bool]:
    """Whether kernels for SM 9.0 compute a batch of a layer; features: those that the kernels support.

    causal: the batch's. The kernels take one value for all requests. If a batch_invariant layer may mix values, they
    compute none of its batches: a request would have other bits in a mixed batch, which TRITON_ATTN computes.
    """
    mixes = {"batch_invariant", "causal_by_request"} <= spec.features
    return isinstance(causal, bool) and not mixes and spec.features <= features
