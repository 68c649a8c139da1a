"""What a stranger does to a file: cut, flipped, nested, blown up, linked, and made to name what it may not."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

from hostile.kinds import Kind

# a file that no data may name, beside the directory of the stranger's files; what is run would make the second
OUTSIDE, TOUCHED = "private.key", "touched"
_NAMES = (f"../{OUTSIDE}", f"{{place}}/../{OUTSIDE}", "/proc/self/environ", "/dev/zero", "..", "/", "link", "link/x")
_RUN = (
    "!!python/object/apply:os.system ['touch {touched}']",
    "$(touch {touched})",
    "`touch {touched}`",
    "x; touch {touched}",
    "attnreg.kernels.../../touch",
    "os:system",
)
_VALUES = (
    *("-1", "1e999", ".nan", "0x10", "9" * 400, "true", "null", "~", "''", "[]", "{}", "!!binary AA==", "&a [*a]"),
    *("\u202ereversed", "\x1b[31mred", "a\u2028b", "\ufeff", "%s%n{0}{x}", "<script>alert(1)</script>", "../" * 60),
)
_KEYS = ("extends", "registry", "overlays", "model", "module", "modules", "source", "env", "args", "command", "engine")
_MARKS = "\"':[]{}#&*!|>-\\\n\t "
_WORD = re.compile(rb"[A-Za-z0-9_./-]+")
Spoiled = bytes | None


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _flip(data: bytes, draw: random.Random) -> bytes:
    spoiled = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        spoiled[draw.randrange(len(spoiled))] = draw.choice(
            (draw.randrange(256), ord(draw.choice("\"':[]{}#&*!|>-\\\n\t ")))
        )
    return bytes(spoiled)


def _lines(data: bytes, draw: random.Random) -> bytes:
    lines = data.split(b"\n")
    for _ in range(draw.choice((1, 2, 6))):
        at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
        match draw.randrange(4):
            case 0:
                lines[at] = b""
            case 1:
                lines[at], lines[other] = lines[other], lines[at]
            case 2:
                lines.insert(at, lines[other])
            case _:
                lines[at] = b" " * draw.choice((1, 2, 4, 40)) + lines[at]
    return b"\n".join(lines)


def _nested(data: bytes, draw: random.Random) -> bytes:
    opened = draw.choice((b"[", b"{", b'{"a":', b"- ", b"(", b"&a [*a, ", b"'", b'"', b"${", b"<<EOF\n"))
    return data[: draw.randrange(len(data) + 1)] + opened * draw.choice((3, 60, 1_500)) + data[-draw.randrange(40) :]


def _value(data: bytes, draw: random.Random, values: tuple[str, ...]) -> bytes:
    """Another value in the place of a word."""
    words = list(_WORD.finditer(data))
    if not words:
        return draw.choice(values).encode()
    word = draw.choice(words)
    return data[: word.start()] + draw.choice(values).encode() + data[word.end() :]


def _values(data: bytes, draw: random.Random) -> bytes:
    return _value(data, draw, _VALUES)


def _runs(data: bytes, draw: random.Random) -> bytes:
    return _value(data, draw, _RUN)


def _names(data: bytes, draw: random.Random) -> bytes:
    """A key that may name a file, with a name that leads out: in YAML or JSON, at the beginning or at a line."""
    name, key = draw.choice(_NAMES), draw.choice(_KEYS)
    if draw.randrange(2):
        return _value(data, draw, (name,))
    if data.lstrip()[:1] == b"{":
        given = re.sub(rb'("%s": )"[^"]*"' % key.encode(), lambda found: found[1] + f'"{name}"'.encode(), data)
        return given if given != data else data.replace(b"{", f'{{"{key}": "{name}", '.encode(), 1)
    kept = re.sub(rb"(?m)^%s:.*\n" % key.encode(), b"", data)
    return f"{key}: {name}\n".encode() + kept


def _keys(data: bytes, draw: random.Random) -> bytes:
    """Another key in the place of one."""
    keys = list(re.finditer(rb'(?m)^[ -]*"?([\w-]+)"?:', data))
    if not keys:
        return data
    key, other = draw.choice(keys), draw.choice((*_KEYS, "x", "1", "__class__", "<<", "y" * 300))
    return data[: key.start(1)] + other.encode() + data[key.end(1) :]


# each makes other bytes of a file's
_BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_cut, _flip, _flip, _lines, _nested, _values, _values, _runs, _names, _names, _names, _keys),
)


def spoil(kind: Kind, data: bytes, place: Path, draw: random.Random) -> str:
    """Lay a kind's file into a directory, spoiled; what was done to it, in words."""
    file = kind.lay(place)
    way = draw.randrange(20)
    if way == 0:
        others = map(Path, ("/proc/self/environ", "/dev/zero", "/nowhere"))
        target = draw.choice((place.parent / OUTSIDE, *others, file))
        _gone(file)
        os.symlink(target, file)
        return f"a link to {target.name}"
    if way == 1:
        _gone(file)
        draw.choice((os.mkfifo, os.mkdir))(file)
        return "a pipe or a directory"
    if way == 2:
        size = draw.randrange(kind.largest)
        unit = draw.choice((b"a", b"-", b" ", b"\n", b"a: b\n", b"- a\n", b'"', b"\\", b"0", b"\0", data))
        file.write_bytes((data[: draw.randrange(len(data))] + unit * (size // len(unit) + 1))[: kind.largest])
        return f"{size} bytes of {unit[:8]!r}"
    done = []
    for _ in range(draw.choice((1, 1, 2, 4))):
        change = draw.choice(_BYTES)
        data = change(data, draw)[: kind.largest] or b"\n"
        done.append(change.__name__.strip("_"))
    text = data.replace(b"{touched}", str(place / TOUCHED).encode()).replace(b"{place}", str(place).encode())
    _gone(file)
    file.write_bytes(text)
    return ", ".join(done)


def _gone(file: Path) -> None:
    if file.is_symlink() or file.exists():
        file.unlink()
