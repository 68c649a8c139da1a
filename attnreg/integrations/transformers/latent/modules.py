"""The sizes of a module's MLA layer; or the reason why the module's own code has to expand its keys.

Everything is read from the module and its tensors at each call, because weights are loaded, moved, wrapped and
quantised while a model lives. The latent form computes with the weight of kv_b_proj itself. So a module is expanded if
the call of kv_b_proj does anything else, as with a hook, an adapter, a cast or a bias.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from attnreg.integrations.transformers.latent.lazy import METHOD, Expand, Sizes
from attnreg.runtime.tensors import is_captured, is_traced

PROJECTION = "kv_b_proj"
_global: Any = torch.nn.modules.module
# PyTorch's own functions for the call of a projection: libraries that emulate other formats replace them
_FORWARD, _LINEAR = nn.Linear.forward, nn.functional.linear


class Modules:
    """The modules whose expand_kv was compared with the product of its latents and kv_b_proj."""

    def __init__(self) -> None:
        self._compared: WeakKeyDictionary[nn.Module, tuple[Expand, Sizes, bool]] = WeakKeyDictionary()

    def sizes_of(self, module: nn.Module, latent: Tensor, rope: Tensor, expand: Expand) -> Sizes | str:
        """The sizes of a module's layer; or the reason why its own code has to expand these latents."""
        linear = getattr(module, PROJECTION, None)
        why = _why_not_read(linear, latent, rope)
        if why:
            return why
        assert isinstance(linear, nn.Linear)
        sizes = _sizes(module, linear, latent, rope)
        if isinstance(sizes, str):
            return sizes
        if torch.is_grad_enabled() and any(x.requires_grad for x in (latent, rope, linear.weight)):
            return "it is called with gradients: call it under torch.no_grad() or torch.inference_mode()"
        compared = self._compared.get(module)
        if compared is None or compared[:2] != (expand, sizes):
            if is_captured(latent):
                return (
                    f"a CUDA graph is being captured, and its {METHOD} has not been compared yet: call it once before"
                )
            compared = self._compared[module] = expand, sizes, _is_product(module, linear.weight, sizes, latent, expand)
        return sizes if compared[2] else f"its {METHOD} computes other keys than {PROJECTION} of the latents"


def _why_not_read(linear: Any, latent: Any, rope: Any) -> str:
    """The reason why a projection's call computes with more than its weight; "" if it does not."""
    kind = type(linear)
    if kind is not nn.Linear:
        return f"its {PROJECTION} is a {kind.__module__}.{kind.__qualname__}, whose weight attnreg does not read"
    own = linear.__dict__
    if (
        "forward" in own
        or own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or _global._global_forward_hooks
        or _global._global_forward_pre_hooks
    ):
        return f"hooks run with its {PROJECTION}"
    if nn.Linear.forward is not _FORWARD or nn.functional.linear is not _LINEAR:
        return "nn.Linear.forward or nn.functional.linear is not PyTorch's own"
    if torch._C._len_torch_function_stack() and not all(
        type(mode) is DeviceContext
        for mode in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    ):
        return "a TorchFunctionMode is active, which may compute other products"
    if linear.bias is not None:
        return f"its {PROJECTION} has a bias"
    # before the dtypes, because autocast makes them differ
    if torch.is_autocast_enabled(latent.device.type):
        return "autocast is on, which casts at every operation"
    weight = linear.weight
    for name, x in (("weight", weight), ("latents", latent), ("rotary parts", rope)):
        if type(x) not in (Tensor, nn.Parameter):
            return f"its {name} are a {type(x).__module__}.{type(x).__qualname__}"
        if x.dtype != weight.dtype or x.device != weight.device or x.is_meta:
            other = f"the weight of its {PROJECTION} is {weight.dtype} on {weight.device}"
            return f"its {name} are {x.dtype} on {x.device}, and {other}"
    if forward_ad._current_level >= 0:
        return "derivatives in forward mode are computed"
    if torch._C._functorch.peek_interpreter_stack() is not None or is_traced():
        return "a transform of torch.func or a tracer wraps its tensors"
    return ""


def _sizes(module: nn.Module, linear: nn.Linear, latent: Tensor, rope: Tensor) -> Sizes | str:
    nope, value = (getattr(module, name, None) for name in ("qk_nope_head_dim", "v_head_dim"))
    rank, made = linear.in_features, linear.out_features
    if type(nope) is not int or type(value) is not int or nope < 1 or value < 1 or made % (nope + value):
        return (
            f"its qk_nope_head_dim is {nope!r} and its v_head_dim {value!r}, and its {PROJECTION} makes {made} numbers"
        )
    if (
        latent.ndim != 4
        or rope.ndim != 4
        or latent.shape[1] != 1
        or latent.shape[3] != rank
        or rope.shape[:3] != latent.shape[:3]
        or linear.weight.shape != (made, rank)
    ):
        return f"its latents are {list(latent.shape)} and its rotary parts {list(rope.shape)}, for a rank of {rank}"
    return Sizes(made // (nope + value), nope, rope.shape[3], value, rank)


@torch.no_grad()
def _is_product(module: nn.Module, weight: Tensor, sizes: Sizes, latent: Tensor, expand: Expand) -> bool:
    """Whether a module expands latents as the contract of MLA says, tried with a few tokens of two texts."""
    heads, nope, rope, _, rank = sizes
    c, r = (
        torch.arange(6 * size, dtype=torch.float32, device=latent.device).sin().to(latent.dtype).view(2, 1, 3, size)
        for size in (rank, rope)
    )
    key, value = expand(module, c, r)
    parts = nn.functional.linear(c[:, 0], weight).view(2, 3, heads, -1).transpose(1, 2)
    own_key = torch.cat([parts[..., :nope], r.expand(2, heads, 3, rope)], -1)
    own_value = parts[..., nope:]
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=_error(b), equal_nan=True)
        for a, b in ((key, own_key), (value, own_value))
    )


def _error(x: Tensor) -> float:
    """The largest difference that another order of sums can make."""
    largest = float(x.float().abs().nan_to_num(posinf=0.0).amax())
    return max(4 * torch.finfo(x.dtype).eps, 64 * torch.finfo(torch.float32).eps) * largest
