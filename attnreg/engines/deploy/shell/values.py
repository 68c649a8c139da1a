"""The variables of a shell script: values made of pieces, with those that a branch decides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from attnreg.engines.deploy.places import PlacedWord, Text
from attnreg.engines.deploy.words import installed
from attnreg.errors import Location


class Piece(NamedTuple):
    """A part of a word. known: False for what only a running shell knows. maybe: a branch decides whether it is there.

    is_output: the output of a command.
    """

    text: str
    where: Location
    known: bool = True
    maybe: bool = False
    is_output: bool = False


Field = list[Piece]
_BLANKS = re.compile(r"(\s+)")


class ShellValue(NamedTuple):
    """The value of a variable: the items of an array, or the pieces of a text, each an item of its own."""

    items: tuple[tuple[Piece, ...], ...]
    is_array: bool = False

    def same(self, other: ShellValue) -> bool:
        """Whether another value has the same text, set at any place."""
        written = [[(piece.text, piece.maybe) for piece in item] for item in self.items]
        return (written, self.is_array) == (
            [[(piece.text, piece.maybe) for piece in item] for item in other.items],
            other.is_array,
        )

    @property
    def pieces(self) -> Field:
        """The pieces of all items, one after the other."""
        return [piece for item in self.items for piece in item]


def value_of(pieces: Sequence[Piece]) -> ShellValue:
    """A text of some pieces."""
    return ShellValue(tuple((piece,) for piece in pieces))


def split_at_blanks(pieces: Sequence[Piece]) -> list[Field]:
    """The fields of an unquoted value; a blank at an end gives an empty field there, which joins nothing."""
    fields: list[Field] = [[]]
    for piece in pieces:
        if not piece.known:
            fields[-1].append(piece)
            continue
        source, at = Text([(piece.text, piece.where)]), 0
        for i, part in enumerate(_BLANKS.split(piece.text)):
            if i % 2:
                fields.append([])
            elif part:
                fields[-1].append(piece._replace(text=part, where=source.at(at)))
            at += len(part)
    return fields


def word_of(pieces: Sequence[Piece], where: Location) -> PlacedWord:
    """A field as a word. ``where`` is the place of an empty one."""
    source = Text([("$(:)" if piece.is_output else piece.text, piece.where) for piece in pieces])
    text = "".join(piece.text for piece in pieces)
    return PlacedWord(text, pieces[0].where if pieces else where, any(piece.maybe for piece in pieces), source)


class Scope:
    """The variables of a script at one place; changes stay in the scope until they are merged into the one above.

    A value of None is unknown. ``exported`` are the names that commands get.
    """

    def __init__(self, above: Scope | None = None, *, inherits: bool = True) -> None:
        self.above = above if inherits else None
        self.values: dict[str, ShellValue | None] = {}
        self.exported: dict[str, bool] = {}

    def get(self, name: str) -> tuple[bool, ShellValue | None]:
        """Whether the script sets a variable, and its value."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return True, scope.values[name]
            scope = scope.above
        return False, None

    def install(self, words: Sequence[PlacedWord]) -> None:
        """Keep the releases of engines that a command installs, as variables that no shell can have."""
        self.values |= {key: value_of([Piece(word.text, word.where)]) for key, word in installed(words).items()}

    def plain_text(self, name: str) -> str:
        """The value of a variable, if no branch and no command decides it; else ""."""
        pieces = value.pieces if (value := self.get(name)[1]) is not None else []
        return "".join(piece.text for piece in pieces) if all(p.known and not p.maybe for p in pieces) else ""

    def names_exported(self) -> list[str]:
        """The names of the exported variables."""
        scopes: list[Scope] = []
        scope: Scope | None = self
        while scope is not None:
            scopes.append(scope)
            scope = scope.above
        found: dict[str, bool] = {}
        for each in reversed(scopes):
            found |= each.exported
        return [name for name, on in found.items() if on]

    def merge(self, branches: Sequence[Scope], *, one_runs: bool) -> int:
        """Take the changes of branches. ``one_runs``: one of them runs in any case. Returns the changes' number."""
        names = dict.fromkeys(name for branch in branches for name in branch.values)
        for name in names:
            given, before = self.get(name)
            each = [branch.values.get(name, before) for branch in branches] + ([] if one_runs else [before])
            unset = not given and (not one_runs or any(name not in branch.values for branch in branches))
            self.values[name] = _either(before, each, unset=unset)
        for branch in branches:
            self.exported |= branch.exported
        return len(names)


def _either(before: ShellValue | None, values: Sequence[ShellValue | None], *, unset: bool) -> ShellValue | None:
    """The value after branches: what all have, then what some append; None if they set other values.

    unset: the variable has no value before, and some branch gives it none.
    """
    there = [value for value in values if value is not None]
    if not there or (len(there) < len(values) and not unset):
        return None
    if len(there) == len(values) and all(value.same(there[0]) for value in there):
        return there[0]
    is_array = there[0].is_array
    base = before.items if before is not None else ()
    if any(value.is_array != is_array or value.items[: len(base)] != base for value in there):
        return None
    added = list(dict.fromkeys(items for value in there if (items := value.items[len(base) :])))
    # texts: several branches append only what stands apart from each other
    if not is_array and len(added) > 1 and not all(items[0][0].text[:1].isspace() for items in added):
        return None
    more = [tuple(piece._replace(maybe=True) for piece in item) for items in added for item in items]
    return ShellValue((*base, *more), is_array)
