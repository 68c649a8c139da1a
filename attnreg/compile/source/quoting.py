"""Which content of a file a message may quote: that of attnreg's own kinds, and none of a stranger's.

Data name files, and who wrote the data may name any file that the job can read. A file is of a kind if it has a key
of it; of any other, a message says the place and the kind that was expected, and no line and no value. What is quoted
is cut where it is long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from attnreg.errors import did_you_mean, nearest

# characters of a value that a message shows
MAX_QUOTED = 200
# keys among which one is looked for that is nearly one of a kind
_MOST_KEYS = 100
# a key of a block mapping that is not indented, and any key of a flow mapping or of JSON
_OUTERMOST = re.compile(r"^['\"]?([\w.-]{1,80})['\"]?[ \t]*:(?=\s|$)", re.MULTILINE)
_ANYWHERE = re.compile(r"(?<![\w.-])([\w.-]{1,80})['\"]?[ \t]*:")
_QUOTED = re.compile(r"`[^`]*`|(?<![^\s`])[^\s`]{201,}")
_ASSIGNED = re.compile(r"([A-Z_][A-Z0-9_]*)=")
# what a word assigns to a variable, of any letters: in quotes, or up to a blank
_VALUE = re.compile(r"(?<!\w)([A-Za-z_]\w*)=(?:\"[^\"]*\"?|'[^']*'?|[^\s`\"']+|`(?![\s,:;)]|$))+")
# a variable as it stands alone, the beginning of one with a text in its place, and of a command
_OF_SHELL = re.compile(r"\$\{\w+(?:\[[@*]\])?\}|\$\w+|\$[@*]|\$\{\w+|\$\(|`")


class FileKind(NamedTuple):
    """A kind of file. name: what messages call it. keys: each file of the kind has at least one of them.

    within: the keys may stand deeper, as where the outermost are words of the data. quoted: False for a kind whose
    files may hold values of environment variables, of which no line is quoted.
    """

    name: str
    keys: frozenset[str]
    within: bool = False
    quoted: bool = True

    def foreign(self, data: Any) -> tuple[tuple[str, ...], str, str]:
        """The message and the help for a file that is of another kind; first the path of a key that is nearly one."""
        near = next(_near(self, data), None)
        help_ = did_you_mean(near[1], self.keys) if near else f"its keys are {', '.join(sorted(self.keys))}"
        return near[:1] if near else (), f"the file is no {self.name}: it has no key of one", help_


def may_quote(kind: FileKind | None, content: Any) -> bool:
    """Whether a message may quote a file: one without a kind is the caller's own, or came with attnreg.

    content: what the file holds, as data; or, where it cannot be read, its text.
    """
    if kind is None:
        return True
    return kind.quoted and is_of(kind, content)


def is_of(kind: FileKind, content: Any) -> bool:
    """Whether a file has a key of a kind; of a text, whether what stands there as a key is one."""
    found = _keys_of_text(kind, content) if isinstance(content, str) else _keys(content, 2 if kind.within else 0)
    return any(key in kind.keys for key in found)


def _keys_of_text(kind: FileKind, text: str) -> Iterator[str]:
    opened = text.lstrip("\ufeff \t\r\n")
    if opened.startswith("{") and not kind.within:
        # up to the first value that has keys of its own
        text = re.split(r"[{\[]", opened, maxsplit=2)[1]
    pattern = _ANYWHERE if kind.within or opened.startswith("{") else _OUTERMOST
    return (match[1] for match in pattern.finditer(text))


def cut(text: str) -> str:
    """A text for a message: of a long one, the beginning and the end."""
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED // 2]}…{text[-MAX_QUOTED // 4 :]}"


def with_cuts(message: str, kind: FileKind | None = None) -> str:
    """A message in which each value in backticks, and each word, is cut that is longer than a message shows.

    kind: of the file that it is about; of one that is not quoted, no value that a word assigns is shown either.
    """
    if kind is not None and not kind.quoted:
        message = without_values(message)
    return message if len(message) <= MAX_QUOTED else _QUOTED.sub(lambda match: cut(match[0]), message)


def variables_of(env: Any) -> list[str]:
    """The variables that a list or a text sets: ``NAME=VALUE``, or a mapping with the ``name`` and the ``value``.

    A value is never among them: what is no name in capitals may be one.
    """
    items = env if isinstance(env, list) else [env]
    texts = [f"{item.get('name')}=" if isinstance(item, Mapping) else item for item in items]
    return [match[1] for text in texts if isinstance(text, str) and (match := _ASSIGNED.match(text))]


def without_values(text: str) -> str:
    """A text with `…` in the place of each value that it assigns to a variable: ``NAME=…``."""
    return _VALUE.sub(r"\1=…", text)


def of_shell(word: str) -> str:
    """What only a shell knows of a word: its variables, without the text around them or in their place."""
    found = dict.fromkeys(map(_of_shell, _OF_SHELL.findall(word)))
    return ", ".join(found) or "a word"


def _of_shell(part: str) -> str:
    if part in ("$(", "`"):
        return "the output of a command"
    return part if part.endswith("}") else part.replace("{", "")


def _near(kind: FileKind, data: Any) -> Iterator[tuple[str, str]]:
    """Keys of the data that are nearly one of a kind, with that."""
    for key in islice(_keys(data, 0), _MOST_KEYS):
        if (known := nearest(key, kind.keys, 0.8)) is not None:
            yield key, known


def _keys(data: Any, below: int) -> Iterator[str]:
    """The keys of a mapping, and of the mappings inside it. below: how many levels deep."""
    if isinstance(data, Mapping):
        yield from map(str, data)
    if below and isinstance(data, Mapping | list):
        inner: Iterable[Any] = data.values() if isinstance(data, Mapping) else data
        for value in inner:
            yield from _keys(value, below - isinstance(value, Mapping))
