"""Findings about words and derived facets that nothing uses."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from attnreg.analysis.check.finding import Finding
from attnreg.analysis.check.formats import class_of, unnamed_formats
from attnreg.language.computed import Computed, From
from attnreg.language.conditions import Clause
from attnreg.language.vocabulary import Architecture, Vocabulary
from attnreg.registry import Claim, Derived, Invariant, Known

if TYPE_CHECKING:
    from attnreg.analysis.symbolic.model import Model
    from attnreg.language.vocabulary import Facet, Word
    from attnreg.registry import Registry

# a facet whose value stands in a sentence
_NAMED = re.compile(r"\{(\w+)\}")


def unused_words(model: Model) -> Iterator[Finding]:
    """Findings about words that no backend accepts in any request, and switches and packages that nothing reads."""
    registry, d = model.registry, model.d
    borrowed = _borrowed(registry)
    # the classes of each variable that a variant accepts: a diagram for each word and variant would take far longer
    variants = [
        (f"{row.name}/{variant.name}" if variant.name else row.name, variant, d.bounds(m.variant(row, i)[0]))
        for row in registry.backends.values()
        for m in model.ways(row.name)
        for i, variant in enumerate(row.variants)
    ]
    for facet in registry.vocabulary.facets.values():
        # what a variant does not check, it does not accept either
        accepts = [box for _, variant, box in variants if facet.name not in variant.unchecked and box[0]]
        for word in _words_of(registry.vocabulary, facet):
            if PurePath(word.where.file).parent in borrowed:
                continue
            if facet.of == "platform" and facet.kind in ("words", "packages"):
                unused = (facet.name, word.name) not in model.space.level
                message = f"nothing asks for the {facet.name.removesuffix('s')} {word.name}"
            else:
                place = class_of(model, facet, word)
                unused = not any(place is None or place[1] in box[place[0]] for box in accepts)
                message = f"no backend {'serves' if facet.kind == 'words' else f'accepts {facet.name}'} {word.name}"
            if unused:
                yield Finding(
                    "unused-word", (facet.name, word.name), word.where, message, "remove the word, or claim it"
                )
        if facet.name == "kv_dtype":
            yield from unnamed_formats(model, variants, facet)


def _words_of(vocabulary: Vocabulary, facet: Facet) -> Iterable[Word | Architecture]:
    if facet.name == "packages":
        return vocabulary.packages.values()
    # a platform is as good as its architectures
    if facet.name == "platform":
        return ()
    return vocabulary.architectures.values() if facet.kind == "arch" else vocabulary.words_of(facet.name).values()


def unused_facets(registry: Registry) -> Iterator[Finding]:
    """Findings about derived facets that nothing reads."""
    read = read_facets(registry)
    borrowed = _borrowed(registry)
    for derived in registry.derived.values():
        if derived.name not in read and PurePath(derived.where.file).parent not in borrowed:
            message = f"nothing reads {derived.name}"
            yield Finding("unused-facet", (derived.name,), derived.where, message, "remove it, or use it")


def read_facets(registry: Registry) -> set[str]:
    """The facets that an answer of the registry may depend on.

    These are the facets of its conditions, claims and computed values, those that a rule names, and those in its
    sentences.
    """
    found, seen = set[str](), dict[int, Any]()
    queue: list[Any] = [registry]
    while queue:
        part = queue.pop()
        if isinstance(part, str):
            found.update((part, *_NAMED.findall(part)))
        elif isinstance(part, Clause | Claim):
            found.add(part.facet)
        elif isinstance(part, From | Computed):
            found.update(part.facets)
        elif isinstance(part, Derived):
            queue += part.cases
        elif id(part) not in seen and not isinstance(part, Invariant | Known | Vocabulary):
            # kept, so that no other part gets its id
            seen[id(part)] = part
            if isinstance(part, Mapping):
                queue += part.values()
            elif dataclasses.is_dataclass(part):
                queue += (getattr(part, field.name) for field in dataclasses.fields(part))
            elif isinstance(part, Iterable):
                queue += part
    return found & registry.vocabulary.facets.keys()


def _borrowed(registry: Registry) -> set[PurePath]:
    """The directories of vocabularies that this registry extends, which may say more than it uses."""
    files = [PurePath(file) for file in registry.files]
    return {f.parent for f in files if f.name == "vocabulary.yaml"} - {
        f.parent for f in files if f.name == "backends.yaml"
    }
