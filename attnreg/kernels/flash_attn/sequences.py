"""Sequences: a batch as the arguments that every version of FlashAttention takes, and what all adapters refuse.

All lengths stay on the device; the host knows their upper bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call

# the kernels load vectors of this many bytes
ALIGNMENT = 16
# the most rows of a tile of FlashAttention 3
LARGEST_TILE = 192


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """A batch as FlashAttention takes it.

    query_starts, key_starts: prefix sums, int32; key_starts is None with a block_table. left, right: the window, -1 for
    none. num_keys: rows of packed keys; 0 with a block_table. square: every request has as many queries as keys.
    uniform: all requests have equally many queries, and equally many keys, and at least one of each. square and uniform
    are True only if the host knows it.
    """

    num_tokens: int
    num_keys: int
    query_starts: Tensor
    key_starts: Tensor | None
    seq_lens: Tensor
    block_table: Tensor | None
    max_query_len: int
    max_key_len: int
    causal: bool
    left: int
    right: int
    slot_mapping: Tensor | None
    square: bool
    uniform: bool

    @classmethod
    def of(cls, spec: AttentionSpec, batch: BatchMetadata) -> Sequences:
        """The sequences of a batch. Queries are aligned to the last keys."""
        causal, key_starts, num_keys = batch.causal is True, None, 0
        left, right = spec.sides(causal)
        queries, keys = batch.host_starts.diff(), batch.host_lens
        if not batch.paged and batch.key_start_loc is None:
            # queries and keys are the same tokens; a request may use fewer of the keys
            key_starts, num_keys = batch.query_start_loc, batch.num_tokens
        elif not batch.paged:
            key_starts, num_keys = batch.key_start_loc, int(keys.sum())
        lengths = {*zip(queries.tolist(), keys.tolist(), strict=True)}
        return cls(
            num_tokens=batch.num_tokens,
            num_keys=num_keys,
            query_starts=batch.query_start_loc,
            key_starts=key_starts,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            max_query_len=batch.max_query_len,
            max_key_len=batch.max_seq_len,
            causal=causal,
            left=left,
            right=right,
            slot_mapping=batch.slot_mapping,
            square=all(q == k for q, k in lengths),
            uniform=len(lengths) == 1 and all(q and k for q, k in lengths),
        )

    def keys(self, call: Call, layout: str = "NHD") -> tuple[Tensor, Tensor]:
        """The pages [num_blocks, block_size, num_kv_heads, size] of a cache in ``layout``, or the packed keys and
        values without padding.
        """
        if self.block_table is not None:
            assert call.kv_cache is not None
            key, value = call.kv_cache.key, call.kv_cache.value
            return (key.transpose(1, 2), value.transpose(1, 2)) if layout == "HND" else (key, value)
        key, value = call.packed
        return key[: self.num_keys], value[: self.num_keys]

    def most(self, spec: AttentionSpec) -> tuple[int, int]:
        """The most queries and the most keys of a request, as FlashAttention is told.

        From them it chooses tiles, and drops a window that holds every key. For a batch_invariant layer the numbers are
        so large that both choices are the same in each batch.

        Source: hopper/flash_api.cpp#mha_fwd and #get_pagedkv_tma, hopper/tile_size.h, csrc/flash_attn/flash_api.cpp.
        """
        if "batch_invariant" not in spec.features:
            return self.max_query_len, self.max_key_len
        return max(self.max_query_len, LARGEST_TILE + 1, self.right + 2), max(self.max_key_len, self.left + 2)

    def nothing(self, call: Call) -> bool:
        """Whether there is nothing to compute: no query, or no key at all. Without keys, it stores the empty rows."""
        if not call.query.shape[0] or not self.num_tokens:
            return True
        if self.block_table is not None or self.num_keys:
            return False
        call.output[: self.num_tokens] = 0
        if call.lse is not None:
            call.lse[:, : self.num_tokens] = -torch.inf
        return True


def aligned(x: Tensor) -> Tensor:
    """A tensor whose rows begin at multiples of 16 bytes: itself, or a copy."""
    size = x.element_size()
    if x.data_ptr() % ALIGNMENT or any(s * size % ALIGNMENT for s in x.stride()[:-1]):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def refuse_unaligned(backend: str, **tensors: Tensor | None) -> None:
    """Raises `BatchError` for a tensor whose rows do not begin at multiples of 16 bytes, as the kernels assume."""
    for name, x in tensors.items():
        if x is None or not x.numel():
            continue
        size = x.element_size()
        if x.data_ptr() % ALIGNMENT or any(s * size % ALIGNMENT for s in x.stride()[:-1]):
            at = f"strides {tuple(x.stride())}, address {x.data_ptr() % ALIGNMENT} past a multiple of {ALIGNMENT}"
            raise BatchError([f"{name} has {at}: {backend} loads vectors of {ALIGNMENT} bytes; align its rows"])


def store_sinks(sinks: Tensor, call: Call, lse: Tensor, plan: Sequences) -> Tensor:
    """Adds sinks to an output that a kernel computed without them; returns the LSE with them, [heads, rows]."""
    sinks = sinks.float()[:, None]
    # a row without a key may have a sink of -inf, and -inf - -inf is NaN
    share = torch.sigmoid(lse - sinks).masked_fill(lse == -torch.inf, 0.0).mT[..., None]
    store_rows(call.output, call.output.float() * share, plan)
    return torch.logaddexp(lse, sinks)


def store_rows(target: Tensor, computed: Tensor, plan: Sequences) -> None:
    """Copies the computed rows [rows, ...] of the batch's tokens; other rows of the target keep their content.

    The device reads the number of tokens. The target may have more rows than ``computed``.
    """
    target = target[: computed.shape[0]]
    exists = torch.arange(target.shape[0], device=target.device) < plan.query_starts[-1]
    exists = exists.view(-1, *[1] * (target.ndim - 1))
    target.copy_(torch.where(exists, computed.to(target.dtype), target))
