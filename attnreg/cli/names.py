"""Resolves names on the command line: GPUs of ``--arch``, and the release of ``--engine``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from attnreg.cli.refusals import BadInput
from attnreg.engines.releases import BEFORE, NUMBER, apart, patch_notes, table_of

if TYPE_CHECKING:
    from attnreg.language.vocabulary import Vocabulary
    from attnreg.registry import Registry


class Place(NamedTuple):
    """What one name stands for: an architecture with its platform, the device if it is one, and the product's name."""

    platform: str
    arch: str
    device: str | None = None
    product: str | None = None


def places(archs: Iterable[str], devices: Iterable[str], *vocabularies: Vocabulary) -> list[Place]:
    """Each named architecture or product, and each named device with its architecture.

    Raises `BadInput` for a word that none of the vocabularies has.
    """
    found = [_place(name, *vocabularies) for name in archs]
    # products of one architecture that no table tells apart have one answer, under all their names
    alike: dict[tuple[str, str | None], list[Place]] = {}
    for place in found:
        alike.setdefault((place.arch, place.device), []).append(place)
    known = [
        same[0]._replace(product=", ".join(dict.fromkeys(p.product for p in same if p.product)) or None)
        for same in alike.values()
    ]
    named: dict[str, Place] = {}
    for name in devices:
        about = next(((v, word) for v in vocabularies if (word := v.device(name)) is not None), None)
        if about is None:
            telling = next((v for v in vocabularies if v.facet("device")), None)
            help_ = telling.help_for("device", name) if telling else "the registry tells no devices apart"
            raise BadInput(f"unknown device {name!r}", help_)
        vocabulary, word = about
        arch = vocabulary.arch_of(word)
        named[word] = Place(vocabulary.architectures[arch].platform, arch, word)
    for device, place in named.items():
        if known and place.arch not in {other.arch for other in known}:
            others = ", ".join(dict.fromkeys(other.arch for other in known))
            raise BadInput(f"--device-name {device} is {place.arch}, and --arch names {others}", "leave --arch out")
    # the device says more than its architecture
    narrowed = {place.arch for place in named.values()}
    alone = [p for p in known if p.device not in named and (p.device or p.arch not in narrowed)]
    return [*alone, *named.values()]


def _place(name: str, *vocabularies: Vocabulary) -> Place:
    """What a text names, an architecture or a product. Raises `BadInput` for an unknown name."""
    found = next(((v, arch) for v in vocabularies if (arch := v.architecture(name)) is not None), None)
    if found is None:
        raise BadInput(f"unknown architecture {name!r}", vocabularies[0].help_for("arch", name))
    vocabulary, arch = found
    product = vocabulary.product(name)
    return Place(arch.platform, arch.name, vocabulary.device_of(product) if product else None, product)


def release_of(engine: str) -> str:
    """The bundled registry of an engine's release, such as vllm-0.33.0 for vllm. Raises `BadInput` for any other."""
    from attnreg.compile.inputs.bundled import bundled_overlays, bundled_registries, engines, help_for_registry

    given = named_releases(engine)[0] if NUMBER.fullmatch(engine) else engine
    name, known = with_table(given, "--engine "), [name for name in bundled_registries() if name != "default"]
    if name in known or name in bundled_overlays():
        return name
    if os.path.exists(engine):
        raise BadInput(f"--engine {engine} is a file or a directory", f"give --registry {engine}")
    if engine == "default":
        raise BadInput("--engine default names no engine", "leave it out: then attnreg's own kernels are asked")
    names = known if "-" in engine else [*engines(), *known]
    raise BadInput(f"--engine {engine}: no release of an engine has that name", help_for_registry(engine, names))


def with_table(name: str, option: str = "") -> str:
    """The bundled registry for a release in any spelling; any other text is unchanged.

    option: the option with the name, for the message. Raises `BadInput` for a release of an engine without a table.
    """
    from attnreg.compile.inputs.bundled import (
        bundled_registries,
        engines,
        help_for_registry,
        nearest_release,
        plain_release,
        spelled_release,
    )
    from attnreg.selection.wording import engine_words

    found, plain = spelled_release(name), plain_release(name)
    engine, _, version = plain.partition("-")
    release = engine in engines() and NUMBER.fullmatch(version) and "+" not in version
    if release and found not in bundled_registries() and not os.path.exists(name):
        words = engine_words(engine, version)
        if (before := BEFORE.fullmatch(version)) is not None:
            near = nearest_release(engine, before[1])
            message = f"{option}{name}: {words} is no release, and what it changes is in no table"
            raise BadInput(message, f"the nearest release is `{near}`")
        raise BadInput(f"{option}{name}: there is no table of {words}", help_for_registry(plain))
    return found


def named_releases(*names: str) -> list[str]:
    """The bundled registries of releases; any other text is unchanged.

    A number such as 0.20 is a release of the engine that another name begins with, or of the one engine that has it.
    A minor release is not the table that another name names, if it has others.
    Raises `BadInput` for a number of no engine or of several, and for a release without a table.
    """
    from attnreg.compile.inputs.bundled import (
        bundled_registries,
        engines,
        help_for_registry,
        nearest_release,
        release_name,
    )

    named = [engine for name in names if (engine := _engine_in(name))]

    def whole(name: str) -> str:
        if os.path.exists(name) or not NUMBER.fullmatch(name):
            return with_table(name)
        number = name.removeprefix("v").partition("+")[0]
        # a candidate is of the engine that has the release
        of = found[1] if (found := BEFORE.fullmatch(number)) is not None else number
        having = [engine for engine in engines() if release_name(f"{engine}-{of}") in bundled_registries()]
        having = [engine for engine in having if engine in named] or having
        if len(having) > 1:
            near = f"{(named or having)[0]}-{number}"
            what = f"{name} is a release of {' and of '.join(having)}"
            raise BadInput(what, f"give the engine too, such as {near}; {help_for_registry(near)}")
        if not having and not named:
            near = " and ".join(nearest_release(engine, number) for engine in engines())
            raise BadInput(f"there is no table of a release {name}", f"the nearest are {near}")
        return with_table(f"{(having or named)[0]}-{number}")

    return apart(names, [whole(name) for name in names])


def compared_releases(before: str, after: str | None) -> tuple[str, str]:
    """The names of two releases to compare; without a second one, the newest release of the engine.

    Raises `BadInput` as `named_releases` does, and for a missing second name.
    """
    from attnreg.compile.inputs.bundled import release_name

    first, *rest = named_releases(before, *([after] if after is not None else []))
    if rest:
        return first, rest[0]
    engine = _engine_in(first)
    if not engine:
        raise BadInput("upgrade needs --to", "name the release to upgrade to")
    return first, release_name(engine)


def _engine_in(name: str) -> str:
    """The engine that a name of a release begins with; "" for any other text."""
    from attnreg.compile.inputs.bundled import engines, spelled_release

    engine = spelled_release(name).partition("-")[0]
    return engine if engine in engines() else ""


def engine_notes(engine: str | None, registry: Registry, *, own: bool) -> list[str]:
    """Which table answers for a patch release, or how to ask for an engine's choice, if the question names no engine or
    not the release that is installed here.

    engine: the name of ``--engine``. own: whether attnreg's own registry answers, because the question names none.
    """
    import importlib.metadata

    from attnreg.compile.inputs.bundled import engines
    from attnreg.selection.wording import engine_of, engine_words

    notes = patch_notes(engine)
    for name in engines() if own else [engine_of(registry)] if engine in engines() else []:
        try:
            version = importlib.metadata.version(name)
        # another package's broken metadata is no reason to fail
        except Exception:
            continue
        here, release = f"{engine_words(name, version)} is installed here", table_of(name, version)
        if release is None:
            notes.append(f"{here}, and no table of attnreg is about it")
        elif release.newer:
            cure = "answers" if release.name == registry.base else f"is the newest: give --engine {release.name}"
            notes.append(f"{here}, which is newer than any table: that of {release.name} {cure}")
        elif release.name != registry.base:
            notes.append(f"{here}: for its choice give --engine {release.name}")
    if own and not notes:
        named = " or ".join(f"--engine {name}" for name in reversed(engines()))
        notes.append(f"these are attnreg's own kernels: for an engine's choice give {named}")
    return notes


def names_of_models(models: Iterable[str]) -> str:
    """The names of up to three models, else their number."""
    names = [*dict.fromkeys(filter(None, models))]
    return "the request" if not names else ", ".join(names) if len(names) <= 3 else f"the {len(names)} models"


def is_later(name: str, other: str) -> bool:
    """Whether a bundled release is later than another one of the same engine."""
    from packaging.version import Version

    from attnreg.compile.inputs.bundled import bundled_registries

    (engine, _, version), (its, _, than) = (text.rpartition("-") for text in (name, other))
    return engine == its and {name, other} <= bundled_registries().keys() and Version(version) > Version(than)
