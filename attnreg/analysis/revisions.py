"""Loads a registry from a git revision, ``REV:DIRECTORY``, or from any source that `load_registry` takes."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attnreg.compile.inputs.bundled import bundled_source, joined_families, registry_root, release_name
from attnreg.compile.inputs.reading import Reading
from attnreg.errors import RequestError
from attnreg.loader import bundled_registries, load_registry
from attnreg.registry import Registry

_HELP = "name a revision of a git checkout, for example main:registry"


def load_both(before: str, after: str, *, allow_outside: bool = False) -> tuple[Registry, Registry]:
    """The registries that two sources name; `load_revision` describes a source. Raises `RegistryError`.

    An overlay without `extends` fits any registry. As ``after`` it is applied to ``before``, unless that is an overlay.
    """
    for_any = not _is_overlay(before) and _is_overlay(after) and _extends_none(after)
    laid = (before, (after,)) if for_any else (after, ())
    return load_revision(before, allow_outside=allow_outside), load_revision(*laid, allow_outside=allow_outside)


def _is_overlay(source: str) -> bool:
    return bundled_source(source) is None and Path(source).is_file()


def _extends_none(overlay: str) -> bool:
    opened = Reading(set()).open(overlay)
    return opened is not None and opened.extends is None


def load_revision(source: str, overlays: Sequence[str] = (), *, allow_outside: bool = False) -> Registry:
    """The registry that ``source`` names: ``main:registry`` is the directory ``registry`` in the revision ``main``.

    Without a directory (``main:``) it is the data of attnreg's own checkout: the one that attnreg is imported from, or
    for an installed attnreg the current directory. The name of a bundled registry wins over a branch: ``default:`` is
    the registry, ``heads/default:`` the branch. overlays: overlays on the registry. allow_outside: as in
    `load_registry`.

    Raises `RegistryError`, and `RequestError` if git has no such revision.
    """
    place = _place(source)
    if place is None:
        return load_registry(_registry_named(source), overlays, allow_outside=allow_outside)
    here, revision, directory = place
    with tempfile.TemporaryDirectory() as scratch:
        files = _git(here, "ls-tree", "-r", "--name-only", revision, "--", f"{directory.as_posix()}/").splitlines()
        names = [f for f in files if f.endswith(".yaml") and Path(f).parent == directory]
        if not names:
            raise RequestError(f"revision {revision} has no YAML files in {directory.as_posix()}", _HELP)
        target = Path(scratch, f"{directory.name}@{revision.replace('/', '-')}")
        target.mkdir()
        for name in names:
            (target / Path(name).name).write_bytes(_git_bytes(here, "show", f"{revision}:./{name}"))
        return load_registry(target, overlays, allow_outside=allow_outside)


def family_texts(source: str) -> dict[str, str] | None:
    """The files of the model families of a source of `load_revision`; None if it has no model families."""
    place = _place(source)
    if place is None:
        folder = Path(bundled_registries().get(_registry_named(source), source), "models")
        if (texts := joined_families(folder)) is not None:
            return texts
        files = sorted(folder.glob("*.yaml")) if folder.is_dir() else []
        return {file.stem: file.read_text(encoding="utf-8", errors="replace") for file in files} or None
    here, revision, directory = place
    models = (directory / "models").as_posix()
    if not _git(here, "ls-tree", "--name-only", revision, "--", models):
        return None
    archive = _git_bytes(here, "archive", "--format=tar", revision, "--", models)
    out = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            name, file = Path(member.name), tar.extractfile(member)
            if name.suffix == ".yaml" and name.parent.name == "models" and file is not None:
                out[name.stem] = file.read().decode(errors="replace")
    return out or None


def _registry_named(source: str) -> str:
    """The bundled registry for a source such as ``default:``; any other source is returned unchanged."""
    name = release_name(source.removesuffix(":"))
    return name if name in bundled_registries() else source


def _place(source: str) -> tuple[Path, str, Path] | None:
    """The directory in which to run git, the revision, and the directory below; None without a revision."""
    revision, colon, directory = source.partition(":")
    # a path may contain a colon, as on Windows
    if not colon or not revision or Path(source).exists() or _registry_named(source) != source:
        return None
    if directory:
        return Path.cwd(), revision, Path(directory)
    root = registry_root()
    # a wheel has the data inside the package, which is not a git checkout
    installed = root.parent == Path(__file__).resolve().parent.parent
    return Path.cwd() if installed else root.parent, revision, Path(root.name)


def _git(here: Path, *arguments: str) -> str:
    return _git_bytes(here, *arguments).decode()


def _git_bytes(here: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, check=False)
    except OSError as e:
        raise RequestError(f"git cannot be run: {e.strerror}", _HELP) from None
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip()
        raise RequestError(f"git {arguments[0]} in {here}: {message or 'failed'}", _HELP)
    return done.stdout
