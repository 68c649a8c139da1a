"""The memory of a run on one rank: the KV cache on each pipeline stage, and the tokens and requests that fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnreg.errors import Location
from attnreg.selection.wording import readable

if TYPE_CHECKING:
    from attnreg.language.engine.runs import MemoryRules

# the longest request in tokens that is tried
_LONGEST = 2**40


@dataclass(frozen=True)
class CacheOfLayers:
    """The KV cache of equal layers on one rank.

    ``layers`` are their indices, and ``draft`` is whether they are the draft's. ``layer_bytes`` is the size of a token
    in one layer, None if it is not known. ``keeps`` is the number of latest tokens that they keep, None for all.
    ``compress``: they keep one more entry for each ``compress`` tokens. ``state_bytes`` is what a request takes in one
    layer whatever its length, None if it is not known. ``whole``: a token takes no more than ``layer_bytes``.
    """

    layers: tuple[int, ...]
    draft: bool
    layer_bytes: int | None
    keeps: int | None = None
    compress: int | None = None
    state_bytes: int | None = 0
    whole: bool = True

    @property
    def first(self) -> int | None:
        """The bytes of a token in one layer, None if they are not known whole."""
        return self.layer_bytes if self.whole else None

    @property
    def later_bytes(self) -> int:
        """The bytes in one layer of each token after those that it keeps, as far as they are known; rounded up."""
        size = self.layer_bytes or 0
        return (size if self.keeps is None else 0) + (-(-size // self.compress) if self.compress else 0)

    @property
    def known(self) -> bool:
        """Whether the bytes of these layers are known."""
        return self.first is not None and self.state_bytes is not None

    def at_least(self, length: int, page: int) -> int:
        """The bytes in one layer of a request of ``length`` tokens, without what is not known."""
        entries = length if self.keeps is None else min(length, self.keeps)
        if self.keeps is None:
            entries = -(-entries // page) * page
        entries += length // self.compress if self.compress else 0
        return (self.layer_bytes or 0) * entries + (self.state_bytes or 0)


@dataclass(frozen=True)
class PipelineStage:
    """One stage of pipeline parallelism: its layers of the target and of the draft, and a rank's bytes per token.

    ``bytes_per_token`` is that of the first token, None if a layer's is not known; ``at_least`` counts what is known.
    ``keeps`` is the most tokens that its layers with a window keep. ``later_bytes`` are those of each token after them,
    as far as they are known. Both are None without such a layer, the second also where ranks share out the tokens.
    """

    layers: tuple[int, ...]
    draft_layers: tuple[int, ...]
    bytes_per_token: int | None
    at_least: int
    keeps: int | None = None
    later_bytes: int | None = None

    @property
    def words(self) -> str:
        """``104 KiB a token``; ``at least 104 KiB a token`` or ``not known`` where a layer's bytes are not known.

        With layers that keep the latest 128 tokens only: ``104 KiB a token, 52 KiB after 128 tokens``.
        """
        if self.bytes_per_token is None and not self.at_least:
            return "not known"
        least = "at least " if self.bytes_per_token is None else ""
        words = f"{least}{readable(self.at_least)} a token"
        # 0 of what is known tells nothing of the rest
        if self.keeps is None or self.later_bytes is None or (least and not self.later_bytes):
            return words
        return f"{words}, {least}{readable(self.later_bytes)} after {self.keeps:,} tokens"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, in bytes."""
        return {
            "layers": list(self.layers),
            "draft_layers": list(self.draft_layers),
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_token_at_least": self.at_least,
            "keeps_tokens": self.keeps,
            "bytes_per_later_token_at_least": self.later_bytes,
        }


@dataclass(frozen=True)
class Room:
    """The memory of one GPU that a user gives, in bytes: all of it, and what the weights take.

    ``share`` is the share that the user lets the engine take, None for the engine's default.
    """

    gpu_bytes: int
    weight_bytes: int
    share: float | None = None


@dataclass(frozen=True)
class MemoryFit:
    """What fits on each GPU, at most: activations, CUDA graphs and the engine's own memory are not subtracted.

    ``cache_bytes`` are left for the KV cache, of ``gpu_bytes`` times ``share``, without weights and workspaces.
    ``tokens`` is the longest request that fits alone, ``requests`` the number of requests of ``length`` tokens; None if
    the bytes of no layer are known. ``where`` is the line of the share, None if the user gives it or no rule is known.
    """

    cache_bytes: int
    gpu_bytes: int
    share: float
    weight_bytes: int
    workspace_bytes: int
    length: int
    request_bytes: int
    tokens: int | None
    requests: int | None
    option: str = ""
    where: Location | None = None
    source: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, in bytes and tokens."""
        values = {name: value for name, value in vars(self).items() if name not in ("where", "option")}
        values = {
            f"{name}_at_most" if name in ("cache_bytes", "tokens", "requests") else name: v
            for name, v in values.items()
        }
        return {**values, "where": str(self.where) if self.where else None}


def stages_of(caches: Sequence[CacheOfLayers], split: Sequence[Iterable[int]], dcp: int) -> tuple[PipelineStage, ...]:
    """The stages of a run; ``split`` has the indices of the target's layers on each. The draft's are on the last.

    dcp: the ranks of decode context parallelism, which share out the tokens of a request.
    """
    stages = []
    for number, indices in enumerate(split):
        own, last = set(indices), number == len(split) - 1
        here = [(cache, len(_on(cache, own, last))) for cache in caches]
        total = sum((cache.layer_bytes or 0) * count for cache, count in here)
        # whether the engine shares out a draft's tokens, too, is not known
        shared = any(cache.draft and count for cache, count in here) and dcp > 1
        known = not shared and all(cache.first is not None for cache, count in here if count)
        target, draft = (
            sorted({i for cache in caches if cache.draft is of for i in _on(cache, own, last)}) for of in (False, True)
        )
        each = -(-total // dcp)
        keeps = max((cache.keeps for cache, count in here if count and cache.keeps is not None), default=None)
        later = None if keeps is None or dcp > 1 else sum(cache.later_bytes * count for cache, count in here)
        stages.append(PipelineStage(tuple(target), tuple(draft), each if known else None, each, keeps, later))
    return tuple(stages)


def fit_of(
    room: Room,
    rules: MemoryRules | None,
    caches: Sequence[CacheOfLayers],
    split: Sequence[Iterable[int]],
    workspace: int,
    length: int,
    *,
    page: int = 1,
    dcp: int = 1,
) -> MemoryFit:
    """What fits on the stage with the least room. page: the block size of the cache in tokens."""
    share = room.share if room.share is not None else rules.share if rules is not None else 1.0
    left = int(room.gpu_bytes * share) - room.weight_bytes - workspace
    loads = [[(c, n) for c in caches if (n := len(_on(c, set(s), i == len(split) - 1)))] for i, s in enumerate(split)]

    def needed(tokens: int) -> int:
        own = -(-tokens // dcp)
        return max((sum(c.at_least(own, page) * n for c, n in load) for load in loads), default=0)

    request, longest, requests = needed(length), None, None
    if request:
        requests = max(left, 0) // request
        longest = _longest(needed, left)
    told = rules if room.share is None else None
    return MemoryFit(
        cache_bytes=left,
        gpu_bytes=room.gpu_bytes,
        share=share,
        weight_bytes=room.weight_bytes,
        workspace_bytes=workspace,
        length=length,
        request_bytes=request,
        tokens=longest,
        requests=requests,
        option=rules.option if rules else "",
        where=told.where if told else None,
        source=told.source if told else None,
    )


def _longest(needed: Any, left: int) -> int | None:
    """The largest number of tokens whose cache fits; None if it has no bound."""
    low, high = 0, 1
    while needed(high) <= left:
        low, high = high, high * 2
        if high > _LONGEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= left else (low, middle)
    return low


def _on(cache: CacheOfLayers, own: set[int], last: bool) -> tuple[int, ...]:
    """The layers of a cache that stand on a stage: those among ``own``, and a draft's on the last stage."""
    if cache.draft:
        return cache.layers if last else ()
    return tuple(index for index in cache.layers if index in own)
