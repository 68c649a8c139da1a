"""Vocabulary: the facets and words of a registry, a typed view of vocabulary.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from attnreg.errors import Location, did_you_mean, few_of_many
from attnreg.language.facets import CORE
from attnreg.language.frozen import FrozenDict, deep_frozen, frozen

# two facets of a selection: who asks for the backend, and the backend that is named. An order, the user, or a step of
# the engine, which knows the model, asks; the user and the step name a backend
ASKED, NAMED = "asked", "named"
AUTOMATIC, BY_NAME, BY_MODEL = "automatic", "by_name", "by_model"
# the set of words of facets that name a backend; its words are the names of the rows
BACKENDS = "backends"
# the sets of words that the fields of a request and a platform have
_FIELD_WORDS = frozenset(f"{name}s" for name in CORE)
Kind = Literal["word", "arch", "integer", "text", "words", "packages", "boolean", "derived", "field"]
# a compute capability in the spelling of a compiler's target: compute_90, sm_90a, 10.0f
_TARGET = re.compile(r"(?:compute|sm|cc)?(\d+)[af]?")
# the command that lists all architectures
LISTS_ARCHITECTURES = "attnreg list --archs"
# the number of words of a product's name that are read
_MOST_PARTS = 12
# an underscore, as in the labels of Kubernetes, ends a word
_VENDORS = re.compile(
    r"(?<![^\W_])(?:nvidia|geforce|tesla|amd|radeon|instinct|intel)(?![^\W_])|\((?:r|c|tm)\)", re.IGNORECASE
)
# the words that a driver appends to a product's name: its memory, its form, its edition, or a part of the GPU (MIG)
_FORM = re.compile(
    r"[0-9]+gb?|3e|hbm[0-9]e?|gddr[0-9]x?|pcie?|sxm[0-9]?|nvl[0-9]*|oam|vf|hf|dgxs?|ac|active|passive|dual|slot|"
    r"server|workstation|edition|generation|laptop|mobile|gpu|graphics|with|max|q|design|super|ti|d|v[0-9]|sff|"
    r"developer|kit|shared|mega|mig|[0-9]+g\.[0-9]+gb(?:\+me.*)?"
)
# architectures that exist and are not in the data: such a name is not a misspelling
_OTHERS = re.compile(r"sm(?:[2-6][0-9]|72|88|101)|gfx(?:[678][0-9]{2}|90[0-9c]|94[01]|1[01][0-9]{2}|1251)")


@dataclass(frozen=True, slots=True)
class Word:
    """One word and ``legend``, a sentence that says what it means; ``facts`` holds other properties (bits, family,
    ...).

    ``aliases`` are other names for it. They are not words of the registry; an error about one names the right word.
    """

    name: str
    legend: str
    where: Location
    facts: Mapping[str, Any] = field(default_factory=FrozenDict)
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", deep_frozen(self.facts))

    @property
    def other_names(self) -> tuple[str, ...]:
        """The aliases, and the names under which Python and installers know a package."""
        return (*self.aliases, *self.facts.get("distributions", ()), *filter(None, [self.facts.get("import")]))


@dataclass(frozen=True, slots=True)
class Architecture:
    """A processor architecture; ``rank`` orders the architectures of one ``series``.

    fp8: its encoding of 8-bit floats: the Open Compute Project's (``ocp``) or one without infinities and -0 (``fnuz``).
    aliases: other names of it and of its products, such as its compute capability. source: the page that states what it
    is, for an architecture of `Vocabulary.unread`.
    """

    name: str
    platform: str
    series: str
    rank: int
    family: str
    products: tuple[str, ...]
    fp8: Literal["ocp", "fnuz"]
    where: Location
    aliases: tuple[str, ...] = ()
    source: str | None = None

    @property
    def other_names(self) -> tuple[str, ...]:
        """The products and the aliases."""
        return (*self.products, *self.aliases)

    @property
    def title(self) -> str:
        """``gfx942 (MI300X)``: the name with the first product."""
        return f"{self.name} ({self.products[0]})" if self.products else self.name


@dataclass(frozen=True, slots=True)
class Facet:
    """One dimension of a configuration.

    ``of`` is the object that has it, ``kind`` the kind of its values, ``claim`` the capability key that constrains it.
    ``words`` lists its values in the order of the data, ``known`` is the same as a set, and ``word_set`` is the set's
    name in the vocabulary. ``config`` lists fields of a model's config: the first that is present gives the value.
    ``like`` maps patterns of that field's text to values; ``null`` stands for a field that is null, "" for an absent
    one. If a user gives the facet ``unless``, the config is not read.
    ``of_run`` says that it tells runs with a draft apart; analyses of all configurations take it as not given.
    ``divides`` says that it is the quotient or the remainder of two facets. Analyses cannot split its values into
    finite classes, so that only consequences may name it, and `attnreg check` passes over those that do.
    """

    name: str
    of: Literal["request", "platform", "selection", "start", "derived", "config"]
    kind: Kind
    legend: str
    where: Location
    words: tuple[Any, ...] = ()
    claim: str | None = None
    word_set: str | None = None
    config: tuple[str, ...] = ()
    like: tuple[tuple[str, Any], ...] = ()
    unless: str | None = None
    of_run: bool = False
    divides: bool = False
    known: frozenset[Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", frozenset(self.words))

    @property
    def names_backends(self) -> bool:
        """Whether its values are names of backends."""
        return self.word_set == BACKENDS

    @property
    def follows(self) -> bool:
        """Whether it follows a field of the request and has its words, as the stored KV dtype of a run does."""
        return self.name not in CORE and self.word_set in _FIELD_WORDS

    @property
    def least(self) -> int:
        """The least value of an integer."""
        return CORE[self.name].least if self.kind == "integer" and self.name in CORE else 0


@dataclass(frozen=True)
class Vocabulary:
    """All facets and words of one registry, by name. Immutable.

    ``facets`` keeps the order of the file, derived facets last. ``words`` maps the name of a set (dtypes, kv_dtypes,
    ...) to its words. Features, flags and packages are fields of their own. ``unread`` are architectures that exist and
    that no table says anything about: they are no words of a condition, and an answer on one is not known. ``later``
    are the derived facets that no condition may name yet, the one that is derived first.
    """

    facets: Mapping[str, Facet]
    words: Mapping[str, Mapping[str, Word]]
    features: Mapping[str, Word]
    flags: Mapping[str, Word]
    packages: Mapping[str, Word]
    architectures: Mapping[str, Architecture]
    retired_environment: Mapping[str, Word]
    unread: Mapping[str, Architecture] = field(default_factory=FrozenDict)
    later: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.name != "later":
                object.__setattr__(self, f.name, frozen(getattr(self, f.name)))
        object.__setattr__(self, "words", frozen({name: frozen(group) for name, group in self.words.items()}))

    def facet(self, name: str) -> Facet | None:
        """The facet of that name, else None."""
        return self.facets.get(name)

    def missing(self, name: str, forms: Sequence[str] = ()) -> tuple[str, str]:
        """Why a condition or a value cannot name a facet, and the help. forms: other names that would do."""
        if name not in self.later:
            return f"unknown facet `{name}`", did_you_mean(name, [*self.facets, *forms])
        if name == self.later[0]:
            return f"`{name}` is derived here, and cannot follow from itself", "name another facet"
        return f"`{name}` is derived below", "a derived facet follows from those above it: move it up"

    @cached_property
    def claims(self) -> Mapping[str, Facet]:
        """Capability key -> the facet that it constrains, in the order of the facets."""
        return FrozenDict({f.claim: f for f in self.facets.values() if f.claim})

    def divides(self, facets: Iterable[str]) -> bool:
        """Whether one of the facets is the quotient or the remainder of two others."""
        return any(self.facets[name].divides for name in facets)

    def words_of(self, facet: str) -> Mapping[str, Word]:
        """The words that are a facet's values, by name; empty for a facet without words."""
        sets = {**self.words, "features": self.features, "flags": self.flags}
        return sets.get(self.facets[facet].word_set or "", {})

    def architectures_of(self, platform: str) -> tuple[Architecture, ...]:
        """The architectures of one platform, in capability order."""
        return tuple(a for a in self.architectures.values() if a.platform == platform)

    def architecture(self, name: str) -> Architecture | None:
        """The architecture with that name, product or compute capability, in any spelling; None if it is unknown.

        It may be one of ``unread``.
        """
        found = self._one_architecture(name)
        return None if found is None else self.any_architecture(found)

    def any_architecture(self, name: str) -> Architecture | None:
        """The architecture with exactly that name, also one of ``unread``, else None."""
        return self.architectures.get(name) or self.unread.get(name)

    def product(self, name: str) -> str | None:
        """The product that a text names, as the data spell it: ``L40S`` for ``NVIDIA L40S``.

        None for the name or the capability of an architecture, for several products, and for a part of one (MIG).
        """
        if "mig" in re.split(r"[-_ ]+", name.casefold()):
            return None
        archs = reversed([*self.architectures.values(), *self.unread.values()])
        named = {plain(other): (other, arch) for arch in archs for other in arch.other_names}
        for key, dropped in _shortenings(_VENDORS.sub("", name.partition(":")[0])):
            product, arch = named.get(key, ("", None))
            if arch is not None and dropped <= {plain(arch.family)} and not _TARGET.fullmatch(key):
                return product
        return None

    def device_of(self, product: str) -> str | None:
        """The word for a product that is one of the devices; None for any other product."""
        return self._word_named("device", product) if "device" in self.facets else None

    def device(self, name: str) -> str | None:
        """The word for a device's name as its driver prints it: H200 for ``NVIDIA H200``; None for an unknown device.

        A part of a device (MIG) counts as unknown.
        """
        if "device" not in self.facets or "mig" in re.split(r"[-_ ]+", name.casefold()):
            return None
        named = {plain(n): w for w in self.words_of("device").values() for n in (w.name, *w.other_names)}
        parts = re.split(r"[-_ ]+", _VENDORS.sub("", name).strip())[:_MOST_PARTS]
        while parts:
            if (word := named.get(plain("".join(parts)))) is not None:
                return word.name
            if not _FORM.fullmatch(parts.pop().casefold()):
                break
        return None

    def arch_of(self, device: str) -> str:
        """The architecture of a device, by the device's word."""
        return str(self.words_of("device")[device].facts["arch"])

    def help_for(self, facet: str, unknown: str) -> str:
        """Help for an unknown word of a facet: the word that has it as another name, else the nearest word."""
        if self.facets[facet].kind == "arch":
            return self._help_for_architecture(unknown)
        meant = self._word_named(facet, unknown)
        if meant is not None:
            return f"{unknown} is `{meant}` here"
        # the prefix of a family with presets, such as turboquant_: the help names all presets
        words = (w for w in self.words_of(facet).values() if "packed" in w.facts)
        family = [w.name for w in words if unknown.startswith(f"{w.facts.get('family')}_")]
        if family:
            return did_you_mean(unknown, family, 40)
        return did_you_mean(unknown, self.packages if facet == "packages" else map(str, self.facets[facet].words))

    def _help_for_architecture(self, text: str) -> str:
        meant = self._one_architecture(text)
        if meant in self.unread:
            return f"{meant} is under `unread`: no table has data for it until it is under `architectures`"
        if meant:
            return f"{text} is `{meant}` here"
        # the name of several products, or of one product with words that no driver prints
        parts = re.split(r"[-_ ]+", text)[:_MOST_PARTS]
        for length in range(len(parts), 0, -1):
            names = dict.fromkeys(" ".join(parts[i : i + length]) for i in range(len(parts) - length + 1))
            several = {name: archs for name in names if (archs := self._architectures_named(name))}
            if several:
                return ", ".join(f"{name} is {' or '.join(archs)} here" for name, archs in several.items())
        name = plain(text.partition(":")[0])
        for other in (name, f"sm{_target(name)}"):
            if _OTHERS.fullmatch(other):
                return f"no data here is about {other}; {few_of_many('', self.architectures, LISTS_ARCHITECTURES)}"
        # an unknown product may look like an architecture of another generation: P100 like sm100
        alike = _letters(text) in map(_letters, self.architectures)
        return few_of_many(text, self.architectures, LISTS_ARCHITECTURES, 0.6 if alike else 1.0)

    def _architectures_named(self, name: str) -> list[str]:
        """The architectures with this name or family, or with a product of this number: 5090."""
        archs = self.architectures.values()
        if name.isdecimal():
            # a number of up to three digits may be a memory size
            several = [a.name for a in archs if len(name) > 3 and any(name in n.split() for n in a.other_names)]
        elif (meant := self._word_named("arch", name)) is not None:
            several = [meant]
        else:
            several = [a.name for a in archs if plain(name) and plain(a.family) == plain(name)]
        return [f"`{arch}`" for arch in several]

    def _words(self, facet: str) -> Mapping[str, Word | Architecture]:
        if self.facets[facet].kind == "arch":
            return self.architectures
        return self.packages if facet == "packages" else self.words_of(facet)

    def _word_named(self, facet: str, text: str) -> str | None:
        """The word of a facet that a text names, in another spelling or by an alias, else None."""
        if self.facets[facet].kind == "arch":
            return self._one_architecture(text)
        words, wanted = self._words(facet).values(), plain(text)
        return next((w.name for w in words if wanted and wanted in map(plain, (w.name, *w.other_names))), None)

    def _one_architecture(self, text: str) -> str | None:
        # reversed: if two architectures share a name, the first one gets it
        archs = reversed([*self.architectures.values(), *self.unread.values()])
        named = {plain(name): arch for arch in archs for name in (arch.name, *arch.other_names)}
        # a driver appends settings to the name: gfx942:sramecc+:xnack-
        text = _VENDORS.sub("", text.partition(":")[0])
        if arch := named.get(plain(text)) or named.get(_target(text)):
            return arch.name
        # MI250X/MI250 names two products of one architecture
        found = {_meant(part, named) for part in text.split("/")}
        return found.pop() if len(found) == 1 else None

    def with_facets(self, more: Iterable[Facet]) -> Vocabulary:
        """A copy of this vocabulary with more facets."""
        facets = {**self.facets, **{f.name: f for f in more}}
        return replace(self, facets=facets)


class OpenFacets:
    """The facets of a model's config: every field of it is a facet, and its value may be any JSON value.

    A missing field and a field that is null are both None. `attnreg.compile.conditions.Parser` takes an instance in
    place of a vocabulary.
    """

    facets: Mapping[str, Facet] = FrozenDict()
    architectures: Mapping[str, Architecture] = FrozenDict()
    packages: Mapping[str, Word] = FrozenDict()

    def facet(self, name: str) -> Facet:
        """The field of that name."""
        return Facet(name, "config", "field", "a field of a model's config", Location("", 0, 0))

    def help_for(self, facet: str, unknown: str) -> str:
        """No help: a field has no words of its own."""
        return ""

    def missing(self, name: str, forms: Sequence[str] = ()) -> tuple[str, str]:
        """No reason: every field is a facet."""
        return "", ""


def plain(text: str) -> str:
    """A name in lower case, with letters and digits alone: ``rtx4090`` for ``RTX 4090``."""
    return "".join(c for c in text.casefold() if c.isalnum())


def _meant(text: str, named: Mapping[str, Architecture]) -> str | None:
    """The architecture of a product. Its name may end in its memory, its form, or the architecture's family."""
    for key, dropped in _shortenings(text):
        arch = named.get(key)
        # one driver's name may have two products: MI250X / MI250
        others = {word for word in dropped if named.get(plain(word)) is arch}
        if arch is not None and dropped - others <= {plain(arch.family)}:
            return arch.name
    return None


def _shortenings(text: str) -> Iterator[tuple[str, set[str]]]:
    """A name with fewer and fewer of its last words, as `plain` gives it, and the dropped words that are no form."""
    parts = [part.casefold() for part in re.split(r"[-_ ]+", text) if part]
    dropped: set[str] = set()
    while 0 < len(parts) <= _MOST_PARTS:
        yield plain("".join(parts)), dropped
        last = parts.pop()
        if not _FORM.fullmatch(last):
            dropped = {*dropped, last}


def _target(text: str) -> str:
    """The compute capability in a compiler's target: ``90`` for ``sm_90a``; "" for any other name."""
    target = _TARGET.fullmatch(plain(text))
    return target[1] if target else ""


def _letters(text: str) -> str:
    """The letters with which a name begins: ``sm`` of sm_90."""
    return re.split(r"[^a-z]", text.casefold(), maxsplit=1)[0]
