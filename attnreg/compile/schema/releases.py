"""A release of an engine as its difference to another one: release.yaml, and the documents that come of it.

A difference is a JSON Merge Patch (RFC 7396): a mapping changes the keys that it names, null takes a key away, and any
other value takes the place of the one below. A list whose items have a `name` or a `finding` is merged by it: an item
changes the one of its name, a new one is added at the end, and one with `gone: true` takes its namesake away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from attnreg.compile.schema.values import DataModel
from attnreg.compile.yaml_source import Document, Path_
from attnreg.errors import Location, Problem, did_you_mean

# the keys of release.yaml that stand for a file of a registry
PARTS = ("vocabulary", "backends", "priorities", "steps", "invariants")
_IDENTITIES = ("name", "finding")


class ReleaseFile(DataModel):
    """release.yaml: what a release has otherwise than another one, file by file."""

    extends: str = Field(description="The bundled registry of the release that this one is the difference to.")
    vocabulary: dict[str, Any] | None = None
    backends: dict[str, Any] | None = None
    priorities: dict[str, Any] | None = None
    steps: dict[str, Any] | None = None
    invariants: dict[str, Any] | None = None


class ReleaseDocument(Document):
    """A document of the release below with a difference laid over it; every value is cited where it is written."""

    def __init__(self, below: Document | None, release: Document, part: str) -> None:
        """below: None where the release below has no such file. part: the key of the difference in release.yaml."""
        self.file = below.file if below else release.file
        self.problems: list[Problem] = []
        self.release = release
        self.origins: dict[Path_, tuple[Document, Path_]] = {(): (below or release, () if below else (part,))}
        self.keys = {}
        self.values = {}
        base = below.data if below else {}
        # where something changed, to two steps: all else is looked up in the document below at once
        self.changed: set[Path_] | None = None
        self.data = self._merged(base, release.data[part], (), (part,))
        self.changed = {path[:2] for path in self.origins}

    def at(self, *path: str | int) -> Location:
        """The location of the value at ``path``, in the file that states it."""
        document, here = self._origin(path)
        return document.at(*here)

    def key_at(self, *path: str | int) -> Location:
        """The location of the key at the end of ``path``, in the file that states it."""
        document, here = self._origin(path)
        return document.key_at(*here)

    def problem(self, path: Path_, message: str, help: str = "", *, key: bool = False) -> Problem:  # noqa: A002
        """A `Problem` at the value or the key of ``path``, in the file that states it."""
        document, here = self._origin(path)
        return document.problem(here, message, help, key=key)

    def _origin(self, path: Path_) -> tuple[Document, Path_]:
        changed = self.changed is None or path[:2] in self.changed
        for length in range(len(path) if changed else 1, -1, -1):
            if path[:length] in self.origins:
                document, here = self.origins[path[:length]]
                return document, (*here, *path[length:])
        raise AssertionError("the root has an origin")

    def _merged(self, below: Any, change: Any, path: Path_, there: Path_) -> Any:
        """A value with a change applied. path: in the result; there: in release.yaml."""
        if isinstance(change, Mapping):
            return self._merged_mapping(below if isinstance(below, Mapping) else {}, change, path, there)
        identity = _identity(change) if isinstance(change, list) and isinstance(below, list) else None
        if identity is not None and (not below or _identity(below) == identity):
            return self._merged_list(below, change, identity, path, there)
        self.origins[path] = self.release, there
        return change

    def _merged_mapping(
        self, below: Mapping[str, Any], change: Mapping[str, Any], path: Path_, there: Path_
    ) -> dict[str, Any]:
        out = dict(below)
        for key, value in change.items():
            here, source = (*path, key), (*there, key)
            if value is None and key in below:
                del out[key]
            elif value is None:
                message = f"there is no {key} to take away"
                self._report(source, message, did_you_mean(str(key), map(str, below)), key=True)
            elif key in below:
                out[key] = self._merged(below[key], value, here, source)
            else:
                self.origins[here] = self.release, source
                out[key] = value
        return out

    def _merged_list(self, below: list[Any], change: list[Any], identity: str, path: Path_, there: Path_) -> list[Any]:
        document, place = self._origin(path)
        changes = {item[identity]: (i, item) for i, item in enumerate(change)}
        names = [item[identity] for item in below]
        out: list[Any] = []
        for i, item in enumerate(below):
            at, patch = changes.get(item[identity], (0, None))
            if patch is not None and patch.get("gone") is True:
                continue
            here = (*path, len(out))
            self.origins[here] = document, (*place, i)
            out.append(item if patch is None else self._merged(item, patch, here, (*there, at)))
        for name, (at, patch) in changes.items():
            if name not in names and patch.get("gone") is True:
                self._report((*there, at), f"there is no {name} to take away", did_you_mean(str(name), names))
            elif name not in names:
                self.origins[(*path, len(out))] = self.release, (*there, at)
                out.append(patch)
        return out

    def _report(self, path: Path_, message: str, help_: str, *, key: bool = False) -> None:
        self.problems.append(self.release.problem(path, message, help_, key=key))


def _identity(items: list[Any]) -> str | None:
    """The key by which the items of a list are told apart; None where they have none."""
    for key in _IDENTITIES:
        if items and all(isinstance(item, Mapping) and isinstance(item.get(key), str) for item in items):
            return key
    return None
