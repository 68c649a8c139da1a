"""The errors of attnreg: problems in data, each with its location, and invalid requests."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath
from reprlib import Repr
from typing import Any, Literal, NamedTuple

# the most words of a request or a platform in one set
MAX_ITEMS = 10_000
_REPR = Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 200
_REPR.maxset = _REPR.maxfrozenset = _REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = 12
# the most problems that a message shows
MAX_SHOWN = 50
_SEPARATORS = str.maketrans("", "", "-_ ")


def escaped(text: str, keep: str = "") -> str:
    """The text with unprintable characters as escapes such as ``\\x1b``, except those in ``keep``.

    Control characters, marks that turn the direction of text, and lone surrogates are unprintable.
    """
    if text.isprintable():
        return text
    if "\n" in keep and "\n" in text:
        return "\n".join(escaped(line, keep) for line in text.split("\n"))
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class Location(NamedTuple):
    """A place in a data file; line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{escaped(self.file)}:{self.line}:{self.column}"

    @property
    def short(self) -> str:
        """``backends.yaml:214``, the form in which a trace cites a location."""
        return f"{escaped(PurePath(self.file).name)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault in a data file: its location, a message, how to mend it, and the line of text."""

    where: Location
    message: str
    help: str = ""
    line: str = ""
    width: int = 1

    def __str__(self) -> str:
        out = [f"{self.where}: {escaped(self.message)}"]
        if self.line:
            number = f"{self.where.line:>5} | "
            # a window of a very long line, so that the caret stays in sight
            start = max(0, self.where.column - 1 - 60) if len(self.line) > 120 else 0
            # an unprintable character could move the caret or the cursor: print a space instead
            text = "".join(c if c.isprintable() else " " for c in self.line[start : start + 120])
            column = self.where.column - 1 - start
            caret = " " * column + "^" * max(1, min(self.width, len(text) - column))
            out += [f"{number}{text}", f"{' ' * (len(number) - 2)}| {caret}"]
        if self.help:
            out.append(f"  help: {escaped(self.help)}")
        return "\n".join(out)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A plugin that does not take part in a registry, and why: it is broken, not let in, or not installed.

    ``sentence`` is the reason in words. ``problems`` are those of a broken plugin.
    """

    plugin: str
    why: Literal["broken", "not let in", "not installed"]
    sentence: str
    problems: tuple[Problem, ...] = ()

    @property
    def text(self) -> str:
        """The sentence for a message of its own."""
        return self.sentence if self.why == "not installed" else f"left out: {self.sentence}"


class RegistryError(ValueError):
    """Raised for faulty data. ``problems`` lists all problems of one run, file by file, each file from its top.

    Each problem has ``where`` (file, line, column), ``message``, ``help`` and the source line with a caret.
    """

    subject = "the registry"

    def __init__(self, problems: Iterable[Problem]) -> None:
        unique = dict.fromkeys(problems)
        files = {file: i for i, file in enumerate(dict.fromkeys(p.where.file for p in unique))}
        self.problems = tuple(sorted(unique, key=lambda p: (files[p.where.file], *p.where[1:], p.message)))
        count = len(self.problems)
        title = "1 problem" if count == 1 else f"{count:,} problems"
        shown = [str(problem) for problem in self.problems[:MAX_SHOWN]]
        more = [f"… and {count - MAX_SHOWN:,} more"] if count > MAX_SHOWN else []
        super().__init__("\n".join([f"{self.subject} has {title}:", *shown, *more]))

    def __reduce__(self) -> tuple[type[RegistryError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class RegistryWarning(UserWarning):
    """The warning about a variable that looks like attnreg's and has no effect, and about a plugin that is left out."""


class RequestError(ValueError):
    """Raised for an invalid request or platform; ``message`` states the fault, ``help`` how to mend it."""

    def __init__(self, message: str, help: str = "") -> None:  # noqa: A002 - as in `Problem`
        super().__init__(escaped(f"{message}; {help}" if help else message))
        self.message = message
        self.help = help

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str]]:
        return type(self), (self.message, self.help)


def first_cause(error: BaseException) -> BaseException:
    """The first error in the chain of causes of an error; the error itself if it has no cause."""
    seen = {id(error)}
    while error.__cause__ is not None and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
    return error


def in_words(error: BaseException) -> str:
    """An error's type and text, then those of its first cause, if the text lacks them.

    Example: a compiler's error names the line of a kernel that calls a function, and its cause is the fault in that
    function.
    """
    text, cause = _words(error), first_cause(error)
    # the text names a missing module already
    included = str(cause) in text or (isinstance(cause, ModuleNotFoundError) and str(cause.name) in text)
    return text if cause is error or included else f"{text}; the cause: {_words(cause)}"


def in_a_line(error: BaseException) -> str:
    """The type and the text of an error's first cause, in one line.

    It is the first line, or the last one if the first is only a compiler's location.
    """
    lines = _words(first_cause(error)).splitlines()
    return lines[-1].strip() if lines[0].endswith(":") else lines[0]


def _words(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class VersionError(ImportError):
    """Raised for a kernel module that does not fit the installed version of a package, which the message names."""


def counted(count: int, noun: str) -> str:
    """A number with its noun: ``1 cell``, ``2 cells``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def shown(value: object) -> str:
    """The value in Python's notation, cut if it is long."""
    try:
        return _REPR.repr(value)
    # an integer with thousands of digits, or an object whose repr fails
    except Exception:
        return f"of type {type(value).__name__}, and cannot be shown"


# PyTorch's names of dtypes that have another name here
_TORCH_WORDS = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


def plain_word(name: str, value: object) -> str:
    """The value as text; that of a ``torch.dtype`` is its word.

    Raises `RequestError`, which calls the field ``name``, for any other value, and for empty text.
    """
    if type(value) is str and value:
        return value
    # a torch.dtype, recognised without an import of torch
    if (type(value).__module__, type(value).__name__) == ("torch", "dtype"):
        dtype = str(value).removeprefix("torch.")
        return _TORCH_WORDS.get(dtype, dtype)
    # a member of an enumeration of texts is text, too; a subclass may override comparison
    word = str.__str__(value) if isinstance(value, str) else ""
    if not word:
        raise RequestError(f"{name} is {shown(value)}; expected a word of the registry's vocabulary")
    return word


def word_set(name: str, values: Iterable[str]) -> frozenset[str]:
    """The words of an iterable as a set. Raises `RequestError`, which calls the field ``name``, for a bare text."""
    if type(values) is frozenset and not values:
        return values
    items = None if isinstance(values, str) else items_of(values)
    if items is None:
        raise RequestError(f"{name} is {shown(values)}; expected a set of words, for example {{'sinks'}}")
    return frozenset(plain_word(name, item) for item in items)


def items_of(values: Any) -> list[Any] | None:
    """The items of an iterable; None if it is not iterable, if iteration fails, or for more than `MAX_ITEMS` items."""
    try:
        items = list(islice(values, MAX_ITEMS + 1))
    # an iterable may raise anything
    except Exception:
        return None
    return items if len(items) <= MAX_ITEMS else None


# a list of up to this many words is shown whole
_FEW = 6


def nearest(word: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that is most similar to a word, else the shortest one that contains it, else None.

    Case, dashes, underscores and the abbreviation ``attn`` make no difference.
    """
    text, names = _plain(str(word)), {_plain(name): name for name in sorted(known, reverse=True)}
    same = next((name for name in names if name.translate(_SEPARATORS) == text.translate(_SEPARATORS)), None)
    near = [same] if same is not None else difflib.get_close_matches(text, names, n=1, cutoff=cutoff)
    if not near and len(text) > 2 and cutoff < 1:
        near = sorted((name for name in names if text in name), key=len)
    return names[near[0]] if near else None


def _plain(text: str) -> str:
    return text.casefold().replace("attention", "attn")


def few_of_many(word: object, known: Iterable[str], listed: str, cutoff: float = 0.6) -> str:
    """Help for an unknown word of a long list: up to three near ones, and the command that lists all."""
    known = set(known)
    if len(known) <= _FEW:
        return did_you_mean(word, known, cutoff=cutoff)
    names = {_plain(name): name for name in sorted(known, reverse=True)}
    near = nearest(word, names.values(), cutoff)
    close = difflib.get_close_matches(_plain(str(word)), names, n=4, cutoff=cutoff)
    others = [f"`{names[text]}`" for text in close if names[text] != near][:2]
    all_of = f"`{listed}` lists all {len(names)}"
    if near is None:
        return all_of
    *first, last = [f"`{near}`", *others]
    return f"did you mean {', '.join(first)}{' or ' if first else ''}{last}? {all_of}"


def did_you_mean(word: object, known: Iterable[str], also: int = 12, cutoff: float = 0.6) -> str:
    """Help for an unknown word: the nearest known word, then at most ``also`` others."""
    choices: Sequence[str] = sorted(set(known))
    near = nearest(word, choices, cutoff)
    others = [c for c in choices if c != near]
    shown = ", ".join(others[:also]) + (", …" if len(others) > also else "")
    if near is not None:
        return f"did you mean `{near}`?" + (f" (also: {shown})" if shown else "")
    return f"known: {shown}" if shown else "none is known"
