"""Loads a registry from a git revision, ``REV:DIRECTORY``, or from any source that `load_registry` takes."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

from attnreg.compile.bundled import registry_root
from attnreg.errors import Location, Problem, RegistryError
from attnreg.loader import bundled_registries, load_registry
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


def family_texts(source: str) -> dict[str, str] | None:
    """The files of the model families of what ``source`` names, as `load_revision` takes it; None where it has none."""
    revision, colon, directory = source.partition(":")
    if not colon or not revision or Path(source).exists():
        folder = Path(bundled_registries().get(source, source), "models")
        files = sorted(folder.glob("*.yaml")) if folder.is_dir() else []
        return {file.stem: file.read_text(encoding="utf-8", errors="replace") for file in files} or None
    here = Path.cwd() if directory else registry_root().parent
    folder = Path(directory.rstrip("/") or registry_root().name, "models")
    if not _git(here, "ls-tree", "--name-only", revision, "--", f"{folder.as_posix()}", source=source):
        return None
    archive = _git_bytes(here, "archive", "--format=tar", revision, "--", folder.as_posix(), source=source)
    out = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            name, file = Path(member.name), tar.extractfile(member)
            if name.suffix == ".yaml" and name.parent.name == "models" and file is not None:
                out[name.stem] = file.read().decode(errors="replace")
    return out or None


def _git(here: Path, *arguments: str, source: str) -> str:
    return _git_bytes(here, *arguments, source=source).decode()


def _git_bytes(here: Path, *arguments: str, source: str) -> bytes:
    try:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, check=False)
    except OSError as e:
        raise _problem(source, f"git cannot be run: {e.strerror}") from None
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip()
        raise _problem(source, f"git {arguments[0]}: {message or 'failed'}")
    return done.stdout


def _problem(source: str, message: str) -> RegistryError:
    return RegistryError(
        [Problem(Location(source, 1, 1), message, "name a revision as git does, for example main:registry")]
    )
