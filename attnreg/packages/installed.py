"""Finds which packages and programs of a vocabulary are installed, and their versions. It imports none of them."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnreg.language.vocabulary import Word


class PackageWarning(UserWarning):
    """The warning about an installed package with an unreadable version."""


def installed_packages(known: Mapping[str, Word]) -> dict[str, str]:
    """Package -> version, for the installed packages of ``known``; "" for a package or program without a version.

    A package with an unreadable version is left out, with a `PackageWarning`.
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
    """Whether a program is on the path, or in ``$HOME/bin`` for a variable ``HOME`` of ``homes``."""
    import shutil

    places = [None, *(os.path.join(home, "bin") for variable in homes if (home := os.environ.get(variable)))]
    return any(shutil.which(name, path=place) for place in places)


def installed_version(word: Word) -> str | None:
    """The version of a package; None if it is not installed, or if its version is unreadable (`PackageWarning`)."""
    # imported here: it takes a fifth of the time to import the loader
    from importlib.metadata import PackageNotFoundError, version

    for distribution in (*word.facts.get("distributions", ()), word.name):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
        # broken metadata of one package must not affect the other packages
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
        # a folder without __init__.py, such as a project's `kernels`, can be imported but is not the package
        return spec is not None and spec.origin is not None
    except (ImportError, ValueError):
        return False
