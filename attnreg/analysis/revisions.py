"""Loads a registry from a git revision, ``REV:DIRECTORY``, or from any source that `load_registry` takes."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from attnreg.compile.bundled import registry_root
from attnreg.errors import Location, Problem, RegistryError
from attnreg.loader import load_registry
from attnreg.registry import Registry


def load_revision(source: str) -> Registry:
    """The registry that ``source`` names: ``main:registry`` is the directory ``registry`` in the revision ``main``.

    Without a directory (``main:``) it is the one of this checkout's registry. Raises `RegistryError`.
    """
    revision, colon, directory = source.partition(":")
    # a path may contain a colon, as on Windows
    if not colon or not revision or Path(source).exists():
        return load_registry(source)
    here = Path.cwd() if directory else registry_root().parent
    directory = directory.rstrip("/") or registry_root().name
    with tempfile.TemporaryDirectory() as scratch:
        files = _git(here, "ls-tree", "-r", "--name-only", revision, "--", f"{directory}/", source=source).splitlines()
        names = [f for f in files if f.endswith(".yaml") and Path(f).parent == Path(directory)]
        if not names:
            raise _problem(source, f"revision {revision} has no YAML files in {directory}")
        target = Path(scratch, f"{Path(directory).name}@{revision.replace('/', '-')}")
        target.mkdir()
        for name in names:
            text = _git(here, "show", f"{revision}:./{name}", source=source)
            (target / Path(name).name).write_text(text)
        return load_registry(target)


def _git(here: Path, *arguments: str, source: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
    except OSError as e:
        raise _problem(source, f"git cannot be run: {e.strerror}") from None
    if done.returncode:
        raise _problem(source, f"git {arguments[0]}: {done.stderr.strip() or 'failed'}")
    return done.stdout


def _problem(source: str, message: str) -> RegistryError:
    return RegistryError(
        [Problem(Location(source, 1, 1), message, "name a revision as git does, for example main:registry")]
    )
