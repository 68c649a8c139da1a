"""The groups of a run, what they agree on, and the facts that exclude each other if they do not agree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.errors import Location

if TYPE_CHECKING:
    from attnreg.request import AttentionRequest
    from attnreg.selection.trace import Selection


class CacheShape(NamedTuple):
    """The shape of one block of a layer's KV cache on one rank.

    ``heads`` are KV heads, 1 for MLA and for a state. ``states`` are the tokens that the block holds, 1 for a state.
    ``page_bytes`` are the block's bytes.
    """

    heads: int
    states: int
    page_bytes: int


class RunGroup(NamedTuple):
    """Equal layers of one model of the run.

    ``role`` is that of the request: target, draft, encoder, vision. ``selection``, and ``request`` as the engine's
    start leaves it, are None for layers without softmax attention. ``kind`` is the kind of the layers: full, sliding,
    chunked, cross, or the name of the mixer. ``shapes`` are the caches of one layer: () if it has none, None if they
    are not known.
    """

    label: str
    role: str
    layers: tuple[int, ...]
    selection: Selection | None
    request: AttentionRequest | None = None
    kind: str = ""
    shapes: tuple[CacheShape, ...] | None = None

    @property
    def name(self) -> str:
        """The backend that reads the cache, or the kind of a layer without softmax attention."""
        return self.selection.title if self.selection is not None else self.kind

    @property
    def takes_part(self) -> bool:
        """Whether the layers take part in what a run agrees on. Towers do not, unless they keep a KV cache."""
        return self.role in ("target", "draft")

    @property
    def point(self) -> Any:
        """The point at which conditions are tested: facet -> value; None for layers without softmax attention."""
        return self.selection.point() if self.selection is not None else None


class ConflictFact(NamedTuple):
    """One fact of a conflict: the label of its group ("" if it is about the run), a sentence, and its line of data.

    ``where`` is None for a fact that the user states.
    """

    group: str
    sentence: str
    where: Location | None


class Conflict(NamedTuple):
    """The reason why a run does not start: a sentence, and the smallest set of facts that exclude each other."""

    sentence: str
    facts: tuple[ConflictFact, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        facts = [{"group": f.group, "sentence": f.sentence, "where": f.where and str(f.where)} for f in self.facts]
        return {"sentence": self.sentence, "facts": facts}


class Agreed(NamedTuple):
    """What the layers of a run agree on: a ``value``, and why, with its line of data.

    ``value`` is None if it is not known, which ``text`` explains, and if the run does not start: then ``conflict`` says
    why. ``dropped`` are sentences about wishes that the engine drops or changes with a warning.
    """

    value: str | None
    text: str
    where: Location | None
    source: str | None = None
    conflict: Conflict | None = None
    dropped: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "value": self.value,
            "text": self.text,
            "where": self.where and str(self.where),
            "source": self.source,
            "conflict": self.conflict and self.conflict.to_dict(),
            "dropped": list(self.dropped),
        }


def joined(words: Iterable[str], conjunction: str) -> str:
    """``A, B and C``."""
    *first, last = words
    return f"{', '.join(first)} {conjunction} {last}" if first else last
