"""The bytes of KV cache that a request of a model takes: per layer group and in total."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.language.packed import Packed
from attnreg.models.facts import UNREAD, MlaIndexer
from attnreg.models.groups import LayerGroup, ModelLayers
from attnreg.models.states import StateDims
from attnreg.request import AttentionRequest
from attnreg.selection.wording import readable

if TYPE_CHECKING:
    from attnreg.language.engine.runs import IndexKeys

# the attention types without a KV cache, whatever the mask of their layers
_WITHOUT_CACHE = ("encoder", "encoder_only")
# a layer's request -> the request after the engine's start; None if the registry does not know it
Started = Callable[[AttentionRequest], AttentionRequest | None]
# a layer's request -> how the engine stores the keys of its indexer; None if that is not known
IndexKeysOf = Callable[[AttentionRequest], "IndexKeys | None"]
# set of words -> word -> its entry in the vocabulary
Words = Mapping[str, Mapping[str, Any]]


class ByteCount(NamedTuple):
    """A number of bytes: ``counted``, and whether that is all (``known``)."""

    counted: int
    known: bool = True

    @property
    def value(self) -> int | None:
        """The number; None if it is not known."""
        return self.counted if self.known else None

    def words(self, words: Callable[[int], str]) -> str:
        """``117 MiB``; ``at least 117 MiB`` if a part is not known, ``not known`` if nothing is."""
        if self.known:
            return words(self.counted)
        return f"at least {words(self.counted)}" if self.counted else "not known"


class GroupMemory(NamedTuple):
    """The KV cache of one layer group: ``token_bytes`` of all its layers together, for each token that they keep.

    ``keeps`` is the number of latest tokens that they keep, None for all. ``compress``: they keep one more entry for
    each ``compress`` tokens. ``what`` says why there are no bytes to count. ``kv_dtype`` is the KV dtype of these
    layers; the first and last layers of a model may have another one. ``token_bytes`` is None if it is not known.
    ``state_bytes`` is what one request takes in all these layers whatever its length: the states of layers without
    softmax attention, None if they are not known. ``index_bytes`` are those of the keys of all their indexers, for each
    token, None if they are not known. ``uncounted``: the layers keep more, which does not grow with the request.
    """

    group: LayerGroup
    token_bytes: int | None
    keeps: int | None = None
    what: str = ""
    compress: int | None = None
    kv_dtype: str = ""
    state_bytes: int | None = None
    index_bytes: int | None = 0
    uncounted: bool = False

    @property
    def first(self) -> ByteCount:
        """Bytes that the first token takes."""
        known = self.token_bytes is not None and self.index_bytes is not None
        return ByteCount((self.token_bytes or 0) + (self.index_bytes or 0), known)

    def at(self, length: int) -> ByteCount:
        """Bytes at a request length in tokens."""
        tokens = length if self.keeps is None else min(length, self.keeps)
        tokens += length // self.compress if self.compress else 0
        first = self.first
        return ByteCount(first.counted * tokens + (self.state_bytes or 0), first.known and not self.uncounted)

    @property
    def remark(self) -> str:
        """What the bytes are of, or why there are none; "" for plain keys and values of all tokens."""
        if self.token_bytes is None:
            return ""
        if self.state_bytes is not None:
            return "states, the same at any length"
        kept = f"keeps {self.keeps:,} tokens" if self.keeps is not None else self.what
        return kept or ("without its indexer's keys" if self.index_bytes is None else "")

    def words(self, lengths: Iterable[int]) -> list[str]:
        """In words: the bytes of the first token, then those at each length."""
        sizes = [self.first.words(lambda size: f"{size:,}"), *(self.at(n).words(readable) for n in lengths)]
        if self.token_bytes is None:
            return ["not known"] * len(sizes)
        if self.what:
            return ["–"] * len(sizes)
        return ["–", *sizes[1:]] if self.state_bytes is not None else sizes


def total(sizes: Iterable[ByteCount]) -> ByteCount:
    """The sum of some sizes."""
    each = [*sizes]
    return ByteCount(sum(size.counted for size in each), all(size.known for size in each))


class KvMemory(NamedTuple):
    """The KV cache of one request on one rank, with the KV dtype of the options (``auto``: the model's dtype).

    ``model`` has the layers that are counted.
    """

    kv_dtype: str
    groups: tuple[GroupMemory, ...]
    model: ModelLayers

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """The KV dtypes of the layers that are counted."""
        return tuple(dict.fromkeys(g.kv_dtype for g in self.groups if g.kv_dtype)) or (self.kv_dtype,)

    @property
    def first(self) -> ByteCount:
        """Bytes that the first token takes."""
        return total(g.first for g in self.groups)

    def at(self, length: int) -> ByteCount:
        """Bytes at a request length in tokens."""
        return total(g.at(length) for g in self.groups)


class Memory(NamedTuple):
    """The KV caches of a model and of its draft on one of ``ranks`` ranks, counted at some request lengths.

    ``archs`` are the architectures to which the counts apply; it is empty if they apply to all that the user asks
    about. ``phases`` are the phases with a question of their own. ``whole`` is whether the questions cover every layer
    of the model. ``block_size`` is the user's block size in tokens, or None.
    """

    models: tuple[KvMemory, ...]
    lengths: tuple[int, ...]
    ranks: int = 1
    archs: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    whole: bool = True
    block_size: int | None = None

    def after(self, start: Started, words: Words) -> Memory:
        """The same caches after the engine's start; ``start`` returns the request that replaces a layer's request."""

        def started(request: AttentionRequest) -> AttentionRequest | None:
            first = self.phases[:1] if request.phase == "any" else ()
            return start(dataclasses.replace(request, phase=first[0]) if first else request)

        return self._replace(models=tuple(kv_memory(m.model, m.kv_dtype, words, started) for m in self.models))

    def with_states(self, layer_bytes: Mapping[StateDims, int | None]) -> Memory:
        """The same caches with the states of the target's layers.

        layer_bytes: state -> the bytes that one request takes in one layer with that state, None if they are not known.
        """

        def counted(memory: GroupMemory) -> GroupMemory:
            state = memory.group.facts.state
            size = None if state is None else layer_bytes.get(state)
            if size is None:
                return memory
            return memory._replace(state_bytes=size * len(memory.group.layers), what="", uncounted=False)

        groups = [tuple(map(counted, model.groups)) for model in self.models[:1]]
        models = (m._replace(groups=g) for m, g in zip(self.models[:1], groups, strict=True))
        return self._replace(models=(*models, *self.models[1:]))

    def with_index_keys(self, keys_of: IndexKeysOf) -> Memory:
        """The same caches with the keys of indexers."""

        def counted(memory: GroupMemory) -> GroupMemory:
            indexer, request = _indexer(memory.group), memory.group.request
            if memory.index_bytes is not None or indexer is None or request is None:
                return memory
            keys = keys_of(request)
            size = None if keys is None else keys.bytes_of(indexer.index_head_dim) * len(memory.group.layers)
            return memory._replace(index_bytes=size)

        return self._replace(models=tuple(m._replace(groups=tuple(map(counted, m.groups))) for m in self.models))

    def with_windows(
        self, whole: Callable[[AttentionRequest], bool], every: Callable[[AttentionRequest], bool | None]
    ) -> Memory:
        """The same caches, after an engine that may make the layers of a run keep as many tokens as one another.

        whole: whether layers with a window keep every token in the run of a request, beside layers without one. every:
        whether the layers with a window of a request keep every token in any run; None leaves their number as it is.
        """
        groups = [_windowed(group, every) for model in self.models for group in model.groups]
        requests = [g.group.request for g in groups if g.group.request is not None and g.kv_dtype]
        if all(g.keeps is not None for g in groups if g.kv_dtype) or not any(map(whole, requests)):
            left = iter(groups)
        else:
            left = (group._replace(keeps=None) for group in groups)
        return self._replace(models=tuple(m._replace(groups=(*islice(left, len(m.groups)),)) for m in self.models))

    @property
    def known(self) -> bool:
        """Whether the bytes of every layer are known, but for those beside its keys and values."""
        return all(group.token_bytes is not None for model in self.models for group in model.groups)

    def totals(self) -> list[str]:
        """The totals in words: the bytes of the first token, then those at each length."""
        groups = [group for model in self.models for group in model.groups]
        first = total(group.first for group in groups).words(lambda size: f"{size:,}")
        return [first, *(total(group.at(n) for group in groups).words(readable) for n in self.lengths)]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, in bytes; null for what is not known."""
        groups = [
            {
                "label": g.group.label,
                "layers": list(g.group.layers),
                "kv_dtype": g.kv_dtype or None,
                "bytes_per_token": g.first.value,
                "keeps_tokens": g.keeps,
                "note": g.what,
                "bytes_at": {str(n): g.at(n).value for n in self.lengths},
                **({"state_bytes": g.state_bytes} if g.group.request is None else {}),
            }
            for model in self.models
            for g in model.groups
        ]
        return {
            "kv_dtype": self.models[0].kv_dtype if self.models else None,
            **({"draft_kv_dtype": self.models[1].kv_dtype} if len(self.models) > 1 else {}),
            **({"archs": list(self.archs)} if self.archs else {}),
            "ranks": self.ranks,
            "groups": groups,
            "bytes_per_token": total(m.first for m in self.models).value,
            "bytes_at": {str(n): total(m.at(n) for m in self.models).value for n in self.lengths},
        }


def as_started(
    memory: Memory,
    starts: Iterable[tuple[str, Started, Callable[[Memory], Memory]]],
    words: Words,
    states: Mapping[str, Mapping[StateDims, int | None]] | None = None,
) -> tuple[Memory, ...]:
    """The caches after the engine's start on each architecture; architectures with equal caches share one entry.

    starts: each architecture with the function from a layer's request to the request after the start, and the one from
    the caches to those with what the run adds. states: architecture -> the bytes of states, as `Memory.with_states`
    takes them.
    """
    found: list[tuple[Memory, list[str]]] = []
    for arch, start, in_run in starts:
        counted = in_run(memory.after(start, words)).with_states((states or {}).get(arch, {}))
        same = next((archs for other, archs in found if other.to_dict() == counted.to_dict()), None)
        if same is None:
            found.append((counted, [arch]))
        else:
            same.append(arch)
    if len(found) < 2:
        return tuple(counted for counted, _ in found) or (memory,)
    return tuple(counted._replace(archs=tuple(dict.fromkeys(archs))) for counted, archs in found)


def kv_memory(model: ModelLayers, kv_dtype: str, words: Words, started: Started | None = None) -> KvMemory:
    """The KV cache of a request; ``words`` are the vocabulary's sets of words, for the sizes of dtypes.

    Each group has its own KV dtype, because the first and last layers may differ. A window keeps its latest tokens, a
    chunk at most its own tokens, and MLA one latent per token. A layer that reads another layer's keys and values
    stores nothing. The count is of tokens: an engine stores whole blocks, and some engines store every token of a layer
    with a window.

    started: the function from a layer's request to the request after the engine's start; by default requests do not
    change.
    """
    groups = []
    for group in model.groups:
        facts = group.facts
        request = started(group.request) if started is not None and group.request is not None else group.request
        # the engine's dtype, if its start changed the dtype of the request
        dtype = request.dtype if request and group.request and request.dtype != group.request.dtype else model.dtype
        if facts.kind == UNREAD:
            groups.append(GroupMemory(group, None, what="not known"))
        elif group.request is None:
            groups.append(GroupMemory(group, 0, what="a state of fixed size, not counted", uncounted=True))
        elif group.request.attn_type in _WITHOUT_CACHE or group.request.role == "encoder":
            groups.append(GroupMemory(group, 0, what="no KV cache"))
        elif request is None:
            groups.append(GroupMemory(group, None, what="not known"))
        elif facts.kind == "cross":
            size = _layer_bytes(request, request.kv_dtype or kv_dtype, dtype, words) * len(group.layers)
            what = f"{size:,} B per token of what is attended to, not counted"
            groups.append(GroupMemory(group, 0, what=what, uncounted=True))
        elif facts.kv_shared_from is not None:
            groups.append(GroupMemory(group, 0, what="reads an earlier layer's"))
        else:
            stored = request.kv_dtype or kv_dtype
            size = _layer_bytes(request, stored, dtype, words) * len(group.layers)
            # a bidirectional window sees as far ahead, so nothing falls out of it
            keeps = facts.chunk or (facts.sliding_window if facts.causal else None)
            keys = None if _indexer(group) is not None else 0
            groups.append(GroupMemory(group, size, keeps, compress=facts.compress, kv_dtype=stored, index_bytes=keys))
    return KvMemory(kv_dtype, tuple(groups), model)


def _windowed(group: GroupMemory, every: Callable[[AttentionRequest], bool | None]) -> GroupMemory:
    """A group with as many tokens as the engine lets its window keep."""
    window, request = group.group.facts.sliding_window, group.group.request
    if window is None or request is None or not group.kv_dtype or (whole := every(request)) is None:
        return group
    return group._replace(keeps=None if whole else window)


def _indexer(group: LayerGroup) -> MlaIndexer | None:
    """The indexer that each layer of a group has for itself."""
    indexer = group.facts.mla.indexer if group.facts.mla is not None else None
    return indexer if indexer is not None and indexer.own else None


def token_bytes(request: AttentionRequest, words: Words) -> int:
    """Bytes of one token in one layer of a request, as an engine stores it."""
    return _layer_bytes(request, request.kv_dtype or "auto", request.dtype, words)


def _layer_bytes(request: AttentionRequest, kv_dtype: str, dtype: str, words: Words) -> int:
    """Bytes of one token in one layer; ``head_bytes`` of a KV dtype are the scales of keys and values per KV head."""
    # `auto` stores the model's dtype, which need not be among the KV dtypes
    word = words["dtypes"].get(dtype) if kv_dtype == "auto" else words["kv_dtypes"][kv_dtype]
    stored = word.facts if word is not None else {}
    packed = Packed.of(kv_dtype, stored)
    if request.attention.startswith("mla"):
        if packed is not None:
            return packed.keys.row_bytes(request.head_size)
        if "latent_bytes" in stored:
            return int(stored["latent_bytes"])
        elements, heads = request.head_size, 1
    else:
        if packed is not None:
            return (request.num_kv_heads or 0) * packed.token_bytes(request.head_size, request.head_size_v)
        elements, heads = request.head_size + (request.head_size_v or request.head_size), request.num_kv_heads or 0
    bits = float(stored.get("stored_bits", stored.get("bits", 32)))
    return round(heads * (elements * bits / 8 + int(stored.get("head_bytes", 0))))
