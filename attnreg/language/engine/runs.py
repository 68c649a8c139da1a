"""The rules by which an engine settles the layout, the graph mode, the memory and the stages of a whole run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from attnreg.language.frozen import FrozenDict, frozen

if TYPE_CHECKING:
    from attnreg.errors import Location
    from attnreg.language.conditions import Condition

# `common`: a layout that every backend reads; `required`: the one that a backend requires, whatever the others read
LayoutAgree = Literal["common", "required"]
# the batches whose attention a graph holds: none, one query token per request, as many for each, any
GraphLevel = Literal["never", "one_token", "uniform", "always"]
# the batches for which a run replays graphs: of the whole step, of the pieces between attention, or of both
GraphMode = Literal["none", "piecewise", "full", "full_decode_only", "full_and_piecewise"]
# how an engine makes graphs of pieces: of compiled code, by breaks in the capture, or not at all. `whole`: the engine
# compiles, but the model has no part that is compiled. `unknown`: it may be one of the first two
Pieces = Literal["compiled", "breaks", "whole", "none", "unknown"]

# the stages that get one layer more if the layers do not divide: those before the last one, or the last ones
Spare = Literal["before_last", "last"]

LEVELS: tuple[GraphLevel, ...] = ("never", "one_token", "uniform", "always")


class UnknownRun(NamedTuple):
    """Runs for which the data does not know the value, with the reason.

    Such a run has a layer for which ``when`` holds. With ``mixers`` it also has a layer without softmax attention.
    """

    when: Condition
    mixers: bool
    because: str
    where: Location
    source: str | None = None


class CacheBeside(NamedTuple):
    """A second cache of the layers for which ``when`` holds: its backend, and what its kernels read.

    ``layouts`` is empty if they read every layout. ``graphs`` is None if the rules for graphs do not need it. The shape
    of its blocks differs from that of the layers' keys and values.
    """

    when: Condition
    name: str
    where: Location
    layouts: tuple[str, ...] = ()
    graphs: GraphLevel | None = None
    source: str | None = None


class ConnectorWish(NamedTuple):
    """The ``layout`` that a KV connector wishes if ``when`` holds for the target's first layer; None if it wishes none.

    With ``unknown``, a sentence, the data does not know it.
    """

    when: Condition
    layout: str | None
    unknown: str
    where: Location
    source: str | None = None


@dataclass(frozen=True, slots=True)
class LayoutRules:
    """The rules by which an engine settles one layout of the KV cache for all layers.

    ``layouts`` are all of them; of several with equal votes the first one here counts. ``default`` is the order of
    preference if no backend states one. In a ``block_compact`` layout a block of a layer is one run of bytes. In a
    ``block_outermost`` one the blocks of all layers stand together. ``aliases`` maps other names to layouts.
    ``variable`` is the environment variable with which a user asks for a layout. ``apart`` lists kinds of layers whose
    backend counts as a separate one. Of ``wishes`` the first that holds counts.
    """

    agree: LayoutAgree
    layouts: tuple[str, ...]
    default: tuple[str, ...]
    where: Location
    block_compact: frozenset[str] = frozenset()
    block_outermost: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=FrozenDict)
    variable: str = ""
    apart: frozenset[str] = frozenset()
    beside: tuple[CacheBeside, ...] = ()
    unknown: tuple[UnknownRun, ...] = ()
    wishes: tuple[ConnectorWish, ...] = ()
    source: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "aliases", frozen(self.aliases))


class AskedMode(NamedTuple):
    """The graph mode that an engine asks for by default, if ``when`` holds for a layer."""

    when: Condition
    mode: GraphMode
    where: Location
    because: str = ""
    source: str | None = None


class ModeLimit(NamedTuple):
    """A mode that takes the place of every other mode but those in ``keeps``, if ``when`` holds for a layer."""

    when: Condition
    mode: GraphMode
    keeps: frozenset[str]
    because: str
    where: Location
    source: str | None = None


class PiecesOf(NamedTuple):
    """How the engine makes graphs of the pieces of a model, if ``when`` holds for a layer."""

    when: Condition
    pieces: Pieces
    where: Location
    because: str = ""
    source: str | None = None


class KindLevel(NamedTuple):
    """The graph level of layers of these ``kinds`` where ``when`` holds, in place of what their backend states."""

    kinds: frozenset[str]
    when: Condition
    level: GraphLevel
    where: Location
    because: str = ""
    source: str | None = None


@dataclass(frozen=True, slots=True)
class GraphRules:
    """The rules by which an engine settles the CUDA-graph mode of a run.

    The weakest level of all layers decides how far the mode is taken back. Of each list the first entry that holds
    counts. ``asked`` is the mode by default, and ``pieces`` the way in which graphs of pieces are made. ``wrapped`` are
    the levels of layers that the engine wraps, where its condition holds for the layer. ``mixers`` are those of layers
    without softmax attention, where the condition holds for some layer of the run.
    """

    asked: tuple[AskedMode, ...]
    where: Location
    limits: tuple[ModeLimit, ...] = ()
    pieces: tuple[PiecesOf, ...] = ()
    wrapped: tuple[KindLevel, ...] = ()
    mixers: tuple[KindLevel, ...] = ()
    beside: tuple[CacheBeside, ...] = ()
    unknown: tuple[UnknownRun, ...] = ()
    source: str | None = None


class IndexKeys(NamedTuple):
    """How the engine stores an indexer's key of a token.

    ``bits`` are those of an element; ``scaled`` elements share a scale of ``scale_bytes``.
    """

    when: Condition
    bits: int
    scale_bytes: int
    scaled: int
    where: Location
    source: str | None = None

    def bytes_of(self, size: int) -> int:
        """The bytes of a key of some elements."""
        return size * self.bits // 8 + size // self.scaled * self.scale_bytes


class MemoryRules(NamedTuple):
    """The ``share`` of a GPU's memory that the engine takes by default for weights, work and KV cache together.

    ``option`` is the engine's own option for it. ``index_keys``: the keys of sparse MLA's indexers; the first that
    holds counts. ``whole_windows``: if one holds for a layer, layers with a window keep every token beside others that
    do. ``windows`` are conditions of layers with a window, each with whether they keep every token; the first that
    holds counts.
    """

    share: float
    option: str
    where: Location
    source: str | None = None
    index_keys: tuple[IndexKeys, ...] = ()
    whole_windows: tuple[Condition, ...] = ()
    windows: tuple[tuple[Condition, bool], ...] = ()


class StageRules(NamedTuple):
    """How an engine shares out a model's layers over pipeline stages; a draft's layers are all on the last stage.

    ``spare`` names the stages that get one layer more if the layers do not divide.
    """

    spare: Spare
    where: Location
    source: str | None = None

    def split(self, layers: int, stages: int) -> tuple[range, ...]:
        """The indices of the layers of each stage. ``layers`` are at least as many as ``stages``."""
        each, rest = divmod(layers, stages)
        last = stages - 1 if self.spare == "before_last" else stages
        more = range(last - rest, last)
        sizes = [each + (stage in more) for stage in range(stages)]
        starts = [sum(sizes[:stage]) for stage in range(stages)]
        return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))
