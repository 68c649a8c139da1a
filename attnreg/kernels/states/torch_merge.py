"""The merge of partial states in PyTorch, for devices that Triton does not compile for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# float32 numbers of a state that are merged at once
_ELEMENTS = 2**20


class TorchMerge:
    """The merge of any states; arguments as for `attnreg.kernels.states.triton_merge.TritonMerge`."""

    def __init__(self, *tensors: Tensor | None) -> None:
        # nothing is prepared
        pass

    def run(
        self,
        output: Tensor,
        output_lse: Tensor | None,
        prefixes: Tensor,
        prefix_lses: Tensor,
        suffix: Tensor,
        suffix_lse: Tensor,
        output_scale: Tensor | None,
        tokens_with_prefix: int,
    ) -> None:
        """Writes the merged states; arguments as for `attnreg.kernels.states.triton_merge.TritonMerge.run`."""
        stacked = prefixes.ndim == 4
        all_states = [*(prefixes if stacked else (prefixes,)), suffix]
        all_lses = [*(prefix_lses if stacked else (prefix_lses,)), suffix_lse]
        num_tokens, num_heads, head_size = output.shape
        step = max(1, _ELEMENTS // (num_heads * head_size))
        begin = 0
        while begin < num_tokens:
            # no piece has tokens of both kinds, so that no prefix is read past the tokens that have one
            has_prefix = begin < tokens_with_prefix
            end = min(begin + step, tokens_with_prefix if has_prefix else num_tokens)
            first = 0 if has_prefix else -1
            states = [state[begin:end] for state in all_states[first:]]
            merged, merged_lse = _merged(states, [lse[:, begin:end].T for lse in all_lses[first:]])
            if output_scale is not None:
                largest = torch.finfo(output.dtype).max
                merged = (merged / output_scale).clamp_(-largest, largest)
            output[begin:end] = merged.to(output.dtype)
            if output_lse is not None:
                output_lse[:, begin:end] = merged_lse.T
            begin = end


def _merged(states: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The merged state [tokens, heads, head_size] and its LSE [tokens, heads], both float32."""
    lses = [torch.where(lse == torch.inf, -torch.inf, lse) for lse in lses]
    pivot = lses[0]
    for lse in lses[1:]:
        pivot = torch.maximum(pivot, lse)
    # all states empty: -inf less -inf is no number
    pivot = torch.where(pivot == -torch.inf, 0.0, pivot)
    total = torch.zeros_like(pivot)
    for lse in lses:
        total += torch.exp(lse - pivot)
    no_keys = total == 0
    total = torch.where(no_keys, 1.0, total)
    # -0.0, because 0.0 + -0.0 would lose the sign of a state that is alone
    merged = torch.full(states[0].shape, -0.0, dtype=torch.float32, device=pivot.device)
    for state, lse in zip(states, lses, strict=True):
        weight = (torch.exp(lse - pivot) / total)[..., None]
        # an empty state may hold NaN
        merged += torch.where((lse == -torch.inf)[..., None], -0.0, state.float()) * weight
    return torch.where(no_keys[..., None], 0.0, merged), torch.where(no_keys, -torch.inf, pivot + torch.log(total))
