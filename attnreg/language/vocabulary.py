"""Vocabulary: the facets and words of a registry, a typed view of vocabulary.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from attnreg.errors import Location
from attnreg.language.frozen import FrozenDict, deep_frozen, frozen

# the one facet that a selection has itself: whether an order tries the backend, or a user named it
ASKED = "asked"
AUTOMATIC, BY_NAME = "automatic", "by_name"
Kind = Literal["word", "arch", "integer", "text", "words", "packages", "boolean", "derived", "field"]


@dataclass(frozen=True, slots=True)
class Word:
    """One word and its meaning, a sentence; ``facts`` holds its other properties (bits, family, ...)."""

    name: str
    legend: str
    where: Location
    facts: Mapping[str, Any] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", deep_frozen(self.facts))


@dataclass(frozen=True, slots=True)
class Architecture:
    """A processor architecture; ``rank`` orders those of one ``series``, and no others.

    fp8: its encoding of 8-bit floats: the Open Compute Project's (``ocp``) or one without infinities and -0 (``fnuz``).
    """

    name: str
    platform: str
    series: str
    rank: int
    family: str
    products: tuple[str, ...]
    fp8: Literal["ocp", "fnuz"]
    where: Location

    @property
    def title(self) -> str:
        """``gfx942 (MI300X)``: the name with the first product."""
        return f"{self.name} ({self.products[0]})" if self.products else self.name


@dataclass(frozen=True, slots=True)
class Facet:
    """One dimension of a configuration.

    ``of`` is what has it, ``kind`` the kind of its values, ``claim`` the capability key that constrains it. ``words``
    lists its values in the order of the data, ``known`` holds the same as a set, and ``word_set`` is the set's name in
    the vocabulary.
    """

    name: str
    of: Literal["request", "platform", "selection", "derived", "config"]
    kind: Kind
    legend: str
    where: Location
    words: tuple[Any, ...] = ()
    claim: str | None = None
    word_set: str | None = None
    known: frozenset[Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", frozenset(self.words))


@dataclass(frozen=True)
class Vocabulary:
    """All facets and words of one registry, by name. Immutable.

    ``facets`` keeps the order of the file, derived facets last; ``words`` maps the name of a set (dtypes, kv_dtypes,
    ...) to its words; features, flags and packages are sets of their own.
    """

    facets: Mapping[str, Facet]
    words: Mapping[str, Mapping[str, Word]]
    features: Mapping[str, Word]
    flags: Mapping[str, Word]
    packages: Mapping[str, Word]
    architectures: Mapping[str, Architecture]
    retired_environment: Mapping[str, Word]

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, frozen(getattr(self, f.name)))
        object.__setattr__(self, "words", frozen({name: frozen(group) for name, group in self.words.items()}))

    def facet(self, name: str) -> Facet | None:
        """The facet of that name, None where there is none."""
        return self.facets.get(name)

    @cached_property
    def claims(self) -> Mapping[str, Facet]:
        """Capability key -> the facet that it constrains, in the order of the facets."""
        return FrozenDict({f.claim: f for f in self.facets.values() if f.claim})

    def words_of(self, facet: str) -> Mapping[str, Word]:
        """The words that are a facet's values, by name; none for a facet without words."""
        sets = {**self.words, "features": self.features, "flags": self.flags}
        return sets.get(self.facets[facet].word_set or "", {})

    def architectures_of(self, platform: str) -> tuple[Architecture, ...]:
        """The architectures of one platform, in capability order."""
        return tuple(a for a in self.architectures.values() if a.platform == platform)

    def with_facets(self, more: Iterable[Facet]) -> Vocabulary:
        """A copy of this vocabulary with more facets."""
        facets = {**self.facets, **{f.name: f for f in more}}
        return Vocabulary(
            facets, self.words, self.features, self.flags, self.packages, self.architectures, self.retired_environment
        )


class OpenFacets:
    """The facets of a model's config: any name is one, and its value may be any JSON value.

    A missing field is None, like one that is null. `attnreg.compile.conditions.Parser` takes an instance in place of a
    vocabulary.
    """

    facets: Mapping[str, Facet] = FrozenDict()
    architectures: Mapping[str, Architecture] = FrozenDict()
    packages: Mapping[str, Word] = FrozenDict()

    def facet(self, name: str) -> Facet:
        """The field of that name."""
        return Facet(name, "config", "field", "a field of a model's config", Location("", 0, 0))
