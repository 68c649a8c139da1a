"""The fields of a model's config.json, each checked as it is read."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attnreg.errors import escaped
from attnreg.files import FileError, read_json

MAX_BYTES = 16 * 2**20
MAX_NUMBER = 2**31 - 1
_ACCEPTED = "give a config.json, a directory that holds one, a dict or a config object (nothing is downloaded)"
_FILES = "give a config.json, or a directory that holds one (nothing is downloaded)"
_OBJECT = "expected an object with fields such as num_hidden_layers"


class ConfigError(ValueError):
    """A config that cannot be read, or that contradicts itself; the message names the field, its value and the cure."""

    def __init__(self, message: str) -> None:
        super().__init__(escaped(message))


class ConfigFields:
    """The fields of a config, or of a part of it, as one layer sees them.

    A name may be dotted (``attn_config.softmax_scale``); ``..name`` is a field of the ``whole`` config. ``names`` gives
    the other names under which a family's files hold a field, and ``defaults`` what its class puts for one that is
    missing (a null is not missing: it is None); ``defaulted`` keeps those that were put, ``read`` those that were asked
    for, and ``notes`` what was assumed. ``layer`` is the layer's index and ``own`` the fields that it has to itself.
    ``where`` is what error messages put before a field's name.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        where: str = "",
        names: Mapping[str, tuple[str, ...]] | None = None,
        defaults: Mapping[str, Any] | None = None,
        whole: ConfigFields | None = None,
    ) -> None:
        self.data = data
        self.where = where
        self.names = names or {}
        self.defaults = defaults or {}
        self.whole = whole
        self.defaulted: dict[str, Any] = {}
        self.notes: list[str] = []
        self.read: set[str] = set()
        self.layer: int | None = None
        self.own: Mapping[str, Any] = {}

    def value(self, name: str) -> Any:
        """What the config holds, else the default of the family, else None."""
        if name.startswith(".."):
            return self.whole.value(name[2:]) if self.whole is not None else None
        self.read.add(name)
        for spelling in (name, *self.names.get(name, ())):
            if spelling in self.own:
                return self.own[spelling]
            found, value = _find(self.data, spelling)
            if found:
                return value
        value = self.defaults.get(name)
        if value is not None:
            self.defaulted[name] = value
        return value

    def given(self, name: str) -> bool:
        """Whether the config itself says something of the field, and not null."""
        return any(_find(self.data, spelling)[1] is not None for spelling in (name, *self.names.get(name, ())))

    def holds(self, name: str) -> bool:
        """Whether the config says anything of the field, be it null, or the family has a default for it."""
        spellings = (name, *self.names.get(name, ()))
        return self.defaults.get(name) is not None or any(s in self.own or _find(self.data, s)[0] for s in spellings)

    def spelt(self, name: str) -> str:
        """The field as the config spells it."""
        for spelling in (name, *self.names.get(name, ())):
            if spelling in self.own or _find(self.data, spelling)[0]:
                return spelling
        return name

    def error(self, name: str, expected: str) -> ConfigError:
        value = self.value(name)
        # the commonest slip, and the one whose cure is the easiest to miss
        quoted = f" (write {value}, without quotes)" if isinstance(value, str) and value.isdecimal() else ""
        at = f" (of layer {self.layer})" if self.layer is not None and name in self.own else ""
        return ConfigError(f"{self.where}{self.spelt(name)}{at} is {show(value)}; {expected}{quoted}")

    def nested(self, name: str) -> Mapping[str, Any] | None:
        """A part of the config, None where there is no such part."""
        value = self.value(name)
        return None if value is None else mapping(value, f"{self.where}{name}", "expected an object")

    def word(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str | None):
            raise self.error(name, "expected a word")
        return value or ""


Check = Callable[[ConfigFields, str, Any], Any]


def integer(least: int) -> Check:
    """The check of a field that holds an integer of at least ``least``."""

    def check(fields: ConfigFields, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise fields.error(name, f"expected an integer of at least {least}")
        if not least <= value <= MAX_NUMBER:
            limit = f"at least {least}" if value < least else f"at most {MAX_NUMBER}"
            raise fields.error(name, f"expected {limit}")
        return value

    return check


def number(fields: ConfigFields, name: str, value: Any) -> float:
    """A number, of any sign."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise fields.error(name, f"expected a number of at most {MAX_NUMBER}")
    return value


def positive(fields: ConfigFields, name: str, value: Any) -> float:
    """A number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
        raise fields.error(name, f"expected a number above 0 and at most {MAX_NUMBER}")
    return value


def flag(fields: ConfigFields, name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise fields.error(name, "expected true or false")
    return value


def anything(fields: ConfigFields, name: str, value: Any) -> Any:
    """Whatever it is."""
    return value


def read_config(config: object) -> tuple[str, Mapping[str, Any]]:
    """The path that the config was read from, "" for a mapping or an object, and its fields."""
    if not isinstance(config, str | os.PathLike):
        return "", mapping(config, "config", _ACCEPTED)
    path = Path(os.fsdecode(config))
    path = path / "config.json" if os.path.isdir(path) else path
    if not os.path.lexists(path):
        raise ConfigError(f"{path}: no such file; {_FILES}")
    try:
        return str(path), mapping(read_json(path, MAX_BYTES), f"{path}: the content", _OBJECT)
    except FileError as e:
        raise ConfigError(f"{e}; {_FILES}") from None


def show(value: object) -> str:
    """The value as Python writes it, cut short."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number too long to show"


def mapping(value: object, what: str, expected: str) -> Mapping[str, Any]:
    """``value`` as a mapping; `ConfigError` saying that ``what`` is none."""
    if hasattr(value, "to_dict") and not isinstance(value, type | Mapping):
        value = value.to_dict()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} is {show(value)}; {expected}")
    return value


def _find(data: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    if name in data:
        return True, data[name]
    value: Any = data
    for step in name.split(".") if "." in name else ():
        if not isinstance(value, Mapping) or step not in value:
            return False, None
        value = value[step]
    return "." in name, value if "." in name else None
