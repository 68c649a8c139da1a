"""A cache of transformers whose layers keep a packed format, in pages that attnreg's backends store into and read.

The cache gets new keys and values before padding is known. So a layer of it only holds them, and returns stand-ins for
all keys and values. attnreg's attention function then stores the new ones and attends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from attnreg.integrations.tensors import autocast, autocasts
from attnreg.integrations.transformers.batches import VarlenBatch
from attnreg.integrations.transformers.forms.releases import recognising
from attnreg.integrations.transformers.forms.stand_ins import behind_of, stand_ins
from attnreg.runtime.interface import BatchMetadata, KVCache, UnclaimedError
from attnreg.runtime.layer import Attention

# the packed formats' rows load as vectors in blocks of any multiple of 16
BLOCK_SIZE = 16


class PackedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values in pages.

    kv_dtype: the packed format. columns: the length of transformers' rectangles of keys, padding included. firsts: the
    column of each request's first token, known after the first call; ``columns`` for a request without a token. Token i
    of request b is row ``i % 16`` of the block ``i // 16 * requests + b``, so new blocks follow the old ones.
    """

    is_croppable = True
    is_sliding: bool = False
    unread = (
        "keys or values of a packed KV cache, which attnreg's attention function alone decodes; register without "
        "kv_dtype, or load the model with the name that was registered with it"
    )

    def __init__(self, kv_dtype: str, sliding: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kv_dtype, self.is_sliding = kv_dtype, sliding
        self.columns = 0
        self.firsts: list[int] | None = None
        self._pages: KVCache | None = None
        self._new: tuple[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kv_dtype}, {self.columns} columns, {self.bytes} bytes)"

    @property
    def bytes(self) -> int:
        """The bytes of the pages."""
        return 0 if self._pages is None else sum(x.numel() * x.element_size() for x in self._pages[:2])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stand-ins for all keys and values, [batch, KV heads, columns, size]."""
        if self._new is not None:
            raise UnclaimedError("keys of an earlier call were never attended to by attnreg: the cache lacks them", "")
        if autocasts(key_states.device):
            # cast like the query, because the kernel takes one dtype
            key_states, value_states = autocast(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._new = key_states, value_states
        self.columns += key_states.shape[2]
        return stand_ins(self, key_states, value_states, self.columns)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    # the name before transformers 5.2x
    get_max_cache_shape = get_max_length

    def refusal(self, varlen: VarlenBatch, queries: int) -> str | None:
        """The reason why a batch cannot attend to these pages; None if it can."""
        firsts, new = _firsts(varlen), self._new
        if new is not None and new[0].shape[2] != queries:
            return f"its {queries} queries are not those of the {new[0].shape[2]} new keys"
        if varlen.crossed or varlen.padding_queries is not None or firsts is None:
            return "its padding lies between or behind tokens" if not varlen.crossed else "it attends to another text"
        if varlen.key_stop != self.columns or varlen.seq_lens != [self.columns - first for first in firsts]:
            return "its padding lies between or behind tokens"
        before = self.columns - (0 if new is None else queries)
        # a request that has no token yet may begin at any new column
        if self.firsts is not None and (
            len(firsts) != len(self.firsts)
            or any(a != b and min(a, b) < before for a, b in zip(firsts, self.firsts, strict=True))
        ):
            return f"its requests begin at {firsts}, and those of the cache at {self.firsts}"
        return None

    def rows(
        self, layer: Attention, varlen: VarlenBatch
    ) -> tuple[Tensor | None, Tensor | None, KVCache, BatchMetadata]:
        """The rectangles of new keys and values, the pages with room for them, and the batch that stores and attends.

        None if an earlier call has stored these keys and values, which layers share.
        """
        self.firsts, requests = _firsts(varlen), len(varlen.seq_lens)
        pages = self._grown(layer, requests, -(-max(1, *varlen.seq_lens) // BLOCK_SIZE))
        key, value = self._new or (None, None)
        self._new = None
        memo = "compressed", requests, len(pages.key) // requests, key is None
        batch = varlen.blocks.get(memo)
        if batch is None:
            batch = varlen.blocks[memo] = _batch(varlen, len(pages.key) // requests, store=key is not None)
        return key, value, pages, batch

    def _grown(self, layer: Attention, requests: int, blocks: int) -> KVCache:
        before, there = self._pages, 0 if self._pages is None else len(self._pages.key) // requests
        shape = layer.kv_cache_shape(1)
        if before is not None and (before.key.shape[1:], before.value.shape[1:]) != (shape.key[1:], shape.value[1:]):
            raise UnclaimedError(
                f"the cache has pages {[*before.key.shape[1:]]} and {[*before.value.shape[1:]]}, of another layer; "
                f"this one keeps {[*shape.key[1:]]} and {[*shape.value[1:]]}: make a cache for its model",
                "",
            )
        if before is None or blocks > there:
            self._pages = layer.new_kv_cache(max(blocks, there + there // 4) * requests, self.device)
            for old, new in zip(before or (), self._pages, strict=False):
                if isinstance(old, Tensor):
                    new[: len(old)] = old
        assert self._pages is not None
        return self._pages

    def reset(self) -> None:
        self._pages = self._new = self.firsts = None
        self.columns, self.is_initialized = 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Removes this number of last columns if it is negative or 0; else keeps this number of first columns."""
        kept = self.columns + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self.columns)
        self.columns = max(kept, 0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.firsts is not None:
            self.batch_select_indices(torch.arange(len(self.firsts)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._pages is None or self.firsts is None:
            return
        requests = len(self.firsts)
        # indices may also be truth values or negative numbers, as in transformers' layers
        which = torch.arange(requests, device="cpu")[indices.cpu()]
        chosen = which.to(self.device)
        key, value = (
            x.view(-1, requests, *x.shape[1:]).index_select(1, chosen).flatten(0, 1)
            for x in (self._pages.key, self._pages.value)
        )
        self._pages = self._pages._replace(key=key, value=value)
        self.firsts = [self.firsts[i] for i in which.tolist()]

    def offload(self) -> None:
        raise UnclaimedError("a packed cache stays on its device: generate without offloading", "")


class WholeSlidingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """An uncompressed layer with a window. It keeps all keys, because it shares its mask with packed layers."""

    is_sliding = True


def held_by(key: Tensor, value: Tensor) -> PackedLayer | None:
    """The packed layer that the keys and values of a call stand for; None for plain tensors."""
    behind = behind_of(key, value)
    return behind if isinstance(behind, PackedLayer) else None


def packed_cache(config: Any, packs: dict[int, bool], kv_dtype: str, name: str) -> DynamicCache:
    """A cache for a model's config. packs: whether the layer of an index keeps the format. Raises `UnclaimedError`."""
    with recognising("transformers' DynamicCache"):
        cache = DynamicCache(config=config.get_text_config(decoder=True))
        sliding = {i for i, layer in enumerate(cache.layers) if type(layer) is DynamicSlidingWindowLayer}
        whole = any(packs.get(i) for i in sliding)
        for i, layer in enumerate(cache.layers):
            if packs.get(i):
                if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                    raise UnclaimedError(f"layer {i} keeps a {type(layer).__name__}, which has no packed form", name)
                cache.layers[i] = PackedLayer(kv_dtype, i in sliding)
            elif whole and i in sliding:
                cache.layers[i] = WholeSlidingLayer()  # type: ignore[no-untyped-call]
        return cache


def _firsts(varlen: VarlenBatch) -> list[int] | None:
    """The column of each request's first token, the number of columns without one; None if some tokens have holes."""
    firsts = varlen.first_keys
    lengths = varlen.seq_lens
    return firsts and [first if n else varlen.key_stop for first, n in zip(firsts, lengths, strict=True)]


def _batch(varlen: VarlenBatch, blocks: int, *, store: bool) -> BatchMetadata:
    """The batch of a mask over the pages of `PackedLayer`."""
    requests, device = len(varlen.seq_lens), varlen.device
    request = torch.arange(requests, dtype=torch.int32, device="cpu")
    table = torch.arange(blocks, dtype=torch.int32, device="cpu") * requests + request[:, None]
    spans = [torch.arange(s - q, s, device="cpu") for q, s in zip(varlen.query_lens, varlen.seq_lens, strict=True)]
    at = torch.cat(spans)
    owner = torch.repeat_interleave(request.long(), torch.tensor(varlen.query_lens, device="cpu"))
    slots = (at // BLOCK_SIZE * requests + owner) * BLOCK_SIZE + at % BLOCK_SIZE
    return BatchMetadata.build(
        varlen.query_lens,
        varlen.seq_lens,
        device=device,
        block_table=table.to(device, non_blocking=True),
        slot_mapping=slots.to(device, non_blocking=True) if store else None,
        causal=varlen.band.causal,
        mm_prefix=varlen.mm_prefix,
    )
