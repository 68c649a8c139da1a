"""Single calls of attnreg's function in transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface


class Layer(torch.nn.Module):
    """What a module of a model brings to its call."""

    is_causal = True
    num_key_value_groups = 1


def call(*, train: bool = False, attention_mask: Any = None, **more: Any) -> Tensor:
    """The output of one call with 4 heads, 2 KV heads and 3 tokens; ``train``: its tensors want gradients."""
    function = AttentionInterface()["attnreg"]  # type: ignore[no-untyped-call]
    shape = {"query": (1, 4, 3, 16), "key": (1, 2, 3, 16), "value": (1, 2, 3, 16)}
    given = {name: torch.randn(size, requires_grad=train) for name, size in shape.items()}
    out: Tensor = function(Layer(), *given.values(), attention_mask, **{"is_causal": True, **more})[0]
    return out
