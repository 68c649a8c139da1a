"""Pins: the versions of other packages that an installed package requires, from the vocabulary's ``brings``.

An installer refuses any other version beside the package that pins it, so no advice may name one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from attnreg.language.matchers import Requirement

if TYPE_CHECKING:
    from attnreg.language.vocabulary import Word
    from attnreg.platforms import Packages

_PARTS = re.compile(r"([A-Za-z0-9._-]+)(.*)")


class Means(NamedTuple):
    """How to get a package in some versions: the package to install, and the packages that it brings along.

    ``barred`` says why there is no way: no known version of an installed package brings the wanted one.
    """

    install: Requirement
    brings: tuple[Requirement, ...] = ()
    barred: str = ""

    @property
    def text(self) -> str:
        """``torch>=2.14, which brings triton 3.8``."""
        along = f", which brings {' and '.join(map(_short, self.brings))}" if self.brings else ""
        return f"{self.install}{along}{f', which {self.barred}' if self.barred else ''}"


def means(wanted: Requirement, installed: Packages | None, known: Mapping[str, Word]) -> Means:
    """How to get ``wanted`` beside the installed packages; ``known`` are the packages of the vocabulary."""
    for name, version in installed or ():
        table = known[name].facts.get("brings", {}) if name in known else {}
        now = next((release for release in table if _is_of(version, release)), None)
        pin = None if now is None else _pin(table[now], wanted.package)
        if now is None or pin is None or _agree(pin, wanted):
            continue
        other = _other(table, now, wanted)
        if other is None:
            return Means(wanted, barred=f"{name} {version} excludes: it brings {_short(pin)}")
        release, brought = other
        found = means(Requirement(name, release), installed, known)
        if found.barred:
            return Means(wanted, barred=f"{name} {version} excludes: it brings {_short(pin)}")
        return found._replace(brings=(*found.brings, brought))
    return Means(wanted)


def _other(table: Mapping[str, tuple[str, ...]], now: str, wanted: Requirement) -> tuple[str, Requirement] | None:
    """The release of a package, nearest to its current one, that brings ``wanted``, and the pin that it brings.

    Later releases come first. If every release from there on brings it, the result is a lower bound: ``>=2.14``.
    """
    from packaging.version import Version

    releases = sorted(table, key=Version)
    pins = {release: pin for release in releases if (pin := _pin(table[release], wanted.package))}
    fits = [release for release in releases if release in pins and _agree(pins[release], wanted)]
    later = [release for release in fits if Version(release) > Version(now)]
    if later and set(later) == set(releases[releases.index(later[0]) :]):
        return f">={later[0]}", pins[later[0]]
    nearest = later[0] if later else fits[-1] if fits else None
    return None if nearest is None else (f"=={nearest}.*", pins[nearest])


def _pin(pins: tuple[str, ...], package: str) -> Requirement | None:
    return next((pin for pin in _parsed(pins) if pin.package == package), None)


def _parsed(pins: tuple[str, ...]) -> Iterator[Requirement]:
    for pin in pins:
        match = _PARTS.fullmatch(pin)
        assert match is not None, pin
        yield Requirement(match[1], match[2])


def _is_of(version: str, release: str) -> bool:
    """Whether a version belongs to a release: 2.14.1+cu130 belongs to 2.14."""
    return Requirement("", f"=={release}.*").met_by((("", version),)) if version else False


def _agree(pin: Requirement, wanted: Requirement) -> bool:
    """Whether one version meets both.

    It is enough to try the versions that the specifiers name: a pin includes its own lower bound.
    """
    from packaging.specifiers import SpecifierSet

    both = SpecifierSet(",".join(filter(None, (pin.versions, wanted.versions))))
    named = [specifier.version.removesuffix(".*") for specifier in both]
    return any(both.contains(version, prereleases=True) for version in named)


def _short(requirement: Requirement) -> str:
    """``triton 3.8`` of ``triton~=3.8.0``, ``triton 3.7.1`` of ``triton==3.7.1``."""
    version = requirement.versions[2:]
    return f"{requirement.package} {version.rpartition('.')[0] if requirement.versions[0] == '~' else version}"
