"""Architectures: the classes of models that a release of an engine serves, and how it serves each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attnreg.errors import Location

# an engine's own class; every other word for how a class is served is a word of the data
NATIVE = "native"
# a class that the data does not name: in no list, or with code that comes with the checkpoint
UNLISTED, REMOTE = "unlisted", "remote"


class ServedAs(NamedTuple):
    """How a release serves one architecture.

    ``how`` is a word of the data. ``about`` is what the data says beside the word: a version, an address or a sentence.
    ``where`` is the line of the name; None for a name that the data does not have.
    """

    architecture: str
    how: str
    about: str = ""
    where: Location | None = None


@dataclass(frozen=True, slots=True)
class Architectures:
    """The table of one release: architecture -> the word for how it is served, the key below it, its file and its line.

    A class whose name ends with one of ``suffixes`` is served by its model's class with another of them, if the engine
    has that one.
    """

    names: Mapping[str, tuple[str, str, str, int]]
    suffixes: tuple[str, ...] = ()

    def of(self, names: Sequence[str], *, remote: bool = False) -> ServedAs | None:
        """How a config with these architectures is served: as the first that is native, or as the first of all.

        remote: whether the config has code of its own for its model. None without a name.
        """
        found = [self._of(name) for name in names]
        if not found:
            return None
        served = next((served for served in found if served.how == NATIVE), found[0])
        return served._replace(how=REMOTE) if remote and served.how == UNLISTED else served

    def _of(self, name: str) -> ServedAs:
        how, about, file, line = self.names.get(name, (UNLISTED, "", "", 0))
        if how == UNLISTED and self._converted(name):
            return ServedAs(name, NATIVE)
        return ServedAs(name, how, about, Location(file, line, 3) if line else None)

    def _converted(self, name: str) -> bool:
        """Whether the engine has a class of the same model with another suffix, which it converts to this one."""
        suffix = next((s for s in self.suffixes if name.endswith(s)), None)
        if suffix is None:
            return False
        stem = name.removesuffix(suffix)
        return any(self.names.get(stem + other, ("",))[0] == NATIVE for other in self.suffixes)
