"""The arguments of a call of transformers' attention function: which attnreg serves, ignores or refuses.

An argument that changes the result is served or refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.runtime.interface import UnclaimedError

# arguments that do not change attention: positions, bookkeeping, and what the mask already expresses
HARMLESS = frozenset(
    {
        "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "input_ids", "inputs_embeds", "is_causal",
        "labels", "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch", "output_hidden_states",
        "position_embeddings", "position_ids", "return_dict", "token_type_ids", "use_cache",
    }
)  # fmt: skip
# arguments that change the result wherever they are given: a user cannot have them ignored
_MEANT = frozenset(
    {
        "alibi", "attention_bias", "bias", "block_indices", "block_mask", "head_mask", "indices", "output_attentions",
        "relative_bias", "sinks", "temperature", "use_alibi", "window", "window_size",
    }
)  # fmt: skip


class CallArguments(NamedTuple):
    """The arguments of one call of transformers' attention function that attnreg uses, as transformers passes them.

    query [batch, heads, queries, size], key and value [batch, KV heads, keys, size(_v)]. Keys and values may be lazy
    or stand-ins. Only a call without a mask uses causal and window. causal None: the module's attribute decides.
    sinks: [heads]. chosen: [batch, queries, chosen] the keys that an indexer selected. query_sinks:
    [batch, heads, queries, 1] a sink for each query. boundaries: [sequences + 1] the bounds of sequences in one row.
    """

    module: torch.nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    causal: bool | None = None
    scale: Any = None
    window: Any = None
    softcap: Any = None
    sinks: Tensor | None = None
    bias: Tensor | None = None
    chosen: Tensor | None = None
    query_sinks: Tensor | None = None
    boundaries: Tensor | None = None


def validate_ignored(names: tuple[str, ...]) -> None:
    """Raises ValueError if ``names`` are no strings, or if one names an argument that changes the result."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        example = f"({names!r},)" if isinstance(names, str) else "('grid_thw',)"
        raise ValueError(f"ignore is {names!r}; expected names of arguments, such as {example}")
    meant = sorted(_MEANT & set(names))
    if meant:
        raise ValueError(
            f"ignore names {', '.join(meant)}, which changes what attention computes: it cannot be ignored"
        )


def refuse_unknown(
    module: torch.nn.Module, dropout: float, more: Mapping[str, Any], harmless: frozenset[str], engine: str
) -> None:
    """Raises `UnclaimedError` for arguments that may change the result and that attnreg does not serve."""
    if dropout:
        raise UnclaimedError(f"dropout is {dropout}; attnreg is for inference: call model.eval()", engine)
    for name, value in more.items():
        if value is None or value is False or name in harmless:
            continue
        cure = f", or register(ignore=({name!r},)) if attention does not need it" if name not in _MEANT else ""
        raise UnclaimedError(
            f"{type(module).__name__} passes {name} to its attention, and attnreg does not serve it; use another "
            f"attn_implementation{cure}",
            engine,
        )


def causal_of(module: torch.nn.Module, mask: Any, queries: int) -> bool:
    """Whether a module is causal by its attribute.

    Raises `UnclaimedError` for several queries without a mask in a module that is causal by its attribute alone. In
    eager attention such queries see every key; in PyTorch's attention they see no later key. attnreg's masks are never
    None, so such a class makes no mask.
    """
    causal: bool = getattr(module, "is_causal", True)
    if mask is None and queries > 1 and causal:
        raise UnclaimedError(
            f"{type(module).__name__} passes no mask to its attention, and its attribute says that it is causal. Eager "
            "attention then sees every key, PyTorch's attention no later key. Load it with the attn_implementation "
            "that you mean, or pass is_causal",
            "attnreg",
        )
    return causal


def number(name: str, value: Any, *, whole: bool = False) -> Any:
    """A number from a number or a tensor of one element; None stays None. Raises `UnclaimedError` for other values."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is not None and (isinstance(value, bool) or not isinstance(value, int if whole else int | float)):
        said = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise UnclaimedError(f"{name} is {said}; expected {'an integer' if whole else 'a number'}", "attnreg")
    return value


# a tensor's argument, the kind of its elements, and its shape among these sizes; None stands for any size
_TENSORS: dict[str, tuple[str, tuple[str | int | None, ...]]] = {
    "attention_mask": ("bool or float", ("batch", "heads", "queries", "keys")),
    "position_bias": ("float", ("batch", "heads", "queries", "keys")),
    "s_aux": ("float", ("heads",)),
    "sinks": ("float", ("batch", "heads", "queries", 1)),
    "indices": ("int", ("batch", "queries", None)),
}


def validate_tensors(module: torch.nn.Module, sizes: Mapping[str, int], tensors: Mapping[str, Any]) -> None:
    """Raises `UnclaimedError` for a tensor that is of another kind or does not broadcast to the shape of its argument.

    sizes: those of the call, by the names in its shapes. tensors: by the names of the arguments, None where not given.
    """
    for name, value in tensors.items():
        if value is None:
            continue
        kinds, names = _TENSORS[name]
        shape = [sizes.get(n, n) if isinstance(n, str) else n for n in names]
        if isinstance(value, Tensor) and _kind(value) in kinds and _broadcasts(value, shape):
            continue
        said = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise UnclaimedError(f"{name} of {type(module).__name__} is {said}; expected {kinds} [{wanted}]", "attnreg")


def _kind(x: Tensor) -> str:
    return "bool" if x.dtype == torch.bool else "float" if x.is_floating_point() else "int"


def _broadcasts(x: Tensor, shape: list[Any]) -> bool:
    return x.ndim == len(shape) and all(
        n in (1, wanted) or wanted is None for n, wanted in zip(x.shape, shape, strict=True)
    )
