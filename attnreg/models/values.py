"""Where models.yaml takes a value from: a small language of values and conditions over the fields of a config.

A value is a literal number or truth value; the name of a field; a list, of which the first that is not null counts; or
a mapping with one of

    when: CONDITION    then ``value``, else ``otherwise`` (null, if left out)
    note: SENTENCE     ``value``, which is an assumption where the family is not known
    item: FIELD        this layer's entry of a list; of what is no list, the whole
    index: START       this layer's index, counted from START
    word: TEXT         a literal
    not: VALUE         of a truth value
    sum, difference, product, quotient (which must come out even), floor_quotient, power, least: a list of values

A value that needs a field which is missing or null is null itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attnreg.compile.yaml_source import Float, as_data
from attnreg.models.fields import Check, ConfigError, ConfigFields, flag, number, positive, show

Complain = Callable[[tuple[str | int, ...], str], None]
OPERATIONS = ("sum", "difference", "product", "quotient", "floor_quotient", "power", "least")
FORMS = ("when", "note", "index", "item", "word", "not", *OPERATIONS)


class Value(ABC):
    """A value of the data: ``get`` computes it from a config's fields, each of which ``check`` has looked at."""

    parts: tuple[Value, ...] = ()

    # plain classes: a dozen dataclasses would cost a cold `attnreg explain` more than reading the data does
    def __init__(self, *parts: Value, **facts: Any) -> None:
        self.parts = parts
        self.__dict__ |= facts

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that it may be, in their order."""
        return tuple(name for part in self.parts for name in part.names)

    @property
    def decided_by(self) -> tuple[str, ...]:
        """The fields that its conditions look at."""
        return tuple(name for part in self.parts for name in part.decided_by)

    @property
    def itemised(self) -> bool:
        """Whether it takes a layer's entry of a list."""
        return any(part.itemised for part in self.parts)

    @abstractmethod
    def get(self, fields: ConfigFields, check: Check) -> Any:
        """What it is for this config; null where a field that it needs is missing or null."""


class Literal(Value):
    value: Any

    def get(self, fields: ConfigFields, check: Check) -> Any:
        return self.value


class Field(Value):
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def get(self, fields: ConfigFields, check: Check) -> Any:
        value = fields.value(self.name)
        return None if value is None else check(fields, self.name, value)


class Item(Field):
    """This layer's entry of a list; of what is no list, the whole."""

    @property
    def itemised(self) -> bool:
        return True

    def get(self, fields: ConfigFields, check: Check) -> Any:
        value = fields.value(self.name)
        if isinstance(value, list | tuple):
            assert fields.layer is not None
            if fields.layer >= len(value):
                raise ConfigError(
                    f"{fields.where}{self.name} has {len(value)} entries; layer {fields.layer} has none: "
                    "give one entry for each layer"
                )
            value = value[fields.layer]
        return None if value is None else check(fields, self.name, value)


class Index(Value):
    """The index of this layer, counted from ``start``."""

    start: int

    @property
    def itemised(self) -> bool:
        return True

    def get(self, fields: ConfigFields, check: Check) -> Any:
        assert fields.layer is not None
        return fields.layer + self.start


class First(Value):
    def get(self, fields: ConfigFields, check: Check) -> Any:
        return next((v for part in self.parts if (v := part.get(fields, check)) is not None), None)


class When(Value):
    condition: Condition

    @property
    def decided_by(self) -> tuple[str, ...]:
        return (*(name for name, _ in self.condition.parts), *super().decided_by)

    def get(self, fields: ConfigFields, check: Check) -> Any:
        value, otherwise = self.parts
        return (value if self.condition.holds(fields) else otherwise).get(fields, check)


class Note(Value):
    """A value that is an assumption where the family is not known."""

    note: str

    def get(self, fields: ConfigFields, check: Check) -> Any:
        value = self.parts[0].get(fields, check)
        if value not in (None, False):
            fields.notes.append(self.note)
        return value


class Not(Value):
    def get(self, fields: ConfigFields, check: Check) -> Any:
        value = self.parts[0].get(fields, flag)
        return None if value is None else not value


class Operation(Value):
    name: str

    def get(self, fields: ConfigFields, check: Check) -> Any:
        parts = [
            part.get(fields, positive if self.name == "power" and not i else number)
            for i, part in enumerate(self.parts)
        ]
        if None in parts:
            return None
        a, *rest = parts
        match self.name:
            case "sum":
                return sum(parts)
            case "difference":
                return a - sum(rest)
            case "product":
                return math.prod(parts)
            case "least":
                return min(parts)
            case "power":
                return float(a ** rest[0])
        return self._quotient(fields, a, rest[0])

    def _quotient(self, fields: ConfigFields, a: Any, b: Any) -> Any:
        if not b or (self.name == "quotient" and a % b):
            text = " and ".join(f"{fields.spelt(name)} is {show(fields.value(name))}" for name in self.names)
            raise ConfigError(f"{fields.where}{text}; the second must divide the first")
        return a // b


@dataclass(frozen=True)
class Condition:
    """Fields and what they must be, all of which must hold; the matchers are those of the registry's conditions."""

    parts: tuple[tuple[str, Any], ...]

    def holds(self, fields: ConfigFields) -> bool:
        return all(_matches(fields, name, wanted) for name, wanted in self.parts)


def compile_value(raw: Any, complain: Complain, path: tuple[str | int, ...] = ()) -> Value:
    """The value that ``raw`` says; what is wrong with it goes to ``complain(path, message)``."""
    if isinstance(raw, Float):
        return Literal(value=float(raw))
    if raw is None or isinstance(raw, bool | int | float):
        return Literal(value=raw)
    if isinstance(raw, str):
        return Field(name=raw)
    if isinstance(raw, list):
        if not raw:
            complain(path, "expected at least one value")
        return First(*(compile_value(item, complain, (*path, i)) for i, item in enumerate(raw)))
    forms = [name for name in FORMS if name in raw]
    beside = {"when": {"value", "otherwise"}, "note": {"value"}}.get(forms[0] if forms else "", set())
    if len(forms) != 1 or raw.keys() - {*forms, *beside} or (beside and "value" not in raw):
        complain(path, f"expected one of {', '.join(FORMS)} (`when` and `note` with `value`)")
        return Literal(value=None)
    name = forms[0]
    part = raw[name]
    here = (*path, name)
    if name == "when":
        value, otherwise = (compile_value(raw.get(k), complain, (*path, k)) for k in ("value", "otherwise"))
        return When(value, otherwise, condition=compile_condition(part, complain, here))
    if name == "note":
        return Note(compile_value(raw["value"], complain, (*path, "value")), note=str(part))
    if name == "index":
        if not isinstance(part, int):
            complain(here, "expected the number from which layers are counted")
        return Index(start=part if isinstance(part, int) else 0)
    if name in ("item", "word"):
        if not isinstance(part, str):
            complain(here, f"expected {'the name of a field' if name == 'item' else 'a word'}")
        return Item(name=str(part)) if name == "item" else Literal(value=part)
    if name == "not":
        return Not(compile_value(part, complain, here))
    if (
        not isinstance(part, list)
        or len(part) < 2
        or (len(part) > 2 and name in ("quotient", "floor_quotient", "power"))
    ):
        complain(here, "expected a list of two values")
        return Literal(value=None)
    return Operation(*(compile_value(item, complain, (*here, i)) for i, item in enumerate(part)), name=name)


def compile_condition(raw: Any, complain: Complain, path: tuple[str | int, ...] = ()) -> Condition:
    """The condition that ``raw`` says: a mapping from field to a value, a list of values, or operators."""
    if not isinstance(raw, Mapping) or not raw:
        complain(path, "expected a mapping from the names of fields to what they must be")
        return Condition(())
    for name, wanted in raw.items():
        if isinstance(wanted, Mapping) and (
            len(wanted) != 1 or next(iter(wanted)) not in ("min", "max", "below", "not")
        ):
            complain((*path, name), "expected one of the operators min, max, below, not")
    return Condition(tuple((name, as_data(wanted)) for name, wanted in raw.items()))


def _matches(fields: ConfigFields, name: str, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        operator, limit = next(iter(wanted.items()))
        if operator == "not":
            return not _matches(fields, name, limit)
        value = fields.value(name)
        if value is None:
            return False
        value = number(fields, name, value)
        return bool({"min": value >= limit, "max": value <= limit, "below": value < limit}[operator])
    if isinstance(wanted, list):
        return any(_matches(fields, name, item) for item in wanted)
    value = fields.value(name)
    if isinstance(wanted, bool):
        # a flag that is missing is off; words beside true and false (gemma4's "all") are no flag that is on
        return wanted is (
            value is not None and (value if isinstance(value, str) else flag(fields, name, value)) is True
        )
    return bool(value == wanted)
