"""A release of an engine as its difference to another one: the shape of release.yaml, and the merged documents.

A difference is a JSON Merge Patch (RFC 7396). A mapping changes the keys that it names; null removes a key; any other
value replaces the one below.

A list is merged item by item if its items have a `name`, a `step`, or a `code` and a subject. An item changes the item
below with the same name. A new item is added at the end, or before NAME with `before: NAME`. An item with `gone: true`
removes its namesake. An item with several subjects counts as one item for each.

A file beside release.yaml is whole, and replaces the one below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field

from attnreg.compile.schema.values import DataModel
from attnreg.compile.source.yaml_source import Document, Path_
from attnreg.errors import Location, Problem, did_you_mean


class _Item(NamedTuple):
    """An item of a list and its index there. For one subject of several: also the path of that subject in the item."""

    data: Any
    number: int
    subject: Path_ = ()


# the keys of release.yaml that stand for a file of a registry
PARTS = ("vocabulary", "backends", "priorities", "steps", "invariants")
# the keys that identify the items of a list; a step has a `name` too if several steps are one function of the engine
_IDENTITIES = ("name", "step")
# the keys of an accepted finding for its subject, and for several subjects
_SUBJECT, _SUBJECTS = "of", "each"
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
        """The boolean that other readers of YAML see in the text at ``path``, as the file spells it."""
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
        if isinstance(change, list) and isinstance(below, list):
            changes, items = _each(change), _each(below)
            if _names(changes) and (not items or _names(items)):
                return self._merged_list(items, changes, path, there)
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

    def _merged_list(self, below: list[_Item], change: list[_Item], path: Path_, there: Path_) -> list[Any]:
        document, place = self._origin(path)
        patches: dict[str, int] = {}
        for number, name in enumerate(_names(change)):
            if patches.setdefault(name, number) != number:
                where = (*there, change[number].number, *change[number].subject)
                self._report(where, f"{name} is changed twice", "change it once, or name the two apart")
        out: list[Any] = []
        for i, name in self._order(_names(below), patches, change, there):
            here, at = (*path, len(out)), patches.get(name)
            patch = None if at is None else {k: v for k, v in change[at].data.items() if k != _BEFORE}
            if i is None:
                assert at is not None
                self._cite(here, self.release, there, change[at])
                out.append(patch)
            else:
                self._cite(here, document, place, below[i])
                source = () if at is None else (*there, change[at].number)
                # the item is found by its subject, which the document below keeps
                patch = patch and {key: value for key, value in patch.items() if key != _SUBJECT}
                out.append(below[i].data if patch is None else self._merged(below[i].data, patch, here, source))
        return out

    def _cite(self, here: Path_, document: Document, there: Path_, item: _Item) -> None:
        """Cite an item of a list at its place in a document; one of several subjects at the subject's own place."""
        self.origins[here] = document, (*there, item.number)
        if item.subject:
            self.origins[(*here, _SUBJECT)] = document, (*there, item.number, *item.subject)

    def _order(
        self, below: list[str], patches: Mapping[str, int], change: list[_Item], there: Path_
    ) -> list[tuple[int | None, str]]:
        """The items of a merged list: each has its index in the list below, None for a new one, and its name."""
        out: list[tuple[int | None, str]] = list(enumerate(below))
        for name, at in patches.items():
            patch, path = change[at].data, (*there, change[at].number)
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


def _names(items: list[_Item]) -> list[str]:
    """The identity of each item of a list; an empty list if some item has none."""
    names = [_name(item.data) for item in items]
    return [name for name in names if isinstance(name, str)] if all(isinstance(n, str) for n in names) else []


def _name(item: Any) -> object:
    if not isinstance(item, Mapping):
        return None
    if "code" in item and _SUBJECT in item:
        subject = item[_SUBJECT]
        return f"{item['code']} [{', '.join(map(str, subject)) if isinstance(subject, list) else subject}]"
    return next((item[key] for key in _IDENTITIES if key in item), None)


def _each(items: list[Any]) -> list[_Item]:
    """The items of a list; an item with several subjects becomes one item for each."""
    out: list[_Item] = []
    for i, item in enumerate(items):
        subjects = item.get(_SUBJECTS) if isinstance(item, Mapping) and _SUBJECT not in item else None
        if isinstance(subjects, list):
            rest = {key: value for key, value in item.items() if key != _SUBJECTS}
            out += [_Item({**rest, _SUBJECT: of}, i, (_SUBJECTS, j)) for j, of in enumerate(subjects)]
        else:
            out.append(_Item(item, i))
    return out
