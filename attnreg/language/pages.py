"""Pages: the blocks of a KV cache that kernels read, and the rules by which an engine settles the size of a run's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from attnreg.errors import Location
    from attnreg.language.conditions import Condition

# whose blocks settle the size: those of the model's first layer, or one that all layers can read
Agree = Literal["first", "common"]


class KernelBlocks(NamedTuple):
    """The blocks of the KV cache that a kernel reads, in tokens: these sizes, and every multiple of some numbers."""

    sizes: tuple[int, ...]
    multiples: tuple[int, ...]

    def of(self, page: int) -> int | None:
        """The block in which the kernel reads a page: the page, the largest of the sizes that divides it, or None."""
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
    """The block size in tokens that an engine takes where the layers can read it."""

    when: Condition
    tokens: int
    where: Location
    source: str | None = None


class UnknownSize(NamedTuple):
    """Runs whose block size the data does not know, with the reason.

    They have a layer for which ``when`` holds, and with ``mixers`` also a layer that is no softmax attention.
    """

    when: Condition
    mixers: bool
    because: str
    where: Location
    source: str | None = None


class OtherCache(NamedTuple):
    """A cache beside the keys and values of the layers for which ``when`` holds, with kernels of its own."""

    when: Condition
    name: str
    blocks: KernelBlocks
    where: Location
    source: str | None = None


class Raised(NamedTuple):
    """Where some layer meets ``when``, a block is at least so many (``units``) of the first layer's smallest."""

    when: Condition
    units: int
    because: str
    where: Location
    source: str | None = None


@dataclass(frozen=True, slots=True)
class PageRules:
    """How an engine settles the block size of a run once each layer has its backend; of ``default`` the first counts.

    ``apart`` are the kinds of layers whose backend counts as another one than that of the others.
    """

    agree: Agree
    default: tuple[DefaultSize, ...]
    where: Location
    unknown: tuple[UnknownSize, ...] = ()
    beside: tuple[OtherCache, ...] = ()
    raised: tuple[Raised, ...] = ()
    apart: frozenset[str] = frozenset()
    source: str | None = None
