# mypy: disable-error-code="import-untyped"
"""What kernels in Gluon are for: another target than SM 9.0 is refused before a kernel is compiled, which would end the
process there; batches that they do not compute are TRITON_ATTN's."""

from __future__ import annotations

from collections.abc import Set
from typing import TypeGuard

import torch
from torch import Tensor

from attnreg.kernels.triton.target import Target, target_of
from attnreg.runtime.interface import AttentionSpec, DeviceError


def require(device: torch.device) -> Target:
    """The target for a device. Raises `DeviceError` where it is not a GPU of compute capability 9.0."""
    if device.type == "cuda":
        target = target_of(device)
        if (target.backend, target.arch) == ("cuda", 90):
            return target
        found = f"{device} is {target.backend} {target.arch}"
    else:
        found = f"the device is {device}"
    raise DeviceError(f"{found}; these kernels are compiled for NVIDIA GPUs of compute capability 9.0 alone")


def computes(causal: bool | Tensor, spec: AttentionSpec, features: Set[str]) -> TypeGuard[bool]:
    """Whether kernels for SM 9.0, which know these features, compute a batch of a layer.

    causal: the batch's. They take requests that are causal alike. Where a batch_invariant layer may mix them, no batch
    is computed here: its requests would have other bits in one that does.
    """
    mixes = {"batch_invariant", "causal_by_request"} <= spec.features
    return isinstance(causal, bool) and not mixes and spec.features <= features
