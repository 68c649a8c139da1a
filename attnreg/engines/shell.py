"""Lines of shell scripts, parted into words and commands; every word with its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import PurePosixPath
from typing import NamedTuple

from attnreg.errors import Location, Problem

Placed = tuple[str, Location]
ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
# a text in quotes goes over no more lines than these
_MOST_LINES = 100
# and so many brackets that do not close, or that stand within one another, are no script's
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
# before the first word of a command
_BEFORE = {"!", "{", "do", "else", "elif", "exec", "if", "nohup", "sudo", "then", "time", "until", "while"}
# commands that only speak of what follows
_SAYS = {"echo", "grep", "logger", "pgrep", "pkill", "printf"}
_SHELLS = {"bash", "dash", "ksh", "sh", "su", "zsh"}
# these join the words that they are given to a command line
_JOINS = {"eval", "ssh", "tmux"}
# these assign variables, and export them with -x
_DECLARES = {"declare", "typeset"}
_EXPORTS = re.compile(r"-[A-Za-z]*x[A-Za-z]*")
_READS_TEXT = re.compile(r"-[A-Za-z]*c[A-Za-z]*")
_QUOTED_SCRIPT = re.compile(
    r"""\s-[A-Za-z]*c[A-Za-z]*\s+['"]|(?:^|[;&|])\s*(?:exec\s+|nohup\s+)?(?:eval|ssh|tmux)\s.*['"]"""
)


class ShellOperator(str):
    """What stands between two commands of a line, and is no word of theirs."""

    __slots__ = ()


class Line(NamedTuple):
    """The words of a line of a script, and of those that continue it, and what is wrong with them.

    within: the texts in the brackets of ``$(...)`` and of arrays, and in backticks, which may hold commands too.
    """

    words: list[Placed]
    problems: list[Problem]
    within: list[Placed]


class Inner(NamedTuple):
    """A text that a command gives to another shell, and the words of the command before that.

    inherits: whether that shell has the variables of this one.
    """

    text: str
    where: Location
    before: list[Placed]
    inherits: bool


def split(text: str, where: Location) -> Line:
    """The words of a command line and the operators between them; none, and a problem, where its quotes do not end.

    What is in brackets after a ``$`` is one word, as it is written. Redirections are left out.
    """
    return _ShellReader(text, where).line


class _ShellReader:
    """Reads a command line; ``in_comment`` and ``is_open`` say whether it ends in a comment, or in open brackets.

    alone: it ends at a line break, continued or not; ``breaks`` is how many are in its quotes and brackets.
    """

    def __init__(self, text: str, where: Location, *, alone: bool = False) -> None:
        self.line = Line([], [], [])
        self.in_comment = False
        self._text, self._where, self._at, self._alone = text, where, 0, alone
        # the parts of a word that has begun, and whether it says where a command reads or writes
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
        """The text that a pattern matches here, behind which reading goes on."""
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
        """Take what is no operator: a quoted text, or characters of a word."""
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
        """Take brackets with what is in them, which have more than a command's own: ``$(...)``, ``${...}``, arrays."""
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
    """Where what follows a bracket or a backtick begins, and what it closes; 0 where nothing closes it."""
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
    """The commands of a line, each the words between two operators."""
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
    """Whether a value is what a program gets, and no variable or command of a shell."""
    return "$" not in value and "`" not in value


def command_word(word: str) -> str:
    """A word as the name of a command or a module: without its directory."""
    name = word.lstrip("`").removeprefix("-m").rstrip("`")
    return PurePosixPath(name).name if "/" in name and not _is_text(name) else name


def exported_by(words: list[Placed]) -> list[Placed]:
    """The assignments of a command that exports its variables, or does nothing but assign them."""
    first = next((i for i, (word, _) in enumerate(words) if word not in _BEFORE), len(words))
    found = [(word, where) for word, where in words[first:] if ASSIGNMENT.fullmatch(word)]
    name, *rest = [word for word, _ in words[first:]] or [""]
    exports = name == "export" or (name in _DECLARES and any(map(_EXPORTS.fullmatch, rest)))
    return found if exports or len(found) == len(words) - first else []


def only_says(words: list[Placed]) -> bool:
    """Whether a command prints its words, or looks for them, and runs nothing."""
    names = (command_word(word) for word, _ in words if not ASSIGNMENT.fullmatch(word))
    return next((name for name in names if name and name not in _BEFORE), "") in _SAYS


def given_to_shell(words: list[Placed]) -> Inner | None:
    """What a command gives to another shell: ``bash -c 'TEXT'``, ``ssh host "TEXT"``; None where it gives none."""
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
    """The lines of a script. ``matters`` says of a text whether it may run what is looked for.

    A text in quotes or brackets goes on to another line only where that matters or is given to a shell: what else a
    script quotes is of no matter, and an apostrophe of a here-document quotes nothing.
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
                    # the words of a command are kept, so that it is refused and not passed over
                    read.words.extend((word.strip("'\""), where) for word in part.split())
                    part = ""
            line.words.extend(read.words)
            line.problems.extend(read.problems)
            line.within.extend(read.within)
            goes_on = part.endswith("\\") and not found.in_comment
            number += 1
        yield line


def _going_on(lines: list[str], number: int, where: Location, first: _ShellReader) -> tuple[_ShellReader, int]:
    """What is read from a line whose quotes or brackets close on a later one, and the number of that.

    Where none closes them it is the line alone.
    """
    text = "\n".join(line.rstrip() for line in lines[number : number + _MOST_LINES])
    found = _ShellReader(text, where, alone=True)
    return (first, number) if found.line.problems or found.is_open else (found, number + found.breaks)
