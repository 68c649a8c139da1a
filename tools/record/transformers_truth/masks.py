"""Masks that keep their values and the rule that they were made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from transformers_truth.sight import CPU, META

# a masked score is at or below this: some classes use -1e4 or -1e9 where others use the least float
MASKED = -9e3


class Mask(Tensor):
    """An additive or boolean mask with its values, and the rule that it was made from as long as its shape lasts."""

    rule: Callable[..., Tensor] | None
    local_size: int | None
    biased: bool

    @staticmethod
    def of(data: Tensor, rule: Callable[..., Tensor] | None, local_size: int | None) -> Mask:
        mask: Mask = data.as_subclass(Mask)
        mask.rule, mask.local_size, mask.biased = rule, local_size, False
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        masks = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Mask) and hasattr(a, "rule")]
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or not masks or out.dim() < 2:
            return out
        first = masks[0]
        name = getattr(func, "__name__", "")
        if out.shape[-2:] != first.shape[-2:] or name in ("softmax", "matmul", "baddbmm", "bmm", "__rmatmul__"):
            return out
        result = out.as_subclass(Mask)
        result.rule, result.local_size, result.biased = first.rule, first.local_size, first.biased
        if name in ("add", "add_", "__add__", "__radd__", "__iadd__"):
            others = [a for a in args if isinstance(a, Tensor) and not isinstance(a, Mask)]
            result.biased |= any(o.is_floating_point() and (o.device == META or bool(o.any())) for o in others)
        return result


def make_mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
              mask_function: Callable[..., Tensor] | None = None, attention_mask: Tensor | None = None,
              local_size: int | None = None, **_: Any) -> Mask:  # fmt: skip
    """A mask that keeps its rule; takes what transformers hands to a mask function."""
    assert mask_function is not None
    zero = torch.zeros((), dtype=torch.long, device=CPU)

    def rule(q: Tensor, kv: Tensor) -> Tensor:
        # a rule may make tensors of its own
        with CPU:
            return mask_function(zero, zero, q, kv)

    q = torch.arange(q_length, device=CPU)[:, None] + q_offset
    kv = torch.arange(kv_length, device=CPU)[None, :] + kv_offset
    try:
        seen = rule(q, kv)
    except (RuntimeError, IndexError):
        by_kv = torch.vmap(rule, in_dims=(None, 0))
        seen = torch.vmap(by_kv, in_dims=(0, None))(q[:, 0], kv[0])
    seen = seen.expand(q_length, kv_length)
    data = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    return Mask.of(data.expand(batch_size, 1, q_length, kv_length), rule, local_size)
