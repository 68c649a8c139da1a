"""vocabulary.yaml -> `Vocabulary`: facets, words and architectures of all files together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from attnreg import schema
from attnreg.errors import Location, Problem, did_you_mean
from attnreg.parts import Part
from attnreg.platforms import Platform
from attnreg.request import AttentionRequest
from attnreg.vocabulary import Architecture, Facet, Vocabulary, Word


def compile_vocabulary(parts: list[Part], problems: list[Problem]) -> Vocabulary:
    """The words of all files together; a later file may add words and facets and replace legends."""
    words: dict[str, dict[str, Word]] = {}
    features: dict[str, Word] = {}
    flags: dict[str, Word] = {}
    packages: dict[str, Word] = {}
    retired: dict[str, Word] = {}
    architectures: dict[str, Architecture] = {}
    for part in parts:
        at = _places(part)
        for name, group in part.model.words.items():
            words.setdefault(name, {}).update(_word_map(group, at, "words", name))
        features.update(_word_map(part.model.features, at, "features"))
        flags.update(_word_map(part.model.flags, at, "flags"))
        packages.update(_word_map(part.model.packages, at, "packages"))
        for name, data in part.model.retired_environment.items():
            retired[name] = Word(name, data.use, at("retired_environment", name), {"engine": data.engine})
        for platform, archs in part.model.architectures.items():
            for name, data in archs.items():
                where = at("architectures", platform, name)
                architectures[name] = Architecture(
                    name,
                    platform,
                    data.series or platform,
                    len(architectures),
                    data.family,
                    tuple(data.products),
                    where,
                )
    vocabulary = Vocabulary({}, words, features, flags, packages, architectures, retired)
    facets: dict[str, Facet] = {}
    for part in parts:
        for name, data in part.model.facets.items():
            facets[name] = _facet(part, name, data, vocabulary, problems)
        _check_facets(part, facets, vocabulary, problems)
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
            hint = did_you_mean(data.words, sets)
            problems.append(
                part.document.problem((*here, "words"), f"facets.{name}: unknown set of words `{data.words}`", hint)
            )
    elif data.kind == "arch":
        words = vocabulary.architectures
    elif data.kind == "boolean":
        words = (True, False)
    where = part.document.key_at(*here)
    return Facet(name, data.of, data.kind, data.legend, where, frozenset(words), data.claim, data.stated)


def _check_facets(part: Part, facets: dict[str, Facet], vocabulary: Vocabulary, problems: list[Problem]) -> None:
    core = {
        **dict.fromkeys(AttentionRequest.__dataclass_fields__, "request"),
        **dict.fromkeys(Platform.__dataclass_fields__, "platform"),
    }
    for name, of in core.items():
        if name not in facets and name not in ("extra", "_hash"):
            message = f"the facet `{name}` is missing: every {of} has it"
            problems.append(
                part.document.problem((*part.path, "facets"), message, "add it, or use `extends`", key=True)
            )
    for name in sorted(set(vocabulary.features) & set(vocabulary.flags)):
        path = (*part.path, "flags", name)
        problems.append(
            part.document.problem(path, f"`{name}` is a feature and a flag", "rename one of them", key=True)
        )
    for platform in vocabulary.words.get("platforms", {}):
        if not vocabulary.architectures_of(platform):
            path = (*part.path, "architectures")
            problems.append(part.document.problem(path, f"the platform `{platform}` has no architecture", key=True))
