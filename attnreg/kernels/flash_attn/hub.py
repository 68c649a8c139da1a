"""Kernels of the Hugging Face Hub by their id, from its cache. Nothing is downloaded, and no other id can be named.

Only kernels that somebody has downloaded are in the cache. The package `kernels` finds the build for this PyTorch and
imports it. The adapter gives it a lock with the commit in the cache: with a lock, `kernels` never asks the hub.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from attnreg.kernels.upstream import Function, UpstreamError, UpstreamOperator

LOAD = Function(
    name="load_kernel",
    modules=("kernels",),
    source="https://pypi.org/project/kernels/0.17.2",
    passes=("repo_id", "lockfile"),
    defaults={"backend": None},
)
# huggingface_hub's name of the folder for a repository of kernels
_FOLDER = "kernels--{}"


class HubKernel(NamedTuple):
    """A repository of the hub, and the version of its functions that an adapter was written for."""

    repo: str
    version: int

    def commit(self, cache: Path) -> str:
        """The version's commit in the cache; if the cache does not name it, the newest one. Raises `UpstreamError`."""
        folder = cache / _FOLDER.format(self.repo.replace("/", "--"))
        try:
            commit = (folder / "refs" / f"v{self.version}").read_text().strip()
            if (folder / "snapshots" / commit).is_dir():
                return commit
        except OSError:
            pass
        try:
            found = max((folder / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime)
        except (OSError, ValueError):
            message = f"{self.repo} is not in the hub's cache ({cache}), and nothing is downloaded"
            raise UpstreamError(message) from None
        return found.name

    def load(self) -> Any:
        """The kernel's module. Raises `UpstreamError` if the cache has none, or none for this machine."""
        load = LOAD.load()
        lock = {
            "dependency": {"repo-id": self.repo, "version": self.version},
            "lock": {"commit": self.commit(_cache())},
        }
        with TemporaryDirectory() as place:
            file = Path(place) / "kernels.lock"
            file.write_text(json.dumps([lock]))
            try:
                return load(repo_id=self.repo, lockfile=file)
            # importing a build may raise anything
            except Exception as e:
                text = str(e).strip().partition("\n")[0]
                raise UpstreamError(f"{self.repo} cannot be loaded: {type(e).__name__}: {text}") from e


def operator(kernel: HubKernel, like: UpstreamOperator) -> Callable[..., Any]:
    """A kernel's operator, with the arguments of another build's. Raises `UpstreamError` if they differ."""
    module = kernel.load()
    ops = getattr(getattr(module, "_ops", module), "ops", None)
    found = getattr(getattr(ops, like.name, None), "default", None)
    changes = ["is missing"] if found is None else list(like.changes(found))
    if changes:
        raise UpstreamError(f"{kernel.repo}'s {like.name} {', and '.join(changes)} (version {kernel.version} was read)")
    assert found is not None
    operator: Callable[..., Any] = found
    return operator


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)
