"""The batches of a step of continuous batching, from the arguments that transformers passes with its paged cache.

transformers passes the index of each key in its cache. It passes a block table only to attention under a flash kernel's
name. The table consists of every ``block_size``-th of these indices. It is computed on the device, once for each step
and group of layers, so a captured CUDA graph computes it from the indices at each replay.

Layers with a window store a ring of as many tokens as the window has. A single new token of a request replaces the
token that has just left the window. Then the ring is read in place, by a block table whose first block begins up to a
block before the window. Several new tokens of a request would overwrite keys that the first of them still see. So
transformers reads the window before it writes, and so does this module (`PagedGroup.update`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache as cached
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.integrations.transformers.batches import phase_of
from attnreg.integrations.transformers.forms.releases import recognising, unrecognised
from attnreg.runtime.batch import BatchMetadata
from attnreg.runtime.interface import KVCache, UnclaimedError


class PagedGroup(NamedTuple):
    """A numbered group of layers that share block tables, and one layer's cache.

    window: of the ring, None if all keys are kept. kind: transformers' name of the group. sentinel: the index that
    stands for a new key among the indices read from a ring. trash: the index for keys that are not kept.
    """

    paged: Any
    layer: int
    number: int
    kind: str
    block_size: int
    window: int | None
    cache: KVCache
    sentinel: int
    trash: int

    def read_index(self, kwargs: dict[str, Any]) -> Tensor:
        """The index of each key that a step reads; empty if every key is new."""
        with recognising("a step of continuous batching"):
            read: Tensor = kwargs["read_index"][self.number]
            return read

    def update(self, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Stores new keys and values, and returns copies of those of all requests: [keys, heads, size]."""
        update = own_update(self.paged.__class__)
        new = {"key_states": key, "value_states": value, "layer_idx": self.layer}
        if fills_kwargs(update):
            stored = update(self.paged, **new, kwargs=dict(kwargs, block_table=None))
            return tuple(x[0].transpose(0, 1) for x in stored)
        # transformers 5.17 and 5.18
        stored = update(self.paged, **new, **{name: kwargs[name] for name in ("read_index", "write_index")})
        return stored[0], stored[1]


def own_update(kind: type[Any]) -> Callable[..., Any]:
    """The storing method of transformers' paged cache, also for a class that attnreg derives from it."""
    update: Callable[..., Any] = getattr(kind, "update_of_transformers", kind.update)
    return update


@cached
def fills_kwargs(update: Callable[..., Any]) -> bool:
    """Whether a cache's update takes all arguments of a call, and puts the layer's lengths into them.

    Raises `UnclaimedError` for an update of neither form.
    """
    names = inspect.signature(update).parameters.keys()
    if names >= {"key_states", "value_states", "layer_idx", "kwargs"}:
        return True
    if names >= {"key_states", "value_states", "layer_idx", "read_index", "write_index"}:
        return False
    raise unrecognised(f"the paged cache stores by {', '.join(names)}")


def group_of(paged: Any, layer: int) -> PagedGroup:
    """The group of a layer in transformers' paged cache, found once for each cache."""
    group: PagedGroup | None = getattr(paged, "_attnreg_groups", {}).get(layer)
    if group is None:
        with recognising("transformers' paged cache"):
            group = paged.__dict__.setdefault("_attnreg_groups", {})[layer] = _group_of(paged, layer)
    return group


def validate_groups(paged: Any) -> None:
    """Raises `UnclaimedError` for a paged cache whose groups of layers have another form."""
    with recognising("transformers' paged cache"):
        allocators = getattr(paged, "layer_to_allocator", None)
        layers = [*(paged.layer_index_to_group_indices if allocators is None else allocators)]
    for layer in layers:
        group_of(paged, layer)


def _group_of(paged: Any, layer: int) -> PagedGroup:
    allocators = getattr(paged, "layer_to_allocator", None)
    if allocators is not None:
        one = allocators[layer]
        window = getattr(one, "sliding_window", None)
        pages = KVCache(*one._kv_page_views[layer])
        kinds = {id(allocator): kind for kind, allocator in paged.cache_allocators.items()}
        return PagedGroup(
            paged, layer, one.index, kinds[id(one)], one.tokens_per_page, window, pages, one.sentinel_index,
            one.write_trash_index,
        )  # fmt: skip
    # transformers 5.17 has 1 for no window
    index, place = paged.layer_index_to_group_indices[layer]
    window = None if paged.sliding_windows[layer] == 1 else paged.sliding_windows[layer]
    pages = KVCache(
        *(
            caches[place].view(-1, paged.block_size, *caches[place].shape[1:])
            for caches in (paged.key_cache, paged.value_cache)
        )
    )
    kind = "full_attention" if window is None else "sliding_attention"
    return PagedGroup(
        paged, layer, index, kind, paged.block_size, window, pages, paged.sentinel_index, paged.write_trash_index
    )


class PagedStep(NamedTuple):
    """One step of a group. in_place: keys are stored and then read in the cache; else the batch reads copies."""

    batch: BatchMetadata
    in_place: bool


class _Sizes(NamedTuple):
    """The lengths of a step on the device and on the host. exact: the host's are the lengths, else upper bounds."""

    query_start_loc: Tensor
    key_start_loc: Tensor
    queries: list[int]
    keys: list[int]
    max_queries: int
    max_keys: int
    exact: bool


def step_of(group: PagedGroup, kwargs: dict[str, Any], device: torch.device, *, copied: bool) -> PagedStep:
    """The batch of a step for the layers of a group, kept on a tensor that is made for the step.

    copied: no backend reads the cache in place. For a captured graph, the batch is computed during the capture, so that
    replays compute it too.
    """
    if kwargs.get("block_table") is not None:
        raise UnclaimedError("block_table is given, which transformers fills for its flash kernels alone", "attnreg")
    steps, capturing = _kept(kwargs, device)
    kind = group.number, capturing, copied
    step: PagedStep | None = steps.get(kind)
    if step is None:
        step = steps[kind] = _step(group, _sizes(group, kwargs, device), kwargs, copied)
    return step


def step_phase(group: PagedGroup, kwargs: dict[str, Any], device: torch.device) -> str:
    """The phase of all requests of a step; "any" if they differ or only bounds of their lengths are known."""
    sizes = _sizes(group, kwargs, device)
    return phase_of(sizes.queries) if sizes.exact or sizes.max_queries == 1 else "any"


def _kept(kwargs: dict[str, Any], device: torch.device) -> tuple[dict[Any, Any], bool]:
    """The results kept on a tensor that is made for the step, and whether a CUDA graph is being captured."""
    starts: Any = kwargs.get("cu_seq_lens_q")
    if not isinstance(starts, Tensor):
        raise unrecognised(f"a step of continuous batching has cu_seq_lens_q of {type(starts).__name__}")
    if not hasattr(starts, "_attnreg_steps"):
        starts._attnreg_steps = {}  # type: ignore[attr-defined]
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return starts._attnreg_steps, capturing  # type: ignore[attr-defined]


def _sizes(group: PagedGroup, kwargs: dict[str, Any], device: torch.device) -> _Sizes:
    """The lengths of a step for the layers of a group, found once."""
    kept, capturing = _kept(kwargs, device)
    sizes: _Sizes | None = kept.get((group.number, capturing))
    if sizes is None:
        sizes = kept[group.number, capturing] = _new_sizes(group, kwargs, capturing)
    return sizes


def _new_sizes(group: PagedGroup, kwargs: dict[str, Any], capturing: bool) -> _Sizes:
    with recognising("a step of continuous batching"):
        starts, key_starts = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
        most: int = kwargs["max_length_q"] if "max_length_q" in kwargs else kwargs["max_seqlen_q"]
        most_keys = kwargs["max_length_k"] if "max_length_k" in kwargs else kwargs["max_seqlen_k"]
        if isinstance(key_starts, dict):
            key_starts = key_starts[group.kind]
        if isinstance(most_keys, dict):
            most_keys = most_keys[group.kind]
        requests = len(starts) - 1
    if capturing or most == 1:
        # upper bounds: a graph is replayed with other lengths, and decoding needs only bounds
        return _Sizes(starts, key_starts, [1] * requests, [most_keys] * requests, most, most_keys, False)
    # one transfer
    both = torch.cat([starts, key_starts]).diff().tolist()
    queries, keys = both[:requests], both[requests + 1 :]
    return _Sizes(starts, key_starts, queries, keys, max(queries), max(keys), True)


def _step(group: PagedGroup, sizes: _Sizes, kwargs: dict[str, Any], copied: bool) -> PagedStep:
    read = group.read_index(kwargs)
    with recognising("a step of continuous batching"):
        write = kwargs["write_index"][group.number]
    ring = group.window is not None and (sizes.max_queries > 1 or group.window % group.block_size > 0)
    if copied or (ring and read.numel()):
        return PagedStep(_batch(sizes, sizes.key_start_loc.diff(), key_rows=max(read.numel(), write.numel())), False)
    slots = torch.where(write == group.trash, -1, write)
    if not read.numel():
        # every key is new
        sizes = sizes._replace(keys=sizes.queries, max_keys=sizes.max_queries)
        return PagedStep(_batch(sizes, sizes.query_start_loc.diff(), slot_mapping=slots), True)
    if group.window is None:
        first = torch.zeros_like(sizes.key_start_loc[:-1])
        table = _table(group, sizes, read, first)
        return PagedStep(_batch(sizes, sizes.key_start_loc.diff(), slot_mapping=slots, block_table=table), True)
    # the place where a request's one new key was written
    new = torch.nn.functional.pad(write, (0, 1))[sizes.query_start_loc[:-1].long()]
    begins = read[sizes.key_start_loc[:-1].long().clamp(max=len(read) - 1)]
    first = torch.where(begins == group.sentinel, new, begins) % group.block_size
    lengths = sizes.key_start_loc.diff()
    table = _table(group, sizes, read, first, new)
    lengths = torch.where(lengths > 0, lengths + first, 0)
    sizes = sizes._replace(
        keys=[n + group.block_size - 1 for n in sizes.keys], max_keys=sizes.max_keys + group.block_size - 1
    )
    return PagedStep(_batch(sizes, lengths, slot_mapping=slots, block_table=table), True)


def _table(group: PagedGroup, sizes: _Sizes, read: Tensor, first: Tensor, new: Tensor | None = None) -> Tensor:
    """The block table: the blocks of every ``block_size``-th key; ``first`` keys of the first block are not read.

    Entries past a request's last block are blocks of other keys. new: the index that replaces the sentinel.
    """
    size = group.block_size
    blocks = -(-(sizes.max_keys + size - 1) // size)
    at = torch.arange(0, blocks * size, size, device=read.device) - first[:, None]
    last = (sizes.key_start_loc[1:] - 1)[:, None]
    places = torch.minimum(sizes.key_start_loc[:-1, None] + at.clamp(min=0), last).clamp(0, len(read) - 1)
    index = read[places]
    if new is not None:
        index = torch.where(index == group.sentinel, new[:, None], index)
    return (index // size).int()


def _batch(sizes: _Sizes, seq_lens: Tensor, key_rows: int | None = None, **more: Any) -> BatchMetadata:
    """A batch with the host's lengths; without a block table, keys are packed."""
    host = torch.tensor([0, *sizes.queries, *sizes.keys], dtype=torch.int32, device="cpu")
    queries = len(sizes.queries) + 1
    varlen = "block_table" not in more
    own = varlen and key_rows is not None
    return BatchMetadata(
        query_start_loc=sizes.query_start_loc.int(),
        seq_lens=seq_lens.int(),
        max_query_len=sizes.max_queries,
        max_seq_len=sizes.max_keys,
        query_start_loc_cpu=host[:queries].cumsum(0, dtype=torch.int32),
        seq_lens_cpu=host[queries:],
        key_start_loc=sizes.key_start_loc.int() if own else None,
        key_rows=None if sizes.exact else key_rows,
        **more,
    )
