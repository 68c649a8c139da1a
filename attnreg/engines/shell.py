"""Lines of shell scripts, parted into words and commands; every word with its place."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import PurePosixPath
from typing import NamedTuple

from attnreg.errors import Location, Problem

Placed = tuple[str, Location]
ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
# a text in quotes goes over no more lines than these
_MOST_LINES = 100
# and a command within a command has no more words
_MOST_WORDS = 30
# between the commands of a line
_SEPARATORS = {"&&", "||", "|", "&", ";"}
# before the first word of a command
_BEFORE = {"!", "{", "do", "else", "elif", "exec", "if", "nohup", "sudo", "then", "time", "until", "while"}
# commands that only speak of what follows
_SAYS = {"echo", "grep", "logger", "pgrep", "pkill", "printf"}
_SHELLS = {"bash", "dash", "ksh", "sh", "su", "zsh"}
# these join the words that they are given to a command line
_JOINS = {"eval", "ssh", "tmux"}
_READS_TEXT = re.compile(r"-[A-Za-z]*c[A-Za-z]*")
_QUOTED_SCRIPT = re.compile(
    r"""\s-[A-Za-z]*c[A-Za-z]*\s+['"]|(?:^|[;&|])\s*(?:exec\s+|nohup\s+)?(?:eval|ssh|tmux)\s.*['"]"""
)
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>?|<)[&|]?")


class Line(NamedTuple):
    """The words of a line of a script, and of those that continue it, and what is wrong with them."""

    words: list[Placed]
    problems: list[Problem]


class Inner(NamedTuple):
    """A text that a command gives to another shell, and the words of the command before that.

    inherits: whether that shell has the variables of this one.
    """

    text: str
    where: Location
    before: list[Placed]
    inherits: bool


def split(text: str, where: Location, problems: list[Problem]) -> list[Placed]:
    """The words of a command line; none, and one of ``problems`` more, where its quotes do not end."""
    try:
        return [(word, where) for word in shlex.split(text, comments=True)]
    except ValueError as error:
        problems.append(Problem(where, f"not a command line: {error}"))
        return []


def commands(words: list[Placed]) -> list[list[Placed]]:
    """The commands of a line, each the words between two separators; those within ``$(...)`` part nothing."""
    found: list[list[Placed]] = [[]]
    depth = 0
    for word, where in words:
        if not depth and word in _SEPARATORS:
            found.append([])
            continue
        inside = depth > 0
        # what is in quotes has blanks, and is one word
        if not _is_text(word):
            depth += word.count("$(")
            depth -= min(depth, word.count(")"))
        ends = not depth and word.endswith(";")
        word = word.removesuffix(";") if ends else word
        # of a subshell
        found[-1].append((word if inside or "(" in word else word.removesuffix(")"), where))
        if ends:
            found.append([])
    return [command for command in found if command]


def joined(words: list[Placed]) -> list[Placed]:
    """The words with those of each ``(...)`` and between backticks as one, where these end."""
    out: list[Placed] = []
    i, last = 0, max((n for n, (word, _) in enumerate(words, 1) if ")" in word or "`" in word), default=0)
    while i < len(words):
        end, depth, ticks = i, 0, 0
        while end == i or ((depth > 0 or ticks % 2) and end < min(last, i + _MOST_WORDS)):
            depth += words[end][0].count("(") - words[end][0].count(")")
            ticks += words[end][0].count("`")
            end += 1
        if depth > 0 or ticks % 2:
            end = i + 1
        out.append((" ".join(word for word, _ in words[i:end]), words[i][1]))
        i = end
    return out


def _is_text(word: str) -> bool:
    return len(word.split()) > 1


def is_written(value: str) -> bool:
    """Whether a value is what a program gets, and no variable or command of a shell."""
    return "$" not in value and "`" not in value


def is_redirected(word: str, before: str) -> bool:
    """Whether a word says where a command writes or reads, as the word before it may say too."""
    return bool(_REDIRECTION.match(word) or _REDIRECTION.fullmatch(before))


def command_word(word: str) -> str:
    """A word as the name of a command or a module: without its directory, and what opens a group before it."""
    name = re.split(r"[(`]", word)[-1].removeprefix("-m").rstrip(")`")
    return PurePosixPath(name).name if "/" in name else name


def exported_by(words: list[Placed]) -> list[Placed]:
    """The variables that a command exports, or only assigns."""
    found = [(match[1], where) for word, where in words if (match := ASSIGNMENT.fullmatch(word))]
    return found if words and (words[0][0] == "export" or len(found) == len(words)) else []


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

    A text in quotes goes on to another line only where that matters or is given to a shell: what else a script quotes
    is of no matter, and an apostrophe of a here-document quotes nothing.
    """
    lines, number = text.splitlines(), 0
    while number < len(lines):
        line = Line([], [])
        goes_on = True
        while goes_on and number < len(lines):
            part, column = lines[number].rstrip(), len(lines[number]) - len(lines[number].lstrip()) + 1
            where = Location(file, number + 1, column)
            wrong: list[Problem] = []
            found = split(part.removesuffix("\\"), where, wrong)
            so_far = " ".join([*(word for word, _ in line.words), part]) if wrong else ""
            if wrong and (matters(so_far) or _QUOTED_SCRIPT.search(so_far)):
                found, part, number, wrong = _quoted(lines, number, where)
            line.words.extend(found)
            line.problems.extend(wrong)
            goes_on = part.endswith("\\") and not _ends_in_comment(part.removesuffix("\\"))
            number += 1
        yield line


def _ends_in_comment(text: str) -> bool:
    """Whether what follows a text on its line is a comment; where its quotes are open, it is none."""
    problems: list[Problem] = []
    nowhere = Location("", 1, 1)
    more = split(f"{text} more", nowhere, problems)
    return not problems and len(more) == len(split(text, nowhere, problems))


def _quoted(lines: list[str], number: int, where: Location) -> tuple[list[Placed], str, int, list[Problem]]:
    """The words from a line whose quotes end on a later one, that line and its number; what is wrong where none does.

    The words of a command are kept then, so that it is refused and not passed over.
    """
    text = lines[number].rstrip()
    for end in range(number + 1, min(number + _MOST_LINES, len(lines))):
        text = f"{text}\n{lines[end].rstrip()}"
        problems: list[Problem] = []
        found = split(text.removesuffix("\\"), where, problems) if {*lines[end]} & {"'", '"'} else []
        if found and not problems:
            return found, lines[end].rstrip(), end, []
    words = [(word.strip("'\""), where) for word in lines[number].split()]
    return words, "", number, [Problem(where, "not a command line: No closing quotation")]
