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

    Such a run has a layer for which ``when`` holds. With ``mixers`` it also has a layer without softmax attention.
    """

    when: Condition
    mixers: bool
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


@dataclass(frozen=True, slots=True)
class PageRules:
    """The rules by which an engine chooses the block size of a run, once each layer has its backend.

    The first entry of ``default`` that holds counts. ``apart`` lists kinds of layers. The backend of such a layer
    counts as different from the same backend of another layer.
    """

    agree: Agree
    default: tuple[DefaultSize, ...]
    where: Location
    unknown: tuple[UnknownSize, ...] = ()
    beside: tuple[OtherCache, ...] = ()
    raised: tuple[Raised, ...] = ()
    apart: frozenset[str] = frozenset()
    source: str | None = None
