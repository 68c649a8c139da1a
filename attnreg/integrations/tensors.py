"""What integrations that get tensors of torch share: the platform of a device, and outputs without gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnreg.conformance import devices
from attnreg.runtime.interface import UnclaimedError

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Registry


def platform_of(device: torch.device, registry: Registry) -> Platform:
    """This machine's platform for a torch device. Raises `UnclaimedError` where attnreg finds none."""
    platform = devices.platform_of(device, registry)
    if platform is None:
        word = devices.word_of(device)
        raise UnclaimedError(f"the tensors are on {device}, and attnreg finds no such platform here", word)
    return platform


def in_forward_mode() -> bool:
    """Whether PyTorch differentiates in forward mode."""
    return forward_ad._current_level >= 0


def refuse_tangents(*inputs: Any, cure: str) -> None:
    """Raises `UnclaimedError` where an input carries a tangent of forward-mode differentiation.

    A kernel writes its output without one, and the derivative of everything after it would silently be another.
    """
    if not in_forward_mode():
        return
    unpack: Any = forward_ad.unpack_dual
    if any(isinstance(x, Tensor) and unpack(x).tangent is not None for x in inputs):
        raise UnclaimedError(f"attnreg computes no derivatives in forward mode; {cure}", "attnreg")


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
