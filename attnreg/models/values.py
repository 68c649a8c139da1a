"""Values and conditions over the fields of a config, a small language of the families' files.

A value is a literal number or truth value, the name of a field, a list of values, or a mapping with one of the keys
below. The first value of a list that is not null counts.

    when: CONDITION    ``value`` where the condition holds, else ``otherwise`` (null by default)
    note: SENTENCE     ``value``; the sentence states an assumption, which is printed for unknown families
    item: FIELD        the layer's entry where the field is a list, else the field's value
    index: START       the index of the layer, counted from START
    word: TEXT         a literal text
    not: VALUE         the opposite of a truth value
    sum, difference, product, quotient (without remainder), floor_quotient, power, least: of a list of values

A value is null where a field that it needs is missing or null. Conditions are those of the registry
(`attnreg.language.conditions`), with the fields of the config as their facets.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attnreg.compile.conditions import Parser
from attnreg.compile.source.yaml_source import NO_BOOLEANS, Path_
from attnreg.language.conditions import Condition
from attnreg.language.numbers import Float, as_data
from attnreg.models.fields import Check, ConfigError, ConfigFields, anything, flag, number, positive, show

# form -> its keys and the kind of value of each; the first key names the form, a kind that ends in ? is optional
FORMS: Mapping[str, Mapping[str, str]] = {
    "when": {"when": "condition", "value": "value", "otherwise": "value?"},
    "note": {"note": "text", "value": "value"},
    "index": {"index": "integer"},
    "item": {"item": "field"},
    "word": {"word": "word"},
    "not": {"not": "flag"},
    **{name: {name: "values"} for name in ("sum", "difference", "product", "least")},
    **{name: {name: "two values"} for name in ("quotient", "floor_quotient", "power")},
}


class Value(ABC):
    """A value expression of a family's file; ``get`` computes it from a config's fields."""

    @property
    def parts(self) -> tuple[Value, ...]:
        """The operands: the values inside this one."""
        return ()

    @property
    def names(self) -> tuple[str, ...]:
        """The fields whose value it can take, in the order of trying."""
        return tuple(name for part in self.parts for name in part.names)

    @property
    def decided_by(self) -> tuple[str, ...]:
        """The fields that its conditions read."""
        return tuple(name for part in self.parts for name in part.decided_by)

    @property
    def itemised(self) -> bool:
        """Whether its value may differ from layer to layer."""
        return any(part.itemised for part in self.parts)

    @abstractmethod
    def get(self, fields: ConfigFields, check: Check) -> Any:
        """The value for a config, None if a field that it needs is missing or null.

        check: validates the value of each field that it reads.
        """

    def checked(self, fields: ConfigFields, check: Check, name: str) -> Any:
        """The value that `get` returns, after ``check`` has validated it, a result of arithmetic included.

        name: the name in the error message if the value has no field.
        """
        value = self.get(fields, check)
        return None if value is None else check(fields, (*self.names, name)[0], value)


# plain dataclasses: comparison and frozenness would cost a cold `attnreg explain` more than reading a family does
@dataclass(eq=False, repr=False)
class Literal(Value):
    value: Any

    def get(self, fields: ConfigFields, check: Check) -> Any:
        return self.value


@dataclass(eq=False, repr=False)
class Field(Value):
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def get(self, fields: ConfigFields, check: Check) -> Any:
        value = fields.value(self.name)
        return None if value is None else check(fields, self.name, value)


class Item(Field):
    """The entry of the current layer if the field is a list, else the field's value."""

    @property
    def itemised(self) -> bool:
        return True

    def get(self, fields: ConfigFields, check: Check) -> Any:
        value = fields.value(self.name)
        if isinstance(value, list | tuple):
            if fields.layer is None:
                raise fields.error(self.name, "expected one value: a list has one for each layer, and this is for all")
            if fields.layer >= len(value):
                raise ConfigError(
                    f"{fields.where}{self.name} has {len(value)} entries; layer {fields.layer} has none: "
                    "give one entry for each layer"
                )
            value = value[fields.layer]
        return None if value is None else check(fields, self.name, value)


@dataclass(eq=False, repr=False)
class Index(Value):
    """The index of the current layer, counted from ``start``; None if there is no current layer."""

    start: int

    @property
    def itemised(self) -> bool:
        return True

    def get(self, fields: ConfigFields, check: Check) -> Any:
        return None if fields.layer is None else fields.layer + self.start


@dataclass(eq=False, repr=False)
class First(Value):
    """The first of some values that is not null."""

    options: tuple[Value, ...]

    @property
    def parts(self) -> tuple[Value, ...]:
        return self.options

    def get(self, fields: ConfigFields, check: Check) -> Any:
        return next((v for part in self.options if (v := part.get(fields, check)) is not None), None)


@dataclass(eq=False, repr=False)
class When(Value):
    """One value if a condition holds, else another."""

    condition: ConfigCondition
    value: Value
    otherwise: Value

    @property
    def parts(self) -> tuple[Value, ...]:
        return (self.value, self.otherwise)

    @property
    def decided_by(self) -> tuple[str, ...]:
        return (*self.condition.fields, *super().decided_by)

    def get(self, fields: ConfigFields, check: Check) -> Any:
        return (self.value if self.condition.holds(fields) else self.otherwise).get(fields, check)


@dataclass(eq=False, repr=False)
class Note(Value):
    """A value that is an assumption if the family is unknown."""

    note: str
    value: Value

    @property
    def parts(self) -> tuple[Value, ...]:
        return (self.value,)

    def get(self, fields: ConfigFields, check: Check) -> Any:
        value = self.value.get(fields, check)
        if value not in (None, False):
            fields.notes.append(self.note)
        return value


@dataclass(eq=False, repr=False)
class Not(Value):
    """The opposite truth value."""

    value: Value

    @property
    def parts(self) -> tuple[Value, ...]:
        return (self.value,)

    def get(self, fields: ConfigFields, check: Check) -> Any:
        value = self.value.get(fields, flag)
        return None if value is None else not value


@dataclass(eq=False, repr=False)
class Operation(Value):
    """Arithmetic with some values; null if one of them is null."""

    name: str
    operands: tuple[Value, ...]

    @property
    def parts(self) -> tuple[Value, ...]:
        return self.operands

    def get(self, fields: ConfigFields, check: Check) -> Any:
        numbers = [
            part.checked(fields, positive if self.name == "power" and not i else number, self.name)
            for i, part in enumerate(self.operands)
        ]
        if None in numbers:
            return None
        a, *rest = numbers
        match self.name:
            case "sum":
                return sum(numbers)
            case "difference":
                return a - sum(rest)
            case "product":
                return math.prod(numbers)
            case "least":
                return min(numbers)
            case "power":
                return self._power(fields, a, rest[0])
        return self._quotient(fields, a, rest[0])

    def _power(self, fields: ConfigFields, a: float, b: float) -> float:
        try:
            return float(a**b)
        except OverflowError:
            raise ConfigError(f"{fields.where}{self._operands(fields)}; their power is too large") from None

    def _quotient(self, fields: ConfigFields, a: float, b: float) -> float:
        if not b or (self.name == "quotient" and a % b):
            raise ConfigError(f"{fields.where}{self._operands(fields)}; the second must divide the first")
        return a // b

    def _operands(self, fields: ConfigFields) -> str:
        return " and ".join(f"{fields.spelt(name)} is {show(fields.value(name))}" for name in self.names) or self.name


# conditions ----------------------------------------------------------------------------------------------------------


class ConfigCondition:
    """A condition over a config's fields.

    A field that is compared only with numbers, or only with truth values, is validated when it is read: another value
    raises `ConfigError`. A field of truth values may also hold a word (gemma4's "all"), which does not equal true.
    """

    def __init__(self, condition: Condition) -> None:
        self.condition = condition
        self.fields = condition.facets
        self._checks = _checks(condition)

    def holds(self, fields: ConfigFields) -> bool:
        """Whether the condition holds for a config. Raises `ConfigError` for a field of another type."""
        return self.condition.holds(_Point(fields, self._checks))


class _Point(Mapping[str, Any]):
    """The fields of a config as the facets of a condition; each is read and validated when a clause needs it."""

    def __init__(self, fields: ConfigFields, checks: Mapping[str, Check]) -> None:
        self._fields = fields
        self._checks = checks

    def __getitem__(self, name: str) -> Any:
        value = self._fields.value(name)
        check = self._checks.get(name, anything)
        return None if value is None else check(self._fields, name, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields.data)

    def __len__(self) -> int:
        return len(self._fields.data)


def _flag_or_word(fields: ConfigFields, name: str, value: Any) -> Any:
    return value if isinstance(value, str) else flag(fields, name, value)


def _checks(condition: Condition) -> dict[str, Check]:
    """Field -> the check of its type, for fields whose type follows from the values in the condition."""
    found: dict[str, set[Check]] = {}
    for clause in condition.walk():
        words = clause.matcher.mentions
        given = words - {None}
        # a matcher that mentions nothing bounds numbers
        check = number if not words else _flag_or_word if given and all(map(_is_flag, given)) else anything
        found.setdefault(clause.facet, set()).add(check)
    return {name: checks.pop() for name, checks in found.items() if len(checks) == 1}


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def compile_condition(raw: Any, parser: Parser, path: Path_) -> ConfigCondition:
    """The condition that the data describes. Adds its faults to the parser's problems."""
    return ConfigCondition(parser.condition(raw, path))


def compile_value(raw: Any, parser: Parser, path: Path_, check: Check = anything) -> Value:
    """The value that the data describes. Adds its faults, and those of its literals, to the parser's problems."""
    if isinstance(raw, str) and not isinstance(raw, Float):
        if raw in NO_BOOLEANS:
            parser.problem(path, f"`{raw}` is the name of a field here, and no boolean", f"write {NO_BOOLEANS[raw]}")
        return Field(raw)
    if isinstance(raw, list):
        if not raw:
            parser.problem(path, "expected at least one value")
        return First(tuple(compile_value(item, parser, (*path, i), check) for i, item in enumerate(raw)))
    if isinstance(raw, dict):
        return _form(raw, parser, path, check)
    return _literal(as_data(raw), parser, path, check)


def _literal(value: Any, parser: Parser, path: Path_, check: Check) -> Literal:
    try:
        if value is not None:
            check(ConfigFields({"it": value}), "it", value)
    except ConfigError as error:
        parser.problem(path, str(error).removeprefix("it is "))
    return Literal(value)


def _form(raw: dict[str, Any], parser: Parser, path: Path_, check: Check) -> Value:
    name = next((name for name in FORMS if name in raw), "")
    keys = FORMS.get(name, {})
    needed = {key for key, what in keys.items() if not what.endswith("?")}
    if not name or raw.keys() - keys.keys() or needed - raw.keys():
        parser.problem(path, f"expected one of {', '.join(FORMS)} (`when` and `note` with `value`)")
        return Literal(None)
    parts = [_part(raw.get(key), what.rstrip("?"), parser, (*path, key), check) for key, what in keys.items()]
    build = _BUILD.get(name)
    return build(*parts) if build else Operation(name, *parts)


_BUILD: dict[str, Callable[..., Value]] = {
    "when": When, "note": Note, "index": Index, "item": Item, "word": Literal, "not": Not
}  # fmt: skip


def _part(raw: Any, what: str, parser: Parser, path: Path_, check: Check) -> Any:
    """The compiled content of a key of a form."""
    if what == "condition":
        return compile_condition(raw, parser, path)
    if what in ("value", "flag"):
        return compile_value(raw, parser, path, flag if what == "flag" else check)
    if what in ("values", "two values"):
        return _operands(raw, what, parser, path)
    if what == "integer" and (isinstance(raw, bool) or not isinstance(raw, int)):
        parser.problem(path, "expected an integer")
        return 0
    if what != "integer" and not isinstance(raw, str):
        parser.problem(path, f"expected {'the name of a field' if what == 'field' else 'text'}")
        return ""
    return _literal(raw, parser, path, check).value if what == "word" else raw


def _operands(raw: Any, what: str, parser: Parser, path: Path_) -> tuple[Value, ...]:
    if not isinstance(raw, list) or len(raw) < 2 or (len(raw) > 2 and what == "two values"):
        parser.problem(path, "expected a list of two values" + ("" if what == "two values" else " or more"))
        return (Literal(None), Literal(None))
    first = positive if path[-1] == "power" else number
    return tuple(compile_value(item, parser, (*path, i), number if i else first) for i, item in enumerate(raw))
