"""Pages: the KV-cache blocks that kernels read, and the rules by which an engine chooses the block size of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from attnreg.errors import Location
    from attnreg.language.conditions import Condition

# `first`: the blocks of the model's first layer decide the size; `common`: the size is one that all layers can read
Agree = Literal["first", "common"]


class KernelBlocks(NamedTuple):
    """The blocks that a kernel reads, in tokens: each of ``sizes``, and every multiple of each of ``multiples``."""

    sizes: tuple[int, ...]
    multiples: tuple[int, ...]

    def of(self, page: int) -> int | None:
        """The block in which the kernel reads a page: the page, else the largest size that divides it, else None."""
        if any(page % number == 0 for number in self.multiples):
            return page
        return max((size for size in self.sizes if page % size == 0), default=None)

    @property
    def units(self) -> tuple[int, ...]:
        """The smallest block of each kind."""
        return self.sizes + self.multiples

    @property
    def text(self) -> str:
        """``16, 32, multiples of 64``."""
        return ", ".join([*map(str, self.sizes), *(f"multiples of {number}" for number in self.multiples)])


class DefaultSize(NamedTuple):
    """A block size in tokens that an engine takes by default, if the layers can read it."""

    when: Condition
    tokens: int
    where: Location
    source: str | None = None


class UnknownSize(NamedTuple):
    """Runs whose block size the data does not know, with the reason.

    Such a run has a layer for which ``when`` holds. If ``mixers`` is true, it has layers without softmax attention too,
    and the size of a state is not known; if it is false, it has none.
    """

    when: Condition
    mixers: bool | None
    because: str
    where: Location
    source: str | None = None


class OtherCache(NamedTuple):
    """A second cache of the layers for which ``when`` holds, beside their keys and values, with its own kernels."""

    when: Condition
    name: str
    blocks: KernelBlocks
    where: Location
    source: str | None = None


class Raised(NamedTuple):
    """If ``when`` holds for a layer, a block has at least ``units`` of the first layer's smallest blocks."""

    when: Condition
    units: int
    because: str
    where: Location
    source: str | None = None


class OfStates(NamedTuple):
    """The models that a rule is for: those with states of ``kinds`` (empty: any) for which ``when`` holds.

    ``key_size`` is the number of elements of a key's head, None for any.
    """

    kinds: tuple[str, ...]
    key_size: int | None
    when: Condition
    where: Location
    source: str | None = None


class StateMultiple(NamedTuple):
    """Tokens that a block is made a multiple of: ``multiple_of`` them, or at least ``at_least``.

    ``multiple_of`` is "chunk" for the tokens that a layer computes at a time.
    """

    of: OfStates
    multiple_of: int | str | None
    at_least: int | None


class HeldStates(NamedTuple):
    """The number of states that a request keeps in each layer, beside one for each token that a draft proposes."""

    of: OfStates
    states: int


class UnknownStates(NamedTuple):
    """States whose size the data does not know, with the reason. ``drafted``: only if a draft proposes tokens."""

    of: OfStates
    because: str
    drafted: bool = False


@dataclass(frozen=True, slots=True)
class StateRules:
    """The rules for runs that keep states beside their KV cache: a block has at least the bytes of a state.

    ``widened`` are kinds whose convolution keeps the tokens that a draft proposes. ``proposed`` is the facet with their
    number. ``config_dtype`` is the condition under which a state has the dtype that the config names. With
    ``all_backends`` a block is a multiple of the smallest block of every backend, and not of the first one's alone.
    The first entry of ``held`` that holds counts. ``alone`` is the number of states that a request keeps in a model
    without softmax attention.
    """

    where: Location
    config_dtype: Condition
    widened: frozenset[str] = frozenset()
    proposed: str | None = None
    all_backends: bool = False
    multiples: tuple[StateMultiple, ...] = ()
    held: tuple[HeldStates, ...] = ()
    alone: int = 1
    unknown: tuple[UnknownStates, ...] = ()
    source: str | None = None


@dataclass(frozen=True, slots=True)
class PageRules:
    """The rules by which an engine chooses the block size of a run, once each layer has its backend.

    The first entry of ``default`` that holds counts. ``apart`` lists kinds of layers. The backend of such a layer
    counts as different from the same backend of another layer. ``states`` are the rules for states beside the cache.
    """

    agree: Agree
    default: tuple[DefaultSize, ...]
    where: Location
    unknown: tuple[UnknownSize, ...] = ()
    beside: tuple[OtherCache, ...] = ()
    raised: tuple[Raised, ...] = ()
    states: StateRules | None = None
    apart: frozenset[str] = frozenset()
    source: str | None = None
