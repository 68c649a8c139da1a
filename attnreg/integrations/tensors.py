"""What integrations that get tensors of torch share: the platform of a device, and outputs without gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnreg.platforms import Platform
from attnreg.runtime.interface import UnclaimedError

if TYPE_CHECKING:
    from attnreg.registry import Registry


def platform_of(device: torch.device, registry: Registry) -> Platform:
    """This machine's platform for a torch device; of several GPUs, the one of the device's architecture."""
    word = {"cuda": "rocm" if torch.version.hip else "cuda"}.get(device.type, device.type)
    platforms = [p for p in Platform.detect_all(registry.vocabulary) if p.platform == word]
    if word == "cuda" and len(platforms) > 1:
        arch = "sm{}{}".format(*torch.cuda.get_device_capability(device))
        platforms = [p for p in platforms if p.arch == arch]
    if not platforms:
        raise UnclaimedError(f"the tensors are on {device}, and attnreg finds no such platform here", word)
    return platforms[0]


class _NoBackward(torch.autograd.Function):
    """Returns its input, and raises RuntimeError where a gradient of it is computed."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, cure: str, *inputs: Tensor) -> Tensor:
        ctx.cure = cure
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(f"attnreg computes no gradients; {ctx.cure}")


def without_gradient(out: Tensor, *inputs: Any, cure: str) -> Tensor:
    """``out``, of which a gradient raises RuntimeError with the cure if some input would have one."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _NoBackward.apply(out, cure, *tensors)  # type: ignore[no-any-return, no-untyped-call]
    return out
