"""A release of an engine as its difference to another one: the shape of release.yaml, and the merged documents.

A difference is a JSON Merge Patch (RFC 7396): a mapping changes the keys that it names, null removes a key, and any
other value replaces the one below. A list whose items have a `name`, a `finding` or a `step` is merged by that key::

    an item with the name of an old one   changes the old one
    a new item                            goes to the end of the list
    an item with `before: NAME`           goes before that one
    an item with `gone: true`             removes the old one

Any other file in the folder of release.yaml is complete, and replaces the file of the same name below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from attnreg.compile.schema.values import DataModel
from attnreg.compile.source.yaml_source import Document, Path_
from attnreg.errors import Location, Problem, did_you_mean

# the keys of release.yaml, one for each file of a registry
PARTS = ("vocabulary", "backends", "priorities", "steps", "invariants")
# the keys that identify an item of a list; a step has a name if several steps share one function of the engine
_IDENTITIES = ("name", "finding", "step")
_BEFORE = "before"


class ReleaseFile(DataModel):
    """release.yaml: the differences of a release to another one, file by file."""

    extends: str = Field(description="The bundled registry of the release that this one is the difference to.")
    vocabulary: dict[str, Any] | None = None
    backends: dict[str, Any] | None = None
    priorities: dict[str, Any] | None = None
    steps: dict[str, Any] | None = None
    invariants: dict[str, Any] | None = None


class ReleaseDocument(Document):
    """A document of the release below with a difference applied; the location of a value is in the file that has it."""

    def __init__(self, below: Document | None, release: Document, part: str) -> None:
        """below: None if the release below lacks the file. part: the key of the difference in release.yaml."""
        self.file = below.file if below else release.file
        self.problems: list[Problem] = []
        self.release = release
        self.origins: dict[Path_, tuple[Document, Path_]] = {(): (below or release, () if below else (part,))}
        self.keys = {}
        self.values = {}
        base = below.data if below else {}
        # the changed paths, cut to two steps; every other path belongs to the document below
        self.changed: set[Path_] | None = None
        self.data = self._merged(base, release.data[part], (), (part,))
        self.changed = {path[:2] for path in self.origins}

    def at(self, *path: str | int) -> Location:
        """The location of the value at ``path``, in the file that has it."""
        document, here = self._origin(path)
        return document.at(*here)

    def key_at(self, *path: str | int) -> Location:
        """The location of the key at the end of ``path``, in the file that has it."""
        document, here = self._origin(path)
        return document.key_at(*here)

    def boolean_elsewhere(self, value: Any, *path: str | int) -> str:
        """The boolean that other readers of YAML see in the text at ``path``, as its file spells it."""
        document, here = self._origin(path)
        return document.boolean_elsewhere(value, *here)

    def problem(self, path: Path_, message: str, help: str = "", *, key: bool = False) -> Problem:  # noqa: A002
        """A `Problem` at the value or the key of ``path``, in the file that has it."""
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
        """A value with a change applied. path: its path in the result. there: its path in release.yaml."""
        if isinstance(change, Mapping):
            return self._merged_mapping(below if isinstance(below, Mapping) else {}, change, path, there)
        if isinstance(change, list) and isinstance(below, list) and _names(change) and (not below or _names(below)):
            return self._merged_list(below, change, path, there)
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

    def _merged_list(self, below: list[Any], change: list[Any], path: Path_, there: Path_) -> list[Any]:
        document, place = self._origin(path)
        patches: dict[str, int] = {}
        for at, name in enumerate(_names(change)):
            if patches.setdefault(name, at) != at:
                self._report((*there, at), f"{name} is changed twice", "change it once, or name the two apart")
        out: list[Any] = []
        for i, name in self._order(_names(below), patches, change, there):
            here, source = (*path, len(out)), (*there, patches.get(name, 0))
            patch = {k: v for k, v in change[patches[name]].items() if k != _BEFORE} if name in patches else None
            if i is None:
                self.origins[here] = self.release, source
                out.append(patch)
            else:
                self.origins[here] = document, (*place, i)
                out.append(below[i] if patch is None else self._merged(below[i], patch, here, source))
        return out

    def _order(
        self, below: list[str], patches: Mapping[str, int], change: list[Any], there: Path_
    ) -> list[tuple[int | None, str]]:
        """The items of a merged list: each has its index in the list below, None for a new one, and its name."""
        out: list[tuple[int | None, str]] = list(enumerate(below))
        for name, at in patches.items():
            patch, path = change[at], (*there, at)
            found = [i for i, other in enumerate(below) if other == name]
            if len(found) > 1:
                self._report(
                    path, f"there are {len(found)} of the name {name}", "name them apart, each with its `name`"
                )
                continue
            item: tuple[int | None, str] = (found[0] if found else None, name)
            if patch.get("gone") is True:
                if not found:
                    self._report(path, f"there is no {name} to take away", did_you_mean(name, below))
                out = [other for other in out if other != item]
            elif _BEFORE in patch or not found:
                out = [other for other in out if other != item]
                out.insert(self._place(patch, [n for _, n in out], path), item)
        return out

    def _place(self, patch: Mapping[str, Any], names: list[str], path: Path_) -> int:
        """The index for an item in a list of names: before the name under its `before`, else at the end."""
        if _BEFORE not in patch:
            return len(names)
        if patch[_BEFORE] in names:
            return names.index(patch[_BEFORE])
        message = f"there is no {patch[_BEFORE]} to stand before"
        self._report((*path, _BEFORE), message, did_you_mean(str(patch[_BEFORE]), names))
        return len(names)

    def _report(self, path: Path_, message: str, help_: str, *, key: bool = False) -> None:
        self.problems.append(self.release.problem(path, message, help_, key=key))


def _names(items: list[Any]) -> list[str]:
    """The name of each item of a list; empty if one of them has no name."""
    names = [next((item[k] for k in _IDENTITIES if isinstance(item, Mapping) and k in item), None) for item in items]
    return [name for name in names if isinstance(name, str)] if all(isinstance(n, str) for n in names) else []
