"""The closed set of words that a registry speaks: a typed view of vocabulary.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from attnreg.errors import Location
from attnreg.language.frozen import FrozenDict, deep_frozen, frozen

# the one facet of the selection itself, which a registry may declare, and its values
ASKED = "asked"
AUTOMATIC, BY_NAME = "automatic", "by_name"
Kind = Literal["word", "arch", "integer", "text", "words", "packages", "boolean", "derived", "field"]


@dataclass(frozen=True, slots=True)
class Word:
    """One word and the sentence that says what it means; ``facts`` are its other properties (bits, family, ...)."""

    name: str
    legend: str
    where: Location
    facts: Mapping[str, Any] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", deep_frozen(self.facts))


@dataclass(frozen=True, slots=True)
class Architecture:
    """A processor architecture; ``rank`` orders it within its ``series``, and only there.

    fp8: how it encodes 8-bit floats: like the Open Compute Project (``ocp``), or without infinities and -0 (``fnuz``).
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
        """``gfx942 (MI300X)``, as a person knows it."""
        return f"{self.name} ({self.products[0]})" if self.products else self.name


@dataclass(frozen=True, slots=True)
class Facet:
    """One dimension of a configuration: whose it is, what values it takes, and the capability that constrains it.

    ``words`` are its values in the order of the data, ``known`` the same as a set; ``word_set`` is the name under which
    the vocabulary keeps them.
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
    """Every facet and word of one registry. Immutable; lookups by name.

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
        """The words that a facet takes its values from, with what is said of each; none for a facet without words."""
        sets = {**self.words, "features": self.features, "flags": self.flags}
        return sets.get(self.facets[facet].word_set or "", {})

    def architectures_of(self, platform: str) -> tuple[Architecture, ...]:
        """The architectures of one platform, in capability order."""
        return tuple(a for a in self.architectures.values() if a.platform == platform)

    def with_facets(self, more: Iterable[Facet]) -> Vocabulary:
        """This vocabulary and some (derived) facets more."""
        facets = {**self.facets, **{f.name: f for f in more}}
        return Vocabulary(
            facets, self.words, self.features, self.flags, self.packages, self.architectures, self.retired_environment
        )


class OpenFacets:
    """Facets of any name, for conditions over a model's config: each is a field that holds whatever JSON can hold.

    A field that is missing is None, like one that is null. `attnreg.compile.conditions.Parser` takes it in the place
    of a vocabulary.
    """

    facets: Mapping[str, Facet] = FrozenDict()
    architectures: Mapping[str, Architecture] = FrozenDict()
    packages: Mapping[str, Word] = FrozenDict()

    def facet(self, name: str) -> Facet:
        """The field of that name."""
        return Facet(name, "config", "field", "a field of a model's config", Location("", 0, 0))
