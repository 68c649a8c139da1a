"""Packed formats of the KV cache that a row accepts although its data does not name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from attnreg.analysis.check.finding import Finding
from attnreg.language.packed import packed_formats
from attnreg.language.vocabulary import Architecture

if TYPE_CHECKING:
    from attnreg.analysis.diagram import Box
    from attnreg.analysis.symbolic.model import Model
    from attnreg.errors import Location
    from attnreg.language.vocabulary import Facet, Word
    from attnreg.registry import Variant


def unnamed_formats(model: Model, variants: Iterable[tuple[str, Variant, Box]], facet: Facet) -> Iterator[Finding]:
    """Variants that accept a packed format, whose bytes are codes, by a claim that does not name it."""
    formats = packed_formats(model.registry.vocabulary.words_of(facet.name))
    found: dict[tuple[str, Location], list[str]] = {}
    for title, variant, box in variants:
        claim = next((c for c in variant.claims if c.facet == facet.name), None)
        names = () if claim is None else claim.matcher.either or (claim.matcher.text,)
        where = variant.open.get(facet.claim or "", variant.where) if claim is None else claim.where
        for name in formats:
            place = class_of(model, facet, model.registry.vocabulary.words_of(facet.name)[name])
            accepted = bool(box[0]) and (place is None or place[1] in box[place[0]])
            if accepted and not any(fnmatchcase(name, n) and n.strip("*?") for n in names):
                found.setdefault((title, where), []).append(name)
    for (title, where), taken in found.items():
        message = (
            f"{title} accepts kv_dtype {', '.join(taken)} without naming it: its bytes are codes of a packed format"
        )
        yield Finding(
            "unnamed-format", (title, *taken), where, message, "state the formats that its kernel decodes, by name"
        )


def class_of(model: Model, facet: Facet, word: Word | Architecture) -> tuple[int, int] | None:
    """The variable of a word, and the class with this word; None if no condition distinguishes the facet's words."""
    space = model.space
    if facet.kind == "words":
        return space.level[facet.name, word.name], 1
    level = space.level.get((facet.name, None))
    if level is None:
        return None
    value = (word.platform, word.name) if isinstance(word, Architecture) else word.name
    return level, space.variables[level].class_of(value)
