"""Expands the words of shell commands, with the values of variables that the script sets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from attnreg.engines.deploy.launch import MOST_WORDS
from attnreg.engines.deploy.places import PlacedWord, Text
from attnreg.engines.deploy.shell.syntax import Budget
from attnreg.engines.deploy.shell.values import Field, Piece, Scope, ShellValue, split_at_blanks, value_of, word_of
from attnreg.errors import Location

if TYPE_CHECKING:
    from tree_sitter import Node

_EXPANDED = re.compile(r"\$(?P<plain>\w+)|\$\{(?P<name>\w+)(?:\[(?P<all>[@*])\]|(?P<default>:?[-=?].*))?\}", re.DOTALL)
_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*]\}")
# a backslash with blanks behind it at the end of a line, which continues no line
_BROKEN = re.compile(r"(?<!\\)(?:\\\\)*(\\)[ \t]+(?=\n|\Z)")
_BLANK = re.compile(r"\s")
# a longer value is no value of an option about attention
_LONGEST = 500
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_EXPANSIONS = {"simple_expansion", "expansion"}
COMMANDS_WITHIN = {"command_substitution", "process_substitution"}
_UNKNOWN_PARTS = {*COMMANDS_WITHIN, "arithmetic_expansion"}


class Expander:
    """Expands words of one script. ``arguments`` are those of the function that runs; None if nobody knows them.

    ``used`` are the names of variables whose value some word has. ``taken`` are the names and values of one word, also
    in the texts that this script gives to other shells.
    """

    def __init__(self, text: Text, budget: Budget) -> None:
        self.text, self.budget = text, budget
        self.arguments: list[Field] | None = None
        self.used: set[str] = set()
        self.taken: dict[tuple[str, str], None] = {}

    def words(self, node: Node, scope: Scope) -> list[PlacedWord]:
        """The words of a command, with the values of variables that the script sets."""
        return [word_of(field, self.at(node)) for field in self.fields_of(node, scope)]

    def fields_of(self, node: Node, scope: Scope) -> list[Field]:
        fields: list[Field] = []
        children = node.named_children
        if len(children) > MOST_WORDS:
            raise self.budget.refusal(self.at(node), f"a command of more than {MOST_WORDS:,} words")
        for child in children:
            if child.type == "variable_assignment" or child.type.endswith(("_redirect", "comment")):
                continue
            inner = child.named_children[0] if child.type == "command_name" and child.named_children else child
            fields += self._fields(inner, scope)
            self.spend(child)
        return fields

    def value(self, node: Node, scope: Scope) -> ShellValue:
        """The value of an assignment."""
        last = node.named_children[-1]
        if last.type == "array":
            items = [field for child in last.named_children for field in self._fields(child, scope)]
            return ShellValue(tuple(map(tuple, items)), is_array=True)
        if len(node.named_children) < 2:
            return value_of([Piece("", self.at(node))])
        fields = self._fields(last, scope, quoted=True)
        return value_of([piece for field in fields for piece in field])

    def joined(self, node: Node, scope: Scope) -> Text:
        """The words of a node as one text."""
        fields = [field for child in node.named_children for field in self._fields(child, scope)]
        return Text([(piece.text, piece.where) for field in fields for piece in field])

    def _fields(self, node: Node, scope: Scope, *, quoted: bool = False) -> list[Field]:
        """The fields of a word: several for an array or an unquoted text with blanks, none for an empty one."""
        kind = node.type
        if kind in _EXPANSIONS:
            return self._expanded(node, scope, quoted=quoted)
        if kind == "string":
            return self._string(node, scope)
        if kind == "concatenation":
            return _joined(self._fields(child, scope, quoted=quoted) for child in node.children)
        if kind in _UNKNOWN_PARTS:
            is_output = kind in COMMANDS_WITHIN
            return [[Piece(self.raw(node), self.at(node), known=False, is_output=is_output)]]
        raw, where = self.raw(node), self.at(node)
        if kind == "raw_string":
            return [[Piece(raw[1:-1], self.text.at(node.start_byte + 1))]]
        if kind in ("ansi_c_string", "translated_string"):
            text = raw[2:-1].replace("\\n", "\n").replace("\\t", "\t")
            return [[Piece(_ESCAPE.sub(r"\1", text), self.text.at(node.start_byte + 2))]]
        if "\\" not in raw:
            return [
                [Piece(text, at) for text, at in self.text.pieces(node.start_byte, node.end_byte)] or [Piece("", where)]
            ]
        return [list(self._unescaped(node.start_byte, node.end_byte, lambda _: True))]

    def _string(self, node: Node, scope: Scope) -> list[Field]:
        """The fields of a text in double quotes: one, except for all items of an array."""
        at = node.start_byte + 1
        parts: list[list[Field]] = []
        for child in node.named_children:
            if child.type in _EXPANSIONS or child.type in _UNKNOWN_PARTS:
                parts += [[list(self._unescaped(at, child.start_byte, _in_quotes))]]
                parts += [self._fields(child, scope, quoted=True)]
                at = child.end_byte
        parts += [[list(self._unescaped(at, node.end_byte - 1, _in_quotes))]]
        return _joined(parts) or [[Piece("", self.text.at(node.start_byte))]]

    def _unescaped(self, start: int, end: int, escapes: Callable[[str], bool]) -> Iterator[Piece]:
        """The text between two offsets without the backslashes before characters for which ``escapes`` holds."""
        raw = self.text.text[start:end]
        at = 0
        for match in _ESCAPE.finditer(raw):
            if escapes(match[1]):
                yield from (Piece(*piece) for piece in self.text.pieces(start + at, start + match.start()))
                if match[1] != "\n":
                    yield Piece(match[1], self.text.at(start + match.start() + 1))
                at = match.end()
        yield from (Piece(*piece) for piece in self.text.pieces(start + at, end))

    def _expanded(self, node: Node, scope: Scope, *, quoted: bool) -> list[Field]:
        raw, where = self.raw(node), self.at(node)
        unknown: list[Field] = [[Piece(raw, where, known=False)]]
        if _ARGUMENTS.fullmatch(raw) and self.arguments is not None:
            self.spend(node, len(self.arguments))
            return [list(field) for field in self.arguments]
        match = _EXPANDED.fullmatch(raw)
        if match is None:
            return unknown
        name = match["plain"] or match["name"]
        if name.isdecimal():
            number = int(name) if len(name) < 4 else 0
            if self.arguments is None or not 0 < number <= len(self.arguments):
                return unknown
            return [list(self.arguments[number - 1])]
        value = scope.get(name)[1]
        self.used.add(name)
        if value is None:
            return unknown
        self.spend(node, 1 + len(value.items))
        if not value.is_array and len(text := "".join(piece.text for piece in value.pieces if piece.known)) <= _LONGEST:
            self.taken |= {(name, text): None} if text and text[:1] != "-" and not _BLANK.search(text) else {}
        if value.is_array and not match["all"]:
            return [list(value.items[0])] if value.items else []
        if value.is_array and quoted and match["all"] == "*":
            blank = Piece(" ", where)
            return [[piece for i, item in enumerate(value.items) for piece in ((blank, *item) if i else item)]]
        if value.is_array:
            return [list(item) for item in value.items]
        return [list(value.pieces)] if quoted else split_at_blanks(value.pieces)

    def broken(self, node: Node) -> Location | None:
        """The place of a backslash that should continue a command, and has blanks behind it; None without one."""
        found = _BROKEN.search(self.text.text, node.start_byte)
        inside = found is not None and "\n" not in self.text.text[node.end_byte : found.start()]
        return self.text.at(found.start(1)) if found is not None and inside else None

    def spend(self, node: Node, steps: int = 1) -> None:
        """Take steps of the file's budget."""
        self.budget.spend(steps, self.text, node.start_byte)

    def at(self, node: Node) -> Location:
        """The place of a node."""
        return self.text.at(node.start_byte)

    def raw(self, node: Node) -> str:
        """The text of a node."""
        return self.text.text[node.start_byte : node.end_byte]


def _in_quotes(character: str) -> bool:
    """Whether a backslash before a character has a meaning in double quotes."""
    return character in '$`"\\\n'


def _joined(parts: Iterable[list[Field]]) -> list[Field]:
    """The fields of a word whose parts have fields: the last of one part and the first of the next are one."""
    fields: list[Field] = []
    for part in parts:
        own = [list(field) for field in part]
        if fields and own:
            fields[-1] += own.pop(0)
        fields += own
    return fields
