"""Rules for quoting a file's content in a message: only files of attnreg's own kinds may be quoted.

Data may name files, and the author of the data could name any file that the job can read, such as one with secrets. A
file is of a kind if it has one of the kind's keys. For any other file a message has only the place and the expected
kind, no line and no value. Long quotations are cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from attnreg.errors import did_you_mean, nearest

# the most characters of a value in a message
MAX_QUOTED = 200
# the number of a file's keys that are compared with those of a kind
_MOST_KEYS = 100
# a key of a block mapping that is not indented, and any key of a flow mapping or of JSON
_OUTERMOST = re.compile(r"^['\"]?([\w.-]{1,80})['\"]?[ \t]*:(?=\s|$)", re.MULTILINE)
_ANYWHERE = re.compile(r"(?<![\w.-])([\w.-]{1,80})['\"]?[ \t]*:")
_QUOTED = re.compile(r"`[^`]*`|(?<![^\s`])[^\s`]{201,}")
_ASSIGNED = re.compile(r"([A-Z_][A-Z0-9_]*)=")
# NAME=VALUE inside a text; the value is in quotes, or ends at a blank
_VALUE = re.compile(r"(?<!\w)([A-Za-z_]\w*)=(?:\"[^\"]*\"?|'[^']*'?|[^\s`\"']+|`(?![\s,:;)]|$))+")
# a whole variable, the beginning of one with a default (${NAME:-…}), and the beginning of a command
_OF_SHELL = re.compile(r"\$\{\w+(?:\[[@*]\])?\}|\$\w+|\$[@*]|\$\{\w+|\$\(|`")


class FileKind(NamedTuple):
    """A kind of file. name: its name in messages. keys: each file of the kind has at least one of them; any without.

    within: the keys may also be in nested mappings, as in files whose outermost keys are words of the data. quoted:
    False for files that may hold values of environment variables; messages quote none of their lines.
    """

    name: str
    keys: frozenset[str]
    within: bool = False
    quoted: bool = True

    def foreign(self, data: Any) -> tuple[tuple[str, ...], str, str]:
        """The path of a misspelt key, if any, and the message and the help for a file of another kind."""
        near = next(_near(self, data), None)
        help_ = did_you_mean(near[1], self.keys) if near else f"its keys are {', '.join(sorted(self.keys))}"
        return near[:1] if near else (), f"the file is no {self.name}: it has no key of one", help_


def may_quote(kind: FileKind | None, content: Any) -> bool:
    """Whether a message may quote a file. A file without a kind is the caller's own, or comes with attnreg.

    content: the data of the file or, if it cannot be parsed, its text.
    """
    if kind is None:
        return True
    return kind.quoted and is_of(kind, content)


def is_of(kind: FileKind, content: Any) -> bool:
    """Whether a file has a key of a kind. ``content`` is the file's data or its text."""
    found = _keys_of_text(kind, content) if isinstance(content, str) else _keys(content, 2 if kind.within else 0)
    return not kind.keys or any(key in kind.keys for key in found)


def _keys_of_text(kind: FileKind, text: str) -> Iterator[str]:
    opened = text.lstrip("\ufeff \t\r\n")
    if opened.startswith("{") and not kind.within:
        # only the part before the first nested object or array
        text = re.split(r"[{\[]", opened, maxsplit=2)[1]
    pattern = _ANYWHERE if kind.within or opened.startswith("{") else _OUTERMOST
    return (match[1] for match in pattern.finditer(text))


def cut(text: str) -> str:
    """A text for a message; of a long text only the beginning and the end."""
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED // 2]}…{text[-MAX_QUOTED // 4 :]}"


def with_cuts(message: str, kind: FileKind | None = None) -> str:
    """A message whose long values in backticks, and whose long words, are cut.

    kind: the kind of the file. If it is not quoted, values of variables are hidden, too.
    """
    if kind is not None and not kind.quoted:
        message = without_values(message)
    return message if len(message) <= MAX_QUOTED else _QUOTED.sub(lambda match: cut(match[0]), message)


def variables_of(env: Any) -> list[str]:
    """The names of variables that a list or a text sets: ``NAME=VALUE``, or a mapping with ``name`` and ``value``.

    Only names in capitals are returned, because any other text may be a secret value.
    """
    items = env if isinstance(env, list) else [env]
    texts = [f"{item.get('name')}=" if isinstance(item, Mapping) else item for item in items]
    return [match[1] for text in texts if isinstance(text, str) and (match := _ASSIGNED.match(text))]


def without_values(text: str) -> str:
    """A text with `…` in place of the value of each variable: ``NAME=…``."""
    return _VALUE.sub(r"\1=…", text)


def of_shell(word: str) -> str:
    """The parts of a word that a shell replaces: its variables, without the surrounding text and without defaults."""
    found = dict.fromkeys(map(_of_shell, _OF_SHELL.findall(word)))
    return ", ".join(found) or "a word"


def _of_shell(part: str) -> str:
    if part in ("$(", "`"):
        return "the output of a command"
    return part if part.endswith("}") else part.replace("{", "")


def _near(kind: FileKind, data: Any) -> Iterator[tuple[str, str]]:
    """Misspelt keys of the data, each with the kind's key that it resembles."""
    for key in islice(_keys(data, 0), _MOST_KEYS):
        if (known := nearest(key, kind.keys, 0.8)) is not None:
            yield key, known


def _keys(data: Any, below: int) -> Iterator[str]:
    """The keys of a mapping, and of the mappings inside it. below: the number of levels."""
    if isinstance(data, Mapping):
        yield from map(str, data)
    if below and isinstance(data, Mapping | list):
        inner: Iterable[Any] = data.values() if isinstance(data, Mapping) else data
        for value in inner:
            yield from _keys(value, below - isinstance(value, Mapping))
