"""How much KV cache a request of a model takes: per layer group and in total."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from attnreg.language.packed import Packed
from attnreg.models.groups import LayerGroup, ModelLayers
from attnreg.request import AttentionRequest

# the kinds of attention that keep no keys and values of earlier steps, whichever mask their layers have
_WITHOUT_CACHE = ("encoder", "encoder_only")
# what an engine asks in place of a request; None where nobody knows what it stores
Started = Callable[[AttentionRequest], AttentionRequest | None]
# set of words -> word -> what the vocabulary says of it
Words = Mapping[str, Mapping[str, Any]]


class GroupMemory(NamedTuple):
    """What the layers of one group store: ``token_bytes`` of all of them together, for each token that they keep.

    ``keeps`` is the number of latest tokens that are kept, None for all; ``compress`` the number of tokens for which
    one more is kept; ``what`` says why there is nothing to count. ``kv_dtype`` is how these layers store their keys and
    values: the first and last layers may have another than the others.
    """

    group: LayerGroup
    token_bytes: int
    keeps: int | None = None
    what: str = ""
    compress: int | None = None
    kv_dtype: str = ""

    def at(self, length: int) -> int:
        """Bytes at a request length in tokens."""
        tokens = length if self.keeps is None else min(length, self.keeps)
        return self.token_bytes * (tokens + (length // self.compress if self.compress else 0))


class KvMemory(NamedTuple):
    """The KV cache of one request on one rank, asked for as ``kv_dtype`` (in which ``auto`` is the model's own dtype).

    ``model`` has the layers that were counted.
    """

    kv_dtype: str
    groups: tuple[GroupMemory, ...]
    model: ModelLayers

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """How the layers that are counted store their keys and values."""
        return tuple(dict.fromkeys(g.kv_dtype for g in self.groups if g.kv_dtype)) or (self.kv_dtype,)

    @property
    def token_bytes(self) -> int:
        """Bytes that the first token takes."""
        return sum(g.token_bytes for g in self.groups)

    def at(self, length: int) -> int:
        """Bytes at a request length in tokens."""
        return sum(g.at(length) for g in self.groups)


class Memory(NamedTuple):
    """The KV caches of a model and of its draft on one of ``ranks`` ranks, counted at some request lengths.

    ``archs`` are the architectures on which an engine stores them so, where it stores them otherwise on others that
    are asked about. ``phases`` are those that are asked about one by one. ``whole`` is whether every layer of the model
    is asked about, and ``block_size`` the tokens of a block, where the user gives them.
    """

    models: tuple[KvMemory, ...]
    lengths: tuple[int, ...]
    ranks: int = 1
    archs: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    whole: bool = True
    block_size: int | None = None

    def after(self, start: Started, words: Words) -> Memory:
        """The same caches as an engine stores them; ``start`` says what it asks in place of a layer's request."""

        def started(request: AttentionRequest) -> AttentionRequest | None:
            first = self.phases[:1] if request.phase == "any" else ()
            return start(dataclasses.replace(request, phase=first[0]) if first else request)

        return self._replace(models=tuple(kv_memory(m.model, m.kv_dtype, words, started) for m in self.models))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, in bytes."""
        groups = [
            {
                "label": g.group.label,
                "layers": list(g.group.layers),
                "kv_dtype": g.kv_dtype or None,
                "bytes_per_token": g.token_bytes,
                "keeps_tokens": g.keeps,
                "note": g.what,
                "bytes_at": {str(n): g.at(n) for n in self.lengths},
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
            "bytes_per_token": sum(m.token_bytes for m in self.models),
            "bytes_at": {str(n): sum(m.at(n) for m in self.models) for n in self.lengths},
        }


def as_started(memory: Memory, starts: Iterable[tuple[str, Started]], words: Words) -> tuple[Memory, ...]:
    """The caches as an engine stores them on each architecture; those on which it stores them alike are one.

    starts: each architecture with what the engine asks there in place of a layer's request.
    """
    found: list[tuple[Memory, list[str]]] = []
    for arch, start in starts:
        counted = memory.after(start, words)
        same = next((archs for other, archs in found if other.to_dict() == counted.to_dict()), None)
        if same is None:
            found.append((counted, [arch]))
        else:
            same.append(arch)
    if len(found) < 2:
        return tuple(counted for counted, _ in found) or (memory,)
    return tuple(counted._replace(archs=tuple(dict.fromkeys(archs))) for counted, archs in found)


def kv_memory(model: ModelLayers, kv_dtype: str, words: Words, started: Started | None = None) -> KvMemory:
    """The KV cache of a request; ``words`` are the vocabulary's, of which it reads those of dtypes.

    Each group counts by its own KV dtype, for the first and last layers may have another. A window keeps its latest
    tokens, a chunk at most itself, MLA one latent, and a layer that reads another's keys and values nothing. Only whole
    tokens are counted: engines keep whole blocks, and some keep all of a window's layer.

    started: what an engine asks in place of a layer's request; layers are counted as they are asked for without it.
    """
    groups = []
    for group in model.groups:
        facts = group.facts
        request = started(group.request) if started is not None and group.request is not None else group.request
        # what the engine computes in, where that is not what the model is asked for
        dtype = request.dtype if request and group.request and request.dtype != group.request.dtype else model.dtype
        if group.request is None:
            groups.append(GroupMemory(group, 0, what="a state of fixed size, not counted"))
        elif request is None:
            groups.append(GroupMemory(group, 0, what="not known"))
        elif request.attn_type in _WITHOUT_CACHE:
            groups.append(GroupMemory(group, 0, what="no KV cache"))
        elif facts.kind == "cross":
            size = _layer_bytes(request, request.kv_dtype or kv_dtype, dtype, words) * len(group.layers)
            groups.append(GroupMemory(group, 0, what=f"{size:,} B per token of what is attended to, not counted"))
        elif facts.kv_shared_from is not None:
            groups.append(GroupMemory(group, 0, what="reads an earlier layer's"))
        else:
            stored = request.kv_dtype or kv_dtype
            size = _layer_bytes(request, stored, dtype, words) * len(group.layers)
            # a bidirectional window sees as far ahead, so nothing falls out of it
            keeps = facts.chunk or (facts.sliding_window if facts.causal else None)
            groups.append(GroupMemory(group, size, keeps, compress=facts.compress, kv_dtype=stored))
    return KvMemory(kv_dtype, tuple(groups), model)


def _layer_bytes(request: AttentionRequest, kv_dtype: str, dtype: str, words: Words) -> int:
    """Bytes of one token in one layer; a word's ``head_bytes`` are its scales per KV head, of keys and values both."""
    # a dtype of the model need not be one that can be asked for of the cache
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
