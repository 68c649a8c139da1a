"""Splits lines of shell scripts into words and commands; every word has its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import PurePosixPath
from typing import NamedTuple

from attnreg.errors import Location, Problem

Placed = tuple[str, Location]
ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
# the most lines of a text in quotes
_MOST_LINES = 100
# the most unclosed or nested brackets; no script has more
_MOST_BRACKETS = 30
_BLANK = re.compile(r"(?:\s|\\\n)+")
_BLANK_OF_LINE = re.compile(r"[^\S\n]+")
_COMMENT = re.compile(r"#[^\n]*")
_PLAIN = re.compile(r"[^\s'\"\\;&|()<>`$=#]+")
_OPERATOR = re.compile(r"&&|\|\||\|&|;;&|;;|;&|[;&|()]")
_REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|<>|<&|>>|>\||>&|[<>])|&>>?")
_OPENING = re.compile(r"[$<>=]\(|\$\{|`")
_NO_BRACKET = re.compile(r"[^(){}'\"\\]+")
_QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
# words that may precede the first word of a command
_BEFORE = {"!", "{", "do", "else", "elif", "exec", "if", "nohup", "sudo", "then", "time", "until", "while"}
# commands that only print or search for their words
_SAYS = {"echo", "grep", "logger", "pgrep", "pkill", "printf"}
_SHELLS = {"bash", "dash", "ksh", "sh", "su", "zsh"}
# commands that join their arguments to a command line
_JOINS = {"eval", "ssh", "tmux"}
# commands that assign variables; with -x they export them
_DECLARES = {"declare", "typeset"}
_EXPORTS = re.compile(r"-[A-Za-z]*x[A-Za-z]*")
_READS_TEXT = re.compile(r"-[A-Za-z]*c[A-Za-z]*")
_QUOTED_SCRIPT = re.compile(
    r"""\s-[A-Za-z]*c[A-Za-z]*\s+['"]|(?:^|[;&|])\s*(?:exec\s+|nohup\s+)?(?:eval|ssh|tmux)\s.*['"]"""
)


class ShellOperator(str):
    """An operator between two commands of a line."""

    __slots__ = ()


class Line(NamedTuple):
    """The words of a script's line and of its continuation lines, and their problems.

    within: the texts inside ``$(...)``, arrays and backticks; they may contain commands, too.
    """

    words: list[Placed]
    problems: list[Problem]
    within: list[Placed]


class Inner(NamedTuple):
    """A text that a command gives to another shell, and the words of the command before the text.

    inherits: whether the other shell gets this shell's variables.
    """

    text: str
    where: Location
    before: list[Placed]
    inherits: bool


def split(text: str, where: Location) -> Line:
    """The words of a command line and the operators between them; empty, with a problem, if a quote does not end.

    The brackets after a ``$`` and their content are one word, unchanged. Redirections are left out.
    """
    return _ShellReader(text, where).line


class _ShellReader:
    """Reads a command line; ``in_comment`` and ``is_open`` say whether it ends in a comment, or in open brackets.

    alone: stop at the first line break outside quotes and brackets, even a continued one. ``breaks`` is the number of
    line breaks inside quotes and brackets.
    """

    def __init__(self, text: str, where: Location, *, alone: bool = False) -> None:
        self.line = Line([], [], [])
        self.in_comment = False
        self._text, self._where, self._at, self._alone = text, where, 0, alone
        # the parts of the current word, and whether it is the target of a redirection
        self._word: list[str] = []
        self._begun = self._is_target = False
        self._opened = 0
        try:
            self._read()
        except ValueError as error:
            self.line = Line([], [Problem(where, f"not a command line: {error}")], [])

    @property
    def is_open(self) -> bool:
        return self._opened > 0

    @property
    def breaks(self) -> int:
        return self._text.count("\n", 0, self._at)

    def _read(self) -> None:
        while self._at < len(self._text):
            if self._alone and self._text.startswith(("\n", "\\\n"), self._at):
                break
            if not self._begun and self._next(_COMMENT):
                self.in_comment = True
            elif self._next(_BLANK_OF_LINE if self._alone else _BLANK):
                self._end()
                self.in_comment = False
            elif not self._bracketed() and not self._control():
                self._character()
        self._end()

    def _next(self, pattern: re.Pattern[str]) -> str:
        """The text that a pattern matches at this place, else ""; reading continues after it."""
        match = pattern.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return match[0] if match else ""

    def _add(self, text: str) -> None:
        self._word.append(text)
        self._begun = True

    def _end(self) -> None:
        if self._begun and not self._is_target:
            self.line.words.append(("".join(self._word), self._where))
        self._is_target = self._is_target and not self._begun
        self._word, self._begun = [], False

    def _control(self) -> bool:
        """Take a redirection or an operator."""
        if self._next(_REDIRECTION):
            self._end()
            self._is_target = True
        elif operator := self._next(_OPERATOR):
            self._end()
            self.line.words.append((ShellOperator(operator), self._where))
            self._is_target = False
        else:
            return False
        return True

    def _character(self) -> None:
        """Take a quoted text, or characters of a word."""
        if plain := self._next(_PLAIN):
            self._add(plain)
            return
        character = self._text[self._at]
        self._at += 1
        if character == "'":
            end = self._text.find("'", self._at)
            if end < 0:
                raise ValueError("No closing quotation")
            self._add(self._text[self._at : end])
            self._at = end + 1
        elif character == '"':
            self._double_quoted()
        elif character == "\\":
            self._add(self._text[self._at : self._at + 1] or character)
            self._at += 1
        else:
            self._add(character)

    def _double_quoted(self) -> None:
        self._add("")
        while (character := self._text[self._at : self._at + 1]) != '"':
            if not character:
                raise ValueError("No closing quotation")
            if character in "$`" and self._bracketed():
                continue
            self._at += 1
            following = self._text[self._at : self._at + 1]
            if character == "\\" and following and following in '$`"\\\n':
                self._at += 1
                character = following.strip("\n")
            self._add(character)
        self._at += 1

    def _bracketed(self) -> bool:
        """Take brackets with their content, if they begin like ``$(...)``, ``${...}`` or an array."""
        opening = _OPENING.match(self._text, self._at)
        if opening is None or self._opened > _MOST_BRACKETS:
            return False
        end = _closed_at(self._text, opening.end() - 1)
        if not end:
            self._opened += 1
            return False
        self._add(self._text[self._at : end])
        text = self._text[opening.end() : end - 1]
        if opening[0] != "${":
            self.line.within.append((text, self._where))
        self._at = end
        return True


def _closed_at(text: str, at: int) -> int:
    """The place after the end of the bracket or backtick that opens at ``at``; 0 if nothing closes it."""
    opening, i, depth = text[at], at, 0
    if opening == "`":
        return text.find("`", at + 1) + 1
    closing = ")" if opening == "(" else "}"
    while i < len(text) and depth < _MOST_BRACKETS:
        depth += (text[i] == opening) - (text[i] == closing)
        if not depth:
            return i + 1
        passed = _QUOTED.match(text, i) or _NO_BRACKET.match(text, i)
        i = passed.end() if passed else i + 1 + (text[i] == "\\")
    return 0


def commands(words: list[Placed]) -> list[list[Placed]]:
    """The commands of a line: each has the words between two operators."""
    found: list[list[Placed]] = [[]]
    for word, where in words:
        if isinstance(word, ShellOperator):
            found.append([])
        else:
            found[-1].append((word, where))
    return [command for command in found if command]


def _is_text(word: str) -> bool:
    return len(word.split()) > 1


def is_written(value: str) -> bool:
    """Whether a value is literal, without variables and commands of a shell."""
    return "$" not in value and "`" not in value


def command_word(word: str) -> str:
    """The name of a command or a module in a word, without the directory."""
    name = word.lstrip("`").removeprefix("-m").rstrip("`")
    return PurePosixPath(name).name if "/" in name and not _is_text(name) else name


def exported_by(words: list[Placed]) -> list[Placed]:
    """The assignments of a command that exports variables, or that consists of assignments alone."""
    first = next((i for i, (word, _) in enumerate(words) if word not in _BEFORE), len(words))
    found = [(word, where) for word, where in words[first:] if ASSIGNMENT.fullmatch(word)]
    name, *rest = [word for word, _ in words[first:]] or [""]
    exports = name == "export" or (name in _DECLARES and any(map(_EXPORTS.fullmatch, rest)))
    return found if exports or len(found) == len(words) - first else []


def only_says(words: list[Placed]) -> bool:
    """Whether a command only prints its words or searches for them."""
    names = (command_word(word) for word, _ in words if not ASSIGNMENT.fullmatch(word))
    return next((name for name in names if name and name not in _BEFORE), "") in _SAYS


def given_to_shell(words: list[Placed]) -> Inner | None:
    """The text that a command gives to another shell: ``bash -c 'TEXT'``, ``ssh host "TEXT"``; else None."""
    if only_says(words):
        return None
    names = [command_word(word) for word, _ in words]
    joins, shell = (next((i for i, n in enumerate(names) if n in kind), len(names)) for kind in (_JOINS, _SHELLS))
    where = next((where for word, where in words[joins + 1 :] if _is_text(word)), None)
    if where is not None:
        text = " ".join(word for word, _ in words[joins + 1 :])
        return Inner(text, where, _assigned(words[:joins]), names[joins] != "ssh")
    for (word, _), (text, where) in pairwise(words[shell + 1 :]):
        if _READS_TEXT.fullmatch(word) and _is_text(text):
            return Inner(text, where, _assigned(words[:shell]), True)
    return None


def _assigned(words: list[Placed]) -> list[Placed]:
    return [(word, where) for word, where in words if ASSIGNMENT.fullmatch(word)]


def lines_of(text: str, file: str, matters: Callable[[str], bool]) -> Iterator[Line]:
    """The lines of a script. ``matters(text)`` says whether a text may run the wanted command.

    A text in quotes or brackets continues on the next line only if it matters, or if a shell gets it. Other quoted
    texts do not matter, and an apostrophe in a here-document does not begin a quotation.
    """
    lines, number = text.splitlines(), 0
    while number < len(lines):
        line = Line([], [], [])
        goes_on = True
        while goes_on and number < len(lines):
            part, column = lines[number].rstrip(), len(lines[number]) - len(lines[number].lstrip()) + 1
            where = Location(file, number + 1, column)
            found = _ShellReader(part.removesuffix("\\"), where)
            ends = bool(not found.line.problems and not found.is_open)
            so_far = "" if ends else " ".join([*(word for word, _ in line.words), part])
            read = found.line
            if not ends and (matters(so_far) or _QUOTED_SCRIPT.search(so_far)):
                found, number = _going_on(lines, number, where, found)
                read, part = found.line, lines[number].rstrip()
                if read.problems:
                    # keep the words, so that the command is reported instead of ignored
                    read.words.extend((word.strip("'\""), where) for word in part.split())
                    part = ""
            line.words.extend(read.words)
            line.problems.extend(read.problems)
            line.within.extend(read.within)
            goes_on = part.endswith("\\") and not found.in_comment
            number += 1
        yield line


def _going_on(lines: list[str], number: int, where: Location, first: _ShellReader) -> tuple[_ShellReader, int]:
    """The reader of a line whose quotes or brackets close on a later line, and the number of that line.

    If no later line closes them, it is the reader of the line alone.
    """
    text = "\n".join(line.rstrip() for line in lines[number : number + _MOST_LINES])
    found = _ShellReader(text, where, alone=True)
    return (first, number) if found.line.problems or found.is_open else (found, number + found.breaks)
