"""Compares the model families of two registries: the families that change, the changed statements, and their file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from attnreg.models.families import Families


class FamilyChange(NamedTuple):
    """Families that change in the same way through one file: their own, or the file of their base.

    ``what`` names the changed statements, ``parts`` the models that have one of the families as a part.
    """

    file: str
    what: tuple[str, ...]
    families: tuple[str, ...]
    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        """``mistral: window; and 14 like it: doge, …``."""
        others = [name for name in self.families if name != self.file]
        text = f"{self.file}: {', '.join(self.what)}"
        if others:
            text += f"; {'and ' if self.file in self.families else ''}{len(others)} like it: {_some(others)}"
        return text + (f"; a part of {_some(self.parts)}" if self.parts else "")


class ModelChanges(NamedTuple):
    """The families that only one of two registries has, and those whose descriptions differ."""

    gone: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    changes: tuple[FamilyChange, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The changes as JSON-ready values."""
        changes = [change._asdict() for change in self.changes]
        return {"only_before": list(self.gone), "only_after": list(self.new), "changes": changes}

    def lines(self) -> Sequence[str]:
        """The changes in words, a line each; empty if nothing changes."""
        names = [
            f"only {which}: {', '.join(words)}"
            for which, words in (("before", self.gone), ("after", self.new))
            if words
        ]
        return [*names, *(change.text for change in self.changes)]


def _some(names: Sequence[str], most: int = 12) -> str:
    """The first names of many."""
    return ", ".join(names[:most]) + (f", … ({len(names)})" if len(names) > most else "")


def model_changes(before: Mapping[str, str], after: Mapping[str, str]) -> ModelChanges:
    """The changes between two directories of families, given as name -> the file's text.

    Only the resolved statements count: a comment or another style of YAML is not a change. Raises `RegistryError` for
    an unreadable file.
    """
    edited = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if not edited:
        return ModelChanges()
    old, new = Families.of(before, "before"), Families.of(after, "after")
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in (name for name in new if name in old):
        if edited.isdisjoint((*old.lineage(name), *new.lineage(name))):
            continue
        by_file: dict[str, list[str]] = {}
        was, now = old.statements(name), new.statements(name)
        for path in {**was, **now}:
            pieces = [side[path] for side in (now, was) if path in side]
            if len(pieces) == 1 or pieces[0].model != pieces[1].model:
                by_file.setdefault(PurePath(pieces[0].document.file).stem, []).append(".".join(map(str, path)))
        for file, what in by_file.items():
            found.setdefault((file, tuple(sorted(what))), []).append(name)
    parts = _parts(new)
    changes = [
        FamilyChange(file, what, tuple(names), tuple(sorted({w for n in names for w in parts.get(n, ())})))
        for (file, what), names in sorted(found.items())
    ]
    gone, more = tuple(n for n in old if n not in new), tuple(n for n in new if n not in old)
    return ModelChanges(gone, more, tuple(changes))


def _parts(known: Families) -> dict[str, list[str]]:
    """Family -> the families that have it as a part."""
    out: dict[str, list[str]] = {}
    for name in known:
        parts = known.statements(name).get(("parts",))
        for like in dict.fromkeys(part.like for part in (parts.model if parts else ()) if part.like):
            out.setdefault(like, []).append(name)
    return out
