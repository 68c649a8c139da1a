"""Packed formats of a KV cache: how codes of a few bits, with their scales, store keys and values (TurboQuant).

A format is data: the fact ``packed`` of a word of ``kv_dtypes``. Only this module computes the bytes of a format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from attnreg.errors import did_you_mean

# bytes of a scale, and of a zero point: float16
_NUMBER = 2
# the number of codes that fill `bits` whole bytes
CODES = 8
_LARGEST_GROUP = 1024


# the values that a key of a side may have; the first one is the default
_ROTATIONS, _SCALES, _BITS = ("none", "hadamard"), ("none", "norm", "unbiased", "fitted"), (2, 3, 4, 8)
_SIDE = {
    "type": "object",
    "description": "How keys, or values, are stored.",
    "properties": {
        "bits": {"enum": list(_BITS), "description": "Of a code; 8: float8_e4m3fn, without scales."},
        "rotation": {
            "enum": list(_ROTATIONS),
            "description": "Whether a random-sign Hadamard matrix rotates rows before they are quantised.",
        },
        "scale": {
            "enum": list(_SCALES),
            "description": "The factor of rotated rows: it keeps their norm, makes products with them unbiased, or "
            "is that of the least error.",
        },
        "group": {
            "type": "integer",
            "description": "Elements with a scale and a zero of their own, where nothing is rotated; 0: the row.",
        },
    },
    "required": ["bits"],
    "additionalProperties": False,
}
# the JSON schema of the fact ``packed``, for editors
SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "A packed format of the KV cache, from which its bytes are computed.",
    "properties": {"keys": _SIDE, "values": _SIDE},
    "required": ["keys", "values"],
    "additionalProperties": False,
}


class Side(NamedTuple):
    """The format of keys, or of values.

    With rotation ``hadamard`` each row is multiplied by a random-sign Hadamard matrix. A code then stands for a level
    of a Lloyd-Max codebook, and ``scale`` says how the row's factor is chosen. With rotation ``none`` codes are uniform
    between the least and the largest element of each ``group`` (0: of the row). Each group has a scale and a zero
    point. With 8 bits a code is a float8_e4m3fn, without rotation and scale.
    """

    bits: int
    rotation: Literal["hadamard", "none"] = "none"
    scale: Literal["norm", "unbiased", "fitted", "none"] = "none"
    group: int = 0

    @property
    def code(self) -> Literal["levels", "uniform", "fp8"]:
        """The kind of a code: a level of a codebook, a uniform step, or a float8."""
        if self.rotation == "hadamard":
            return "levels"
        return "fp8" if self.bits == 8 else "uniform"

    @property
    def problem(self) -> str | None:
        """Why the fields contradict each other; None if they do not."""
        if self.code == "levels":
            if self.bits == 8:
                return "bits is 8, which is float8_e4m3fn; rotated keys or values are stored in 2, 3 or 4"
            if self.scale == "none":
                return "scale is missing: rotated keys or values have a factor: `norm`, `unbiased` or `fitted`"
            return f"group is {self.group}; rotated keys or values have one scale" if self.group else None
        if self.scale != "none":
            return f"scale is {self.scale}, which is the factor of rotated keys or values; add `rotation: hadamard`"
        if self.group and (self.bits == 8 or self.group < CODES or self.group & (self.group - 1)):
            return f"group is {self.group}; expected a power of two from {CODES}, for codes of 2, 3 or 4 bits"
        return None

    def columns(self, size: int) -> int:
        """The number of codes in a row of ``size`` elements, padding included."""
        if self.code == "levels":
            # Hadamard matrices are made for powers of two
            return max(16, 1 << (size - 1).bit_length())
        return size if self.code == "fp8" else -(-size // CODES) * CODES

    def groups(self, size: int) -> int:
        """The number of scales in a row of ``size`` elements."""
        if self.code == "uniform":
            return -(-size // self.group) if self.group else 1
        return 1 if self.code == "levels" else 0

    def row_bytes(self, size: int) -> int:
        """The bytes of a row of ``size`` elements, with its scales and zero points."""
        numbers = self.groups(size) * (2 if self.code == "uniform" else 1)
        return self.columns(size) * self.bits // 8 + _NUMBER * numbers

    @property
    def words(self) -> str:
        """The format in words."""
        if self.code == "levels":
            return f"{self.bits}-bit levels, rotated, scale {self.scale}"
        if self.code == "fp8":
            return "float8_e4m3fn"
        return f"{self.bits}-bit uniform, " + (f"in groups of {self.group}" if self.group else "one group")


class Packed(NamedTuple):
    """A packed format: its name, a word of ``kv_dtypes``, and the format of keys and of values."""

    name: str
    keys: Side
    values: Side

    @classmethod
    def of(cls, name: str, facts: Mapping[str, Any]) -> Packed | None:
        """The format of a word with these facts; None for a word without a packed format."""
        packed = facts.get("packed")
        return None if packed is None else cls(name, Side(**packed["keys"]), Side(**packed["values"]))

    @classmethod
    def among(cls, words: Mapping[str, Mapping[str, Any]], kv_dtype: str | None) -> Packed | None:
        """The format of a KV dtype, from the words of a vocabulary; None for a KV dtype without a packed format."""
        word = words.get("kv_dtypes", {}).get(kv_dtype or "")
        return None if word is None else cls.of(word.name, word.facts)

    def token_bytes(self, head_size: int, head_size_v: int | None = None) -> int:
        """The bytes of a token in one KV head, keys and values together."""
        return self.keys.row_bytes(head_size) + self.values.row_bytes(head_size_v or head_size)

    def ratio(self, head_size: int, head_size_v: int | None = None) -> float:
        """The bytes of 16-bit keys and values, divided by the bytes of this format."""
        return 2 * (head_size + (head_size_v or head_size)) / self.token_bytes(head_size, head_size_v)


def packed_formats(words: Mapping[str, Any]) -> dict[str, Packed]:
    """The packed formats among the words of ``kv_dtypes``, by name."""
    formats = {name: Packed.of(name, word.facts) for name, word in words.items()}
    return {name: packed for name, packed in formats.items() if packed is not None}


def packed_problems(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """The problems of a fact ``packed``: for each the path of keys to it, the message, and help."""
    for name in data.keys() - {"keys", "values"}:
        yield (name,), f"unknown key `{name}`", did_you_mean(name, ("keys", "values"))
    for name in ("keys", "values"):
        side = data.get(name)
        if not isinstance(side, Mapping):
            message = f"`{name}` is missing" if side is None else f"`{name}` is {side!r}; expected a mapping"
            yield (() if side is None else (name,)), message, f"as in {name}: {{bits: 4}}"
            continue
        problems = [*_side_problems(side)]
        if not problems and (problem := Side(**side).problem) is not None:
            problems = [((), problem)]
        yield from (((name, *path), message, "") for path, message in problems)


def _side_problems(side: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    for key in side.keys() - {"bits", "rotation", "scale", "group"}:
        yield (key,), f"unknown key `{key}`; there are bits, rotation, scale, group"
    if "bits" not in side:
        yield (), "bits is missing; expected 2, 3, 4 or, for float8_e4m3fn, 8"
    for key, values in (("bits", _BITS), ("rotation", _ROTATIONS), ("scale", _SCALES)):
        value = side.get(key, values[0])
        if isinstance(value, bool) or value not in values:
            yield (key,), f"{key} is {value!r}; expected {', '.join(map(str, values))}"
    group = side.get("group", 0)
    if type(group) is not int or not 0 <= group <= _LARGEST_GROUP:
        yield ("group",), f"group is {group!r}; expected an integer from 0 to {_LARGEST_GROUP}"
