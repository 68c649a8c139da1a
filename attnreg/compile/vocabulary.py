"""Compiles vocabulary.yaml to `Vocabulary`: the facets, words and architectures of all files together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from attnreg.compile.conditions import FORMS, WORD_OPERATORS
from attnreg.compile.parts import QUOTIENT, QUOTIENT_HELP, Reporter, VocabularyPart
from attnreg.compile.schema import tables as schema
from attnreg.compile.schema.skip_layers import SkipLayersData
from attnreg.compile.schema.values import EqualData, FromData, QuotientData, RemainderData
from attnreg.compile.source.yaml_source import Path_, shown
from attnreg.compile.validation import FilePart
from attnreg.errors import Location, Problem, did_you_mean
from attnreg.language.computed import Computed, From
from attnreg.language.conditions import Condition
from attnreg.language.facets import CORE, OPTIONAL
from attnreg.language.packed import packed_problems
from attnreg.language.vocabulary import (
    ASKED,
    AUTOMATIC,
    BACKENDS,
    BY_MODEL,
    BY_NAME,
    NAMED,
    Architecture,
    Facet,
    Kind,
    Vocabulary,
    Word,
    plain,
)

# words that data and commands read as another value, and words with a special meaning in a claim
_VALUES = frozenset({"null", "true", "false"})
_CLAIMED = _VALUES | {*FORMS, *WORD_OPERATORS, "same"}
# keys of a row that are not claims
_KEYS = ("features", "add", "remove", "platforms", "attention", "phase")


def compile_vocabulary(parts: list[VocabularyPart], rows: Iterable[str], problems: list[Problem]) -> Vocabulary:
    """The vocabulary of all files together; a later file may add words and facets and replace legends.

    rows: the names of the registry's backends.
    """
    words = _Words(problems)
    for part in parts:
        words.add(part)
    vocabulary = words.vocabulary()
    facets: dict[str, Facet] = {}
    for part in parts:
        for name, data in part.model.facets.items():
            facets[name] = _facet(part, name, data, vocabulary, rows, problems)
    sets = {data.words for part in parts for data in part.model.facets.values() if data.words}
    for part in parts:
        _check_words(part, vocabulary, sets, facets, problems)
    problems += _reserved(vocabulary.words, facets.values())
    named: list[Mapping[str, Word | Architecture]] = [*vocabulary.words.values(), vocabulary.architectures]
    for words_of_a_kind in (*named, vocabulary.features, vocabulary.flags, vocabulary.packages):
        problems += _ambiguous(words_of_a_kind)
    for name in CORE.keys() - facets.keys() - OPTIONAL:
        message = f"the facet `{name}` is missing: every {CORE[name].of} has it"
        path = (*parts[0].path, "facets")
        problems.append(parts[0].document.problem(path, message, "add it, or use `extends`", key=True))
    return vocabulary.with_facets(facets.values())


def _ambiguous(words: Mapping[str, Word | Architecture]) -> Iterator[Problem]:
    """A problem for each name, in any spelling, that two words of one kind have."""
    owners = {plain(name): name for name in words}
    for word in words.values():
        for alias in word.other_names:
            owner = owners.setdefault(plain(alias), word.name)
            if owner != word.name:
                yield Problem(word.where, f"{word.name}: `{alias}` is a name of {owner} too", "leave it to one of them")


def _reserved(sets: Mapping[str, Mapping[str, Word]], facets: Iterable[Facet]) -> Iterator[Problem]:
    """A problem for each word that has a special meaning in values or claims."""
    claimed = {facet.word_set for facet in facets if facet.claim is not None}
    for group, words in sets.items():
        reserved = _CLAIMED if group in claimed else _VALUES
        for word in filter(reserved.__contains__, words):
            message = f"words.{group}: `{word}` is no word where values are written"
            yield Problem(words[word].where, message, "rename it")


def wrong_facets(facets: Iterable[Facet]) -> Iterator[Problem]:
    """A problem for each facet whose name or claim has another meaning in the data."""
    claims = dict.fromkeys(_KEYS, "a row itself")
    for facet in facets:
        if facet.name in FORMS:
            message = f"{facet.name}: `{facet.name}` is a key of conditions, so it names no facet"
            yield Problem(facet.where, message, "rename the facet")
        if facet.claim is not None and (owner := claims.setdefault(facet.claim, facet.name)) != facet.name:
            message = f"{facet.name}: `{facet.claim}` is a key of {owner} already"
            yield Problem(facet.where, message, "give it a claim of its own")


class _Words:
    """The words of all files so far, by kind; reports a word with two meanings."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        self.clashes: set[str] = set()
        self.sets: dict[str, dict[str, Word]] = {}
        self.features: dict[str, Word] = {}
        self.flags: dict[str, Word] = {}
        self.packages: dict[str, Word] = {}
        self.retired: dict[str, Word] = {}
        self.architectures: dict[str, Architecture] = {}
        self.unread: dict[str, Architecture] = {}

    def vocabulary(self) -> Vocabulary:
        """The words, without facets."""
        # a later file has data for it
        unread = {name: arch for name, arch in self.unread.items() if name not in self.architectures}
        words = self.sets, self.features, self.flags, self.packages, self.architectures, self.retired
        return Vocabulary({}, *words, unread)

    def add(self, part: VocabularyPart) -> None:
        """Add the words of a file; a word of an earlier file takes the new legend, or is dropped."""
        data, at = part.model, part.key_at
        for name, patterns in data.drops.items():
            for number, pattern in enumerate(patterns):
                self._drop(part, name, number, pattern)
        for name, group in data.words.items():
            self.sets.setdefault(name, {}).update(_word_map(group, at, "words", name))
        self.features.update(_word_map(data.features, at, "features"))
        self.flags.update(_word_map(data.flags, at, "flags"))
        self.packages.update(_word_map(data.packages, at, "packages"))
        for name in self.features.keys() & self.flags.keys():
            self._clash(part, f"`{name}` is a feature and a flag", "flags" if name in data.flags else "features", name)
        for name, retired in data.retired_environment.items():
            self.retired[name] = Word(name, retired.use, at("retired_environment", name), {"engine": retired.engine})
        for platform, architectures in data.architectures.items():
            for name, architecture in architectures.items():
                self._add_architecture(part, platform, name, architecture)
        for platform, unread in data.unread.items():
            for name, other in unread.items():
                where, aliases = at("unread", platform, name), (*other.aliases, *filter(None, [other.capability]))
                products, source = tuple(other.products), other.source
                self.unread[name] = Architecture(
                    name, platform, platform, -1, other.family, products, "ocp", where, aliases, source
                )

    def _drop(self, part: VocabularyPart, name: str, number: int, pattern: str) -> None:
        words = self.sets.get(name, {})
        dropped = [word for word in words if fnmatchcase(word, pattern)]
        if not dropped:
            message = f"drops.{name}: no word below is `{pattern}`"
            here = (*part.path, "drops", name, number)
            self.problems.append(part.document.problem(here, message, did_you_mean(pattern, words)))
        for word in dropped:
            del words[word]

    def _add_architecture(self, part: VocabularyPart, platform: str, name: str, data: schema.ArchitectureData) -> None:
        before = self.architectures.get(name)
        if before is not None and before.platform != platform:
            message = f"`{name}` is an architecture of {before.platform} too"
            self._clash(part, message, "architectures", platform, name)
        self.architectures[name] = Architecture(
            name=name,
            platform=platform,
            series=data.series or platform,
            # an architecture of an earlier file keeps its rank
            rank=len(self.architectures) if before is None else before.rank,
            family=data.family,
            products=tuple(data.products),
            aliases=(*data.aliases, *filter(None, [data.capability])),
            fp8=data.fp8,
            where=part.key_at("architectures", platform, name),
        )

    def _clash(self, part: VocabularyPart, message: str, *path: str) -> None:
        if path[-1] not in self.clashes:
            message = f"{'.'.join(path[:-1])}: {message}"
            self.problems.append(part.document.problem((*part.path, *path), message, "rename one", key=True))
        self.clashes.add(path[-1])


def _word_map(
    group: Mapping[str, schema.WordData | schema.FlagData | schema.PackageData],
    at: Callable[..., Location],
    *path: str,
) -> dict[str, Word]:
    words = {}
    for name, data in group.items():
        facts = data.model_dump(exclude={"legend", "aliases"}, exclude_none=True, by_alias=True)
        words[name] = Word(name, data.legend, at(*path, name), facts, tuple(data.aliases))
    return words


def _facet(
    part: VocabularyPart,
    name: str,
    data: schema.FacetData,
    vocabulary: Vocabulary,
    rows: Iterable[str],
    problems: list[Problem],
) -> Facet:
    here = (*part.path, "facets", name)
    sets: dict[str, Iterable[Any]] = {**vocabulary.words, "features": vocabulary.features, "flags": vocabulary.flags}
    words: Iterable[Any] = ()
    if data.kind in ("word", "words"):
        words = sets.get(data.words or "", ())
        if data.words not in sets:
            message = f"unknown set of words `{data.words}`" if data.words else "`words` is missing"
            hint = did_you_mean(data.words or "", sets)
            problems.append(part.document.problem((*here, "words"), f"facets.{name}: {message}", hint))
    elif data.kind == "arch":
        words = vocabulary.architectures
    elif data.kind == "boolean":
        words = (True, False)
    elif data.kind == "backend":
        words = sorted(rows)
    core = CORE.get(name)
    of, kinds = (core.of, core.kinds) if core else (data.of, ("word", "arch", "integer", "text", "boolean", "backend"))
    if core is None and (name in (ASKED, NAMED) or data.of == "selection"):
        _check_of_selection(part, name, data, frozenset(words), problems)
    elif data.of != of or data.kind not in kinds:
        message = f"facets.{name}: expected a facet of the {of}, of kind {', '.join(kinds)}"
        help_ = "" if core else "sets of words are asked for as features or flags"
        problems.append(part.document.problem(here, message, help_, key=True))
    problems += _wrong_reading(part, name, data, frozenset(words))
    where = part.document.key_at(*here)
    kind: Kind = "word" if data.kind == "backend" else data.kind
    word_set = BACKENDS if data.kind == "backend" else data.words
    reading = tuple(data.config), tuple(data.like.items()), data.unless, data.of_run or False
    return Facet(name, data.of, kind, data.legend, where, tuple(words), data.claim, word_set, *reading)


def _wrong_reading(part: VocabularyPart, name: str, data: schema.FacetData, words: frozenset[Any]) -> Iterator[Problem]:
    """The problems of the keys that read a facet from a model's config."""
    here = (*part.path, "facets", name)
    for key in ("config", "like", "unless", "of_run"):
        if getattr(data, key) and (name in CORE or data.of != "request"):
            message = f"facets.{name}: `{key}` is for a facet of the request that no other registry has"
            yield part.document.problem((*here, key), message, "remove it", key=True)
        elif getattr(data, key) and not data.config and key != "of_run":
            message = f"facets.{name}: `{key}` is about what is read from a config"
            yield part.document.problem((*here, key), message, "say where under `config`", key=True)
    if data.unless is not None and (data.unless not in CORE or CORE[data.unless].of != "request"):
        hint = did_you_mean(data.unless, [f.name for f in CORE.values() if f.of == "request"])
        yield part.document.problem((*here, "unless"), f"facets.{name}: unknown facet `{data.unless}`", hint)
    for pattern, value in data.like.items():
        wrong = data.kind in ("word", "boolean", "backend") and value not in words
        if wrong or (data.kind == "integer" and type(value) is not int):
            message = f"facets.{name}: `{value}` is no value of it"
            yield part.document.problem((*here, "like", pattern), message, "name one of its values")


def _check_of_selection(
    part: VocabularyPart, name: str, data: schema.FacetData, words: frozenset[Any], problems: list[Problem]
) -> None:
    """Check a facet of the selection: `asked` (who asks for a backend) or `named` (the named backend)."""
    wrong, expected = "", ({AUTOMATIC, BY_NAME}, {AUTOMATIC, BY_NAME, BY_MODEL})
    kind = {ASKED: "word", NAMED: "backend"}.get(name)
    if kind is None or data.of != "selection" or data.kind != kind:
        wrong = f"the selection has two facets, `{ASKED}` of kind word and `{NAMED}` of kind backend"
    elif name == ASKED and words not in expected:
        got = ", ".join(sorted(words)) or "none"
        wrong = f"its words are `{AUTOMATIC}`, `{BY_NAME}` and, where steps name backends, `{BY_MODEL}`, got {got}"
    elif data.claim is not None:
        wrong = "no capability constrains it"
    if wrong:
        help_ = f"{ASKED} says whether an order tries a backend (`{AUTOMATIC}`) or a user named it (`{BY_NAME}`)"
        here = (*part.path, "facets", name)
        problems.append(part.document.problem(here, f"facets.{name}: {wrong}", help_, key=True))


def _check_words(
    part: VocabularyPart, vocabulary: Vocabulary, sets: set[str], facets: Mapping[str, Facet], problems: list[Problem]
) -> None:
    """Report words of one file that do not fit the words of all files together."""

    def report(path: tuple[str | int, ...], message: str, help_: str) -> None:
        where = ".".join(map(str, path[:-1]))
        problems.append(part.document.problem((*part.path, *path), f"{where}: {message}", help_, key=True))

    model, platforms = part.model, vocabulary.words.get("platforms", {})
    for name in model.words.keys() - sets:
        report(("words", name), f"no facet takes its values from `{name}`", did_you_mean(name, sets))
    for group, words in model.words.items():
        for word, data in words.items():
            for path, message, help_ in _wrong_skip_layers(data.skip_layers or (), facets):
                report(("words", group, word, "skip_layers", *path), message, help_)
            for path, message, help_ in packed_problems(data.packed) if data.packed is not None else ():
                report(("words", group, word, "packed", *path), message, help_)
    devices = facets["device"].word_set if "device" in facets else None
    for name, data in model.words.get(devices or "", {}).items():
        for path, message, help_ in _wrong_device(data.model_extra or {}, vocabulary):
            report(("words", str(devices), name, *path), message, help_)
    for name, flag in model.flags.items():
        for number, platform in enumerate(flag.platforms):
            if platform not in platforms:
                hint = did_you_mean(platform, platforms)
                report(("flags", name, "platforms", number), f"unknown platform `{platform}`", hint)
    for path, message, help_ in _wrong_platforms(model, platforms):
        report(path, message, help_)
    for name in model.words.get("platforms", {}):
        if not vocabulary.architectures_of(name):
            report(("words", "platforms", name), f"`{name}` has no architecture", "add one under `architectures`")


def _wrong_platforms(
    model: schema.VocabularyFile, platforms: Mapping[str, Word]
) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """The problems of platforms that have architectures and are no words: the path, the message and the help."""
    for group in ("architectures", "unread"):
        for name in getattr(model, group).keys() - platforms.keys():
            yield (group, name), f"unknown platform `{name}`", did_you_mean(name, platforms)


def _wrong_skip_layers(
    skip_layers: Iterable[SkipLayersData], facets: Mapping[str, Facet]
) -> Iterator[tuple[tuple[str | int, ...], str, str]]:
    """The problems of rules for skipped layers: the path below the word's rules, the message and the help."""
    for number, rule in enumerate(skip_layers):
        for name, value in rule.ask.items():
            at, facet = (number, "ask", name), facets.get(name)
            if facet is None:
                yield at, f"unknown facet `{name}`", did_you_mean(name, facets)
            elif facet.kind == "word" and value is not None and value not in facet.known:
                yield at, f"unknown value `{value}`", did_you_mean(str(value), facet.known)
            elif facet.kind == "integer" and value is not None and type(value) is not int:
                yield at, f"expected an integer, got {shown(value)}", ""


def _wrong_device(facts: Mapping[str, Any], vocabulary: Vocabulary) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """The problems of a device: the path below its word, the message and the help."""
    arch = facts.get("arch")
    if not isinstance(arch, str) or arch not in vocabulary.architectures:
        help_ = did_you_mean(str(arch), vocabulary.architectures) if arch else "say which: `arch: sm90`"
        yield (), f"a device has an architecture, got {shown(arch)}", help_
    for name in ("gigabytes", "teraflops"):
        if name in facts and (type(facts[name]) is not int or facts[name] < 1):
            yield (name,), f"{name} are a number of at least 1, got {shown(facts[name])}", "leave out what is not known"


def numeric(
    reporter: Reporter, part: FilePart[schema.VocabularyFile], value: Any, path: Path_
) -> int | From | Computed | None:
    """The value of a case of a facet that divides. Reports a value that is no integer."""
    if value is None or type(value) is int:
        return value
    if not isinstance(value, FromData | QuotientData | RemainderData):
        got = "a mapping" if isinstance(value, EqualData) else shown(value)
        reporter.report(part, path, f"expected an integer, got {got}", "another case divides")
        return None
    # the operation is the only field, and its value the operands
    computed = From(value.from_) if isinstance(value, FromData) else Computed._make(next(iter(value)))
    for name in computed.facets:
        facet = reporter.vocabulary.facets.get(name)
        if reporter.name(part, path, name, reporter.vocabulary.facets, "facet") and facet and facet.kind != "integer":
            reporter.report(part, path, f"`{name}` holds no integer", "take facets of integers")
        elif facet and facet.divides:
            reporter.report(part, path, f"`{name}` cannot be used here: {QUOTIENT}", QUOTIENT_HELP)
    return computed


def equality(
    reporter: Reporter, part: FilePart[schema.VocabularyFile], names: Sequence[str], *path: str | int
) -> Condition:
    """The condition that two facets of words have one value. Reports two facets that never or always have."""
    # by type too, as false and 0 are equal in Python
    words = list[dict[tuple[type, Any], Any]]()
    for name in names:
        facet = reporter.vocabulary.facets.get(name)
        if reporter.name(part, path, name, reporter.vocabulary.facets, "facet") and facet:
            known = facet.words if facet.kind in ("word", "boolean", "derived") else ()
            words.append({(type(word), word): word for word in known})
            if not known:
                reporter.report(part, path, f"`{name}` holds no single word", "compare facets of words")
    if len(words) < 2 or not all(words):
        return reporter.condition(part, {}, *path)
    common = [word for key, word in words[0].items() if key in words[1]]
    if not common or names[0] == names[1]:
        what = "are one facet" if common else "have no value in common"
        reporter.report(part, path, f"`{names[0]}` and `{names[1]}` {what}", "compare two facets of the same words")
    return reporter.condition(part, {"any": [dict.fromkeys(names, word) for word in (None, *common)]}, *path)
