"""The packages and programs of a vocabulary that are installed here, and their versions. No package is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnreg.language.vocabulary import Word


class PackageWarning(UserWarning):
    """Warns of an installed package whose version cannot be read."""


def installed_packages(known: Mapping[str, Word]) -> dict[str, str]:
    """Package -> version, for those of ``known`` that are installed here; "" for a package or program without one.

    A package whose version cannot be read is left out, with a `PackageWarning`.
    """
    versions: dict[str, str] = {}
    for name, word in known.items():
        if program := word.facts.get("executable"):
            versions |= {name: ""} if _program(program, word.facts["homes"]) else {}
            continue
        version = installed_version(word)
        if version is None and _importable(str(word.facts.get("import", ""))):
            version = ""
        if version is not None:
            versions[name] = version
    return versions


def _program(name: str, homes: Iterable[str]) -> bool:
    """Whether a program is on the path, or in the bin of a directory that one of the variables ``homes`` names."""
    places = [None, *(os.path.join(home, "bin") for variable in homes if (home := os.environ.get(variable)))]
    return any(shutil.which(name, path=place) for place in places)


def installed_version(word: Word) -> str | None:
    """The version of a package; None where it is not installed, or its version cannot be read (`PackageWarning`)."""
    for distribution in (*word.facts.get("distributions", ()), word.name):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        # the metadata of a package may be spoilt in any way, and says nothing of the others
        except Exception as e:
            message = f"the package {distribution} is left out: its version cannot be read ({type(e).__name__}: {e})"
            warnings.warn(message, PackageWarning, stacklevel=4)
    return None


def _importable(module: str) -> bool:
    # only a top-level name: finding a submodule would import its parents
    if not module or "." in module:
        return False
    try:
        spec = importlib.util.find_spec(module)
        # a folder without code of its own, such as a project's `kernels`, can be imported, and is not that package
        return spec is not None and spec.origin is not None
    except (ImportError, ValueError):
        return False
