"""Functions for integrations that get torch tensors: platforms, dtypes, autocast, and refusals of tensors and modes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnreg.conformance import devices
from attnreg.runtime.interface import UnclaimedError
from attnreg.runtime.tensors import has_memory, is_traced

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Registry


def platform_of(device: torch.device, registry: Registry) -> Platform:
    """This machine's platform for a torch device. Raises `UnclaimedError` if attnreg finds none."""
    platform = devices.platform_of(device, registry)
    if platform is None:
        word = devices.word_of(device)
        raise UnclaimedError(f"the tensors are on {device}, and attnreg finds no such platform here", word)
    return platform


def unknown_dtype(dtype: str, registry: Registry) -> str | None:
    """The refusal of a dtype for which a registry has no word, as a sentence; None if it has one."""
    words = registry.vocabulary.words_of("dtype")
    return None if dtype in words else f"{registry.title} has no backend for {dtype}: it knows {', '.join(words)}"


# whether autocast is on for any device: a faster question than for one device
any_autocast = torch._C._is_any_autocast_enabled


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one device, cast as autocast casts them for PyTorch's own attention. Autocast must be on there.

    Floating tensors get autocast's dtype, but for float64.
    """
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype not in (dtype, torch.float64) else x for x in tensors)


# looked up once, because each call of attention calls them, and the look-up takes longer than the call
_interpreters, _tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state


def is_transformed() -> bool:
    """Whether PyTorch differentiates in forward mode, traces, or transforms functions, as in torch.func and vmap."""
    return forward_ad._current_level >= 0 or is_traced() or _interpreters() is not None or _tracing() is not None


def refuse_tangents(*inputs: Any, cure: str) -> None:
    """Raises `UnclaimedError` if an input carries a tangent of forward-mode differentiation.

    A kernel's output has no tangent, so every derivative after it would silently be wrong.
    """
    if forward_ad._current_level < 0:
        return
    unpack: Any = forward_ad.unpack_dual
    if any(isinstance(x, Tensor) and unpack(x).tangent is not None for x in inputs):
        raise UnclaimedError(f"attnreg computes no derivatives in forward mode; {cure}", "attnreg")


def refuse_wrapped(*inputs: Any, cure: str) -> None:
    """Raises `UnclaimedError` if a tracer records the call, or if an input is a wrapper without memory of its own.

    Wrappers are tensors inside torch.func and vmap, FakeTensors, and subclasses such as DTensor. A kernel reads memory
    by its address. For a wrapper that address means nothing, and a tracer does not see a kernel.
    """
    if is_traced() or torch._C._get_tracing_state() is not None:
        raise UnclaimedError(f"a tracer such as torch.export records this call, and sees no kernel; {cure}", "attnreg")
    for x in inputs:
        # tensors on the meta device have no memory either: `platform_of` refuses their device
        if isinstance(x, Tensor) and not (has_memory(x) or x.is_meta):
            raise UnclaimedError(
                f"a {type(x).__name__} of this call has no memory of its own, as inside torch.func, vmap or "
                f"torch.export, and kernels read memory; {cure}",
                "attnreg",
            )


class _NoBackward(torch.autograd.Function):
    """Returns its input; the computation of a gradient raises RuntimeError."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, cure: str, *inputs: Tensor) -> Tensor:
        ctx.cure = cure
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(f"attnreg computes no gradients; {ctx.cure}")


def without_gradient(out: Tensor, *inputs: Any, cure: str) -> Tensor:
    """``out``. If an input requires a gradient, computing one of ``out`` raises RuntimeError with the cure."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _NoBackward.apply(out, cure, *tensors)  # type: ignore[no-any-return, no-untyped-call]
    return out
