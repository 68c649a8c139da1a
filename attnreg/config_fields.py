"""The fields of a model's config.json, each checked as it is read."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 16 * 2**20
MAX_NUMBER = 2**31 - 1
_ACCEPTED = "give a config.json, a directory that holds one, a dict or a config object (nothing is downloaded)"
_OBJECT = "expected an object with fields such as num_hidden_layers"


class ConfigError(ValueError):
    """A config that cannot be read, or that contradicts itself; the message names the field, its value and the cure."""


class ConfigFields:
    """The fields of a config or of a part of it; ``where`` is what error messages put before a field's name.

    ``defaults`` stand in for missing fields, and ``defaulted`` keeps those that did; ``stranger`` says why there are
    none. Every reader raises `ConfigError` for a value of the wrong type or out of range, and gives None, or the
    default it was called with, for a field that is missing. A name of None is a field that the family does not have.
    """

    def __init__(self, data: Mapping[str, Any], where: str = "") -> None:
        self.data = data
        self.where = where
        self.defaults: Mapping[str, Any] = {}
        self.defaulted: dict[str, Any] = {}
        self.stranger = ""

    def error(self, name: str, expected: str) -> ConfigError:
        value = self.data.get(name)
        # the commonest slip, and the one whose cure is the easiest to miss
        quoted = f" (write {value}, without quotes)" if isinstance(value, str) and value.isdecimal() else ""
        return ConfigError(f"{self.where}{name} is {show(value)}; {expected}{quoted}")

    def nested(self, name: str) -> ConfigFields | None:
        """The fields of a part of the config, None where there is no such part."""
        if self.data.get(name) is None:
            return None
        part = _mapping(self.data[name], f"{self.where}{name}", "expected an object")
        return ConfigFields(part, f"{self.where}{name}.")

    def count(self, name: str, least: int = 1, most: int = MAX_NUMBER) -> int:
        value = self.maybe(name, least, most, null=False)
        if value is None:
            why = f" ({self.stranger})" if self.stranger else ""
            raise ConfigError(f"{self.where}{name} is missing and has no default{why}; add it to the config")
        return value

    def maybe(self, name: str, least: int = 1, most: int = MAX_NUMBER, null: bool = True) -> int | None:
        """An integer, or None. ``null`` says that a null in the config has a meaning of its own."""
        value = self._value(name, null)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"expected an integer of at least {least}")
        if not least <= value <= most:
            raise self.error(name, f"expected at least {least}" if value < least else f"expected at most {most}")
        return value

    def number(self, name: str | None) -> float | None:
        value = self._value(name, null=True) if name else None
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
            raise self.error(str(name), f"expected a number above 0 and at most {MAX_NUMBER}")
        return value

    def flag(self, name: str | None, default: bool = False) -> bool:
        value = self._value(name, null=False) if name else None
        if not isinstance(value, bool | None):
            raise self.error(str(name), "expected true or false")
        return default if value is None else value

    def word(self, name: str) -> str:
        value = self.data.get(name)
        if not isinstance(value, str | None):
            raise self.error(name, "expected a word")
        return value or ""

    def _value(self, name: str, null: bool) -> Any:
        value = self.data.get(name)
        if value is None and not (null and name in self.data):
            value = self.defaults.get(name)
            if value is not None:
                self.defaulted[name] = value
        return value


def read_config(config: object) -> tuple[str, Mapping[str, Any]]:
    """The path that the config was read from, "" for a mapping or an object, and its fields."""
    if not isinstance(config, str | os.PathLike):
        return "", _mapping(config, "config", _ACCEPTED)
    path = Path(os.fsdecode(config))
    try:
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            problem = "not a regular file" if path.exists() else "no such file"
            raise ConfigError(f"{path}: {problem}; {_ACCEPTED}")
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; {_ACCEPTED}") from error
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{path}: more than 16 MiB, which no config.json has; {_ACCEPTED}")
    return str(path), _mapping(_parse(path, text), f"{path}: the content", _OBJECT)


def show(value: object) -> str:
    """The value as Python writes it, cut short."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number too long to show"


def _parse(path: Path, text: bytes) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except ValueError as error:
        problem = str(error)
    except RecursionError:
        problem = "nested too deeply"
    raise ConfigError(f"{path}: not JSON ({problem}); {_ACCEPTED}")


def _mapping(value: object, what: str, expected: str) -> Mapping[str, Any]:
    if hasattr(value, "to_dict") and not isinstance(value, type | Mapping):
        value = value.to_dict()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} is {show(value)}; {expected}")
    return value
