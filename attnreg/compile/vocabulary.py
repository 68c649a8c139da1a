"""vocabulary.yaml -> `Vocabulary`: facets, words and architectures of all files together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from attnreg.compile import schema
from attnreg.compile.parts import Part
from attnreg.errors import Location, Problem, did_you_mean
from attnreg.language.vocabulary import ASKED, AUTOMATIC, BY_NAME, Architecture, Facet, Vocabulary, Word
from attnreg.platforms import Platform
from attnreg.request import AttentionRequest


def _core() -> dict[str, tuple[str, tuple[str, ...]]]:
    """The facets that every request and platform has: whose they are, and the kinds that hold their values."""
    kinds = {"int": ("integer",), "frozenset[str]": ("words",), "Packages": ("packages",), "str": ("word", "text")}
    core = {
        f.name: (of, kinds[str(f.type).removesuffix(" | None")])
        for cls, of in ((AttentionRequest, "request"), (Platform, "platform"))
        for f in fields(cls)
        if f.init and f.name != "extra"
    }
    return core | {"platform": ("platform", ("word",)), "arch": ("platform", ("arch",))}


_CORE = _core()


def compile_vocabulary(parts: list[Part], problems: list[Problem]) -> Vocabulary:
    """The words of all files together; a later file may add words and facets and replace legends."""
    words: dict[str, dict[str, Word]] = {}
    features: dict[str, Word] = {}
    flags: dict[str, Word] = {}
    packages: dict[str, Word] = {}
    retired: dict[str, Word] = {}
    architectures: dict[str, Architecture] = {}
    clashes: set[str] = set()

    def clash(name: str, message: str, *path: str) -> None:
        if name not in clashes:
            here = (*part.path, *path, name)
            problems.append(part.document.problem(here, f"{'.'.join(path)}: {message}", "rename one", key=True))
        clashes.add(name)

    for part in parts:
        at = _places(part)
        for name, group in part.model.words.items():
            words.setdefault(name, {}).update(_word_map(group, at, "words", name))
        features.update(_word_map(part.model.features, at, "features"))
        flags.update(_word_map(part.model.flags, at, "flags"))
        packages.update(_word_map(part.model.packages, at, "packages"))
        for name in features.keys() & flags.keys():
            clash(name, f"`{name}` is a feature and a flag", "flags" if name in part.model.flags else "features")
        for name, data in part.model.retired_environment.items():
            retired[name] = Word(name, data.use, at("retired_environment", name), {"engine": data.engine})
        for platform, archs in part.model.architectures.items():
            for name, data in archs.items():
                where = at("architectures", platform, name)
                before = architectures.get(name)
                if before is not None and before.platform != platform:
                    clash(name, f"`{name}` is an architecture of {before.platform} too", "architectures", platform)
                architectures[name] = Architecture(
                    name,
                    platform,
                    data.series or platform,
                    len(architectures) if before is None else before.rank,
                    data.family,
                    tuple(data.products),
                    data.fp8,
                    where,
                )
    vocabulary = Vocabulary({}, words, features, flags, packages, architectures, retired)
    facets: dict[str, Facet] = {}
    for part in parts:
        for name, data in part.model.facets.items():
            facets[name] = _facet(part, name, data, vocabulary, problems)
    sets = {data.words for part in parts for data in part.model.facets.values() if data.words}
    for part in parts:
        _check_words(part, vocabulary, sets, problems)
    for name in _CORE.keys() - facets.keys():
        message = f"the facet `{name}` is missing: every {_CORE[name][0]} has it"
        path = (*parts[0].path, "facets")
        problems.append(parts[0].document.problem(path, message, "add it, or use `extends`", key=True))
    return vocabulary.with_facets(facets.values())


def _places(part: Part) -> Callable[..., Location]:
    return lambda *path: part.document.key_at(*part.path, *path)


def _word_map(group: dict[str, Any], at: Callable[..., Location], *path: str) -> dict[str, Word]:
    return {
        name: Word(
            name, data.legend, at(*path, name), data.model_dump(exclude={"legend"}, exclude_none=True, by_alias=True)
        )
        for name, data in group.items()
    }


def _facet(part: Part, name: str, data: schema.FacetData, vocabulary: Vocabulary, problems: list[Problem]) -> Facet:
    here = (*part.path, "facets", name)
    sets: dict[str, Iterable[Any]] = {
        **vocabulary.words,
        "features": vocabulary.features,
        "flags": vocabulary.flags,
    }
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
    of, kinds = _CORE.get(name, (data.of, ("word", "arch", "integer", "text", "boolean")))
    if name not in _CORE and (name == ASKED or data.of == "selection"):
        _check_asked(part, name, data, frozenset(words), problems)
    elif data.of != of or data.kind not in kinds:
        message = f"facets.{name}: expected a facet of the {of}, of kind {', '.join(kinds)}"
        help_ = "" if name in _CORE else "sets of words are asked for as features or flags"
        problems.append(part.document.problem(here, message, help_, key=True))
    where = part.document.key_at(*here)
    return Facet(name, data.of, data.kind, data.legend, where, frozenset(words), data.claim, data.stated)


def _check_asked(part: Part, name: str, data: schema.FacetData, words: frozenset[Any], problems: list[Problem]) -> None:
    """The selection has one facet, of which the selector sets the value: it must have the values that it sets."""
    wrong = ""
    if name != ASKED or data.of != "selection" or data.kind != "word":
        wrong = f"the selection has one facet, `{ASKED}`, of kind word"
    elif words != {AUTOMATIC, BY_NAME}:
        wrong = f"its words are `{AUTOMATIC}` and `{BY_NAME}`, got {', '.join(sorted(words)) or 'none'}"
    elif data.claim is not None:
        wrong = "no capability constrains it"
    if wrong:
        help_ = f"{ASKED} says whether an order tries a backend (`{AUTOMATIC}`) or a user named it (`{BY_NAME}`)"
        here = (*part.path, "facets", name)
        problems.append(part.document.problem(here, f"facets.{name}: {wrong}", help_, key=True))


def _check_words(part: Part, vocabulary: Vocabulary, sets: set[str], problems: list[Problem]) -> None:
    """What the words of one file must be beside those of the others."""

    def report(path: tuple[str, ...], message: str, help_: str) -> None:
        where = ".".join(path[:-1])
        problems.append(part.document.problem((*part.path, *path), f"{where}: {message}", help_, key=True))

    model, platforms = part.model, vocabulary.words.get("platforms", {})
    for name in model.words.keys() - sets:
        report(("words", name), f"no facet takes its values from `{name}`", did_you_mean(name, sets))
    for name in model.architectures.keys() - platforms.keys():
        report(("architectures", name), f"unknown platform `{name}`", did_you_mean(name, platforms))
    for name in model.words.get("platforms", {}):
        if not vocabulary.architectures_of(name):
            report(("words", "platforms", name), f"`{name}` has no architecture", "add one under `architectures`")
