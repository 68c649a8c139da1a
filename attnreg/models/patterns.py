"""Patterns: they give each layer of a stack a word; the family's file describes the layers of each word.

A pattern is a word for all layers, a list of patterns, or a mapping with one of the keys below. The first pattern of a
list that applies counts.

    list: FIELD        The field has one entry for each layer: a list, or the letters of a string. ``means`` maps
                       entries to words. With ``decides_count`` the length is the number of layers; with
                       ``longer_is_cut`` entries beyond the number of layers are dropped.
    runs: FIELD        The field is a list of [entries, times]: the entries, repeated ``times``. ``means`` maps them.
    repeat: [...]      A list of words, or a field that holds one, repeated up to the number of layers. ``means`` maps
                       the entries of a field.
    every: N           Layer i has the word of ``is`` where i % N is ``at`` (N - 1 by default), else that of ``others``.
    layers: [...]      The layers of these indices have the word of ``is``, the rest that of ``others``. Indices count
                       from ``from`` (0 by default); negative ones count from the end.
    below: N           The first N layers have the word of ``is``, the rest that of ``others``.

``when`` is the condition under which the mapping applies. ``note`` is the assumption that it makes about an unknown
family. A mapping whose field is missing, null or an empty list does not apply. N, ``at`` and ``layers`` are values
(`attnreg.models.values`); ``is`` and ``others`` are patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from attnreg.compile.conditions import Parser
from attnreg.compile.source.yaml_source import Path_
from attnreg.models.fields import ConfigError, ConfigFields, anything, integer, show
from attnreg.models.values import ConfigCondition, compile_condition, compile_value

# form -> its keys and the kind of value of each; the first key names the form, a kind that ends in ? is optional
PATTERNS: Mapping[str, Mapping[str, str]] = {
    "list": {"list": "field", "means": "words?", "decides_count": "boolean?", "longer_is_cut": "boolean?"},
    "runs": {"runs": "field", "means": "words?"},
    "repeat": {"repeat": "cycle", "means": "words?"},
    "every": {"every": "value", "at": "value?", "is": "pattern", "others": "pattern"},
    "layers": {"layers": "indices", "from": "value?", "is": "pattern", "others": "pattern"},
    "below": {"below": "value", "is": "pattern", "others": "pattern"},
}
# keys that every form may have
BESIDE: Mapping[str, str] = {"when": "condition?", "note": "text?"}
_INDEX = integer(-(2**31))
Words = Sequence[str]
# (fields, number of layers) -> the test of a layer's index, None if the pattern does not apply
Chosen = Callable[[ConfigFields, int], Callable[[int], bool] | None]


class Pattern(NamedTuple):
    """A compiled pattern. ``words(fields, count)`` returns the word of each layer, None if it does not apply.

    With a ``count`` of None only a pattern that decides the number of layers returns words. ``vocabulary`` holds the
    words in the family's file; a config may hold others. ``fields`` are the fields that the pattern reads.
    """

    words: Callable[[ConfigFields, int | None], Words | None]
    vocabulary: frozenset[str]
    fields: tuple[str, ...] = ()


def compile_pattern(raw: Any, parser: Parser, path: Path_) -> Pattern:
    """The pattern that the data describes. Adds its faults to the parser's problems."""
    if isinstance(raw, str):
        return Pattern(lambda _, count: None if count is None else [raw] * count, frozenset({raw}))
    if isinstance(raw, list) and raw:
        return _first([compile_pattern(item, parser, (*path, i)) for i, item in enumerate(raw)])
    kinds = [key for key in raw if key in PATTERNS] if isinstance(raw, dict) else []
    if len(kinds) != 1:
        parser.problem(path, f"expected a word, a list of patterns, or a mapping with one of {', '.join(PATTERNS)}")
        return _NOWHERE
    kind = kinds[0]
    if not _has_the_keys_of(kind, raw, parser, path):
        return _NOWHERE
    pattern = {"list": _list, "runs": _runs, "repeat": _repeat}.get(kind, _split)(kind, raw, parser, path)
    if raw.keys().isdisjoint(BESIDE):
        return pattern
    condition = compile_condition(raw["when"], parser, (*path, "when")) if "when" in raw else None
    decided_by = condition.fields if condition else ()
    guarded = _guarded(condition, pattern, raw.get("note"))
    return Pattern(guarded, pattern.vocabulary, tuple(dict.fromkeys((*pattern.fields, *decided_by))))


def _has_the_keys_of(kind: str, raw: Mapping[str, Any], parser: Parser, path: Path_) -> bool:
    """Whether a mapping has the keys of its form, with plain values of the right kind. Reports each fault."""
    before, keys = len(parser.problems), {**PATTERNS[kind], **BESIDE}
    for key in raw:
        if key not in keys:
            known = ", ".join(known for known in keys if known != kind)
            parser.problem((*path, key), f"unknown key `{key}` beside `{kind}`; known: {known}", key=True)
    for key, what in keys.items():
        if key not in raw:
            if not what.endswith("?"):
                whose = "those" if key == "is" else "the other"
                parser.problem(path, f"`{kind}` needs `{key}`, the word of {whose} layers")
        elif (plain := what.rstrip("?")) in _PLAIN and not _PLAIN[plain][1](raw[key]):
            parser.problem((*path, key), f"expected {_PLAIN[plain][0]}")
    return len(parser.problems) == before


def _is_words(raw: object) -> bool:
    return isinstance(raw, list) and bool(raw) and all(isinstance(word, str) for word in raw)


# kind of a plain value (no value expression, pattern or condition) -> its name in messages, and its test
_PLAIN: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "field": ("the name of a field", lambda raw: isinstance(raw, str)),
    "text": ("text", lambda raw: isinstance(raw, str)),
    "boolean": ("true or false", lambda raw: isinstance(raw, bool)),
    "cycle": (
        "a list of words, or the name of a field that holds them",
        lambda raw: isinstance(raw, str) or _is_words(raw),
    ),
    "words": (
        "a mapping from entries to words",
        lambda raw: isinstance(raw, dict) and all(isinstance(word, str) for word in raw.values()),
    ),
}
_NOWHERE = Pattern(lambda *_: None, frozenset())


def _first(options: Sequence[Pattern]) -> Pattern:
    def first(fields: ConfigFields, count: int | None) -> Words | None:
        return next((words for o in options if (words := o.words(fields, count)) is not None), None)

    return Pattern(first, frozenset().union(*(o.vocabulary for o in options)), _names(options))


def _guarded(
    condition: ConfigCondition | None, pattern: Pattern, note: str | None
) -> Callable[[ConfigFields, int | None], Words | None]:
    def words(fields: ConfigFields, count: int | None) -> Words | None:
        found = pattern.words(fields, count) if condition is None or condition.holds(fields) else None
        if found is not None and note:
            fields.notes.append(note)
        return found

    return words


def _names(patterns: Sequence[Pattern]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for pattern in patterns for name in pattern.fields))


def _list(kind: str, raw: Mapping[str, Any], parser: Parser, path: Path_) -> Pattern:
    name, means = raw[kind], raw.get("means", {})
    decides, cut = raw.get("decides_count", False), raw.get("longer_is_cut", False)

    def words(fields: ConfigFields, count: int | None) -> Words | None:
        entries = fields.value(name)
        if entries is None or entries == []:
            return None
        if not isinstance(entries, list | tuple | str):
            raise fields.error(name, "expected a list with one entry for each layer")
        if cut and count is not None:
            entries = entries[:count]
        if count is not None and len(entries) != count and not decides:
            lengths = f"{fields.spelt(name)} has {len(entries)} entries and the model has {count} layers"
            raise ConfigError(f"{fields.where}{lengths}; give one entry for each layer")
        return None if count is None and not decides else _translate(fields, name, entries, means)

    return Pattern(words, frozenset(means.values()), (name,))


def _runs(kind: str, raw: Mapping[str, Any], parser: Parser, path: Path_) -> Pattern:
    name, means = raw[kind], raw.get("means", {})

    def words(fields: ConfigFields, count: int | None) -> Words | None:
        runs = fields.value(name)
        if runs is None or count is None:
            return None
        entries: list[Any] = []
        for run in runs if isinstance(runs, list | tuple) else [runs]:
            if not isinstance(run, list | tuple) or len(run) != 2 or not isinstance(run[0], list | tuple):
                raise fields.error(name, "expected a list of [words, times]")
            times = run[1]
            if isinstance(times, bool) or not isinstance(times, int) or not 0 <= times <= count:
                raise fields.error(name, f"expected each run at most {count} times, the number of layers")
            entries += list(run[0]) * times
        if len(entries) != count:
            lengths = f"{fields.spelt(name)} has {len(entries)} entries and the model has {count} layers"
            raise ConfigError(f"{fields.where}{lengths}; give one entry for each layer")
        return _translate(fields, name, entries, means)

    return Pattern(words, frozenset(means.values()), (name,))


def _repeat(kind: str, raw: Mapping[str, Any], parser: Parser, path: Path_) -> Pattern:
    cycle, means = raw[kind], raw.get("means", {})
    fixed = isinstance(cycle, list)

    def words(fields: ConfigFields, count: int | None) -> Words | None:
        entries = cycle if fixed else fields.value(cycle)
        if entries is None or count is None:
            return None
        if not isinstance(entries, list | tuple) or not entries:
            raise fields.error(cycle, "expected a list of words")
        known = entries if fixed else _translate(fields, cycle, entries, means)
        return [known[i % len(known)] for i in range(count)]

    return Pattern(words, frozenset(cycle if fixed else means.values()), () if fixed else (cycle,))


def _split(kind: str, raw: Mapping[str, Any], parser: Parser, path: Path_) -> Pattern:
    """The pattern of a form that gives some layers the word of ``is`` and the rest the word of ``others``."""
    inside, outside = (compile_pattern(raw[k], parser, (*path, k)) for k in ("is", "others"))
    chosen, names = (_indices if kind == "layers" else _counted)(kind, raw, parser, path)

    def words(fields: ConfigFields, count: int | None) -> Words | None:
        choose = None if count is None else chosen(fields, count)
        if choose is None or count is None:
            return None
        yes, no = inside.words(fields, count), outside.words(fields, count)
        return None if yes is None or no is None else [yes[i] if choose(i) else no[i] for i in range(count)]

    vocabulary = inside.vocabulary | outside.vocabulary
    return Pattern(words, vocabulary, tuple(dict.fromkeys((*names, *inside.fields, *outside.fields))))


def _counted(kind: str, raw: Mapping[str, Any], parser: Parser, path: Path_) -> tuple[Chosen, tuple[str, ...]]:
    """The test of the layers that ``every`` or ``below`` selects, and the fields that it reads."""
    least = integer(0 if kind == "below" else 1)
    limit = compile_value(raw[kind], parser, (*path, kind), least)
    at = compile_value(raw["at"], parser, (*path, "at"), _INDEX) if "at" in raw else None

    def chosen(fields: ConfigFields, count: int) -> Callable[[int], bool] | None:
        number = limit.get(fields, least)
        if number is None:
            return None
        # the result of arithmetic: a negative `below` selects no layer, an `every` below 1 is an error
        number = (_INDEX if kind == "below" else least)(fields, (*limit.names, kind)[0], number)
        if kind == "below":
            return lambda i: bool(i < number)
        phase = number - 1 if at is None else at.checked(fields, _INDEX, "at")
        return None if phase is None else lambda i: i % number == phase % number

    return chosen, limit.names


def _indices(kind: str, raw: Mapping[str, Any], parser: Parser, path: Path_) -> tuple[Chosen, tuple[str, ...]]:
    """The test of the layers that ``layers`` selects, and the fields that it reads.

    A list in the data is a list of indices, not a list of alternative values.
    """
    fixed = raw[kind] if isinstance(raw[kind], list) else None
    if fixed is not None and not _are_indices(fixed):
        parser.problem((*path, kind), "expected a list of the indices of layers, or the name of a field that holds it")
    field = compile_value(raw[kind] if fixed is None else None, parser, (*path, kind))
    start = compile_value(raw.get("from", 0), parser, (*path, "from"), _INDEX)

    def chosen(fields: ConfigFields, count: int) -> Callable[[int], bool] | None:
        indices = field.get(fields, anything) if fixed is None else fixed
        first = None if indices is None else start.checked(fields, _INDEX, "from")
        if indices is None or first is None:
            return None
        name = (*field.names, kind)[0]
        if not _are_indices(indices):
            raise fields.error(name, "expected a list of the indices of layers")
        if fixed is None and (wrong := [i for i in indices if not -count <= i - first < count]):
            raise ConfigError(
                f"{fields.where}{fields.spelt(name)} names layer {wrong[0]}, and there are {count} "
                f"(counted from {first}); give indices of layers"
            )
        there = {(i - first) % count if -count <= i - first < count else -1 for i in indices} if count else set()
        return there.__contains__

    return chosen, field.names


def _are_indices(raw: object) -> bool:
    return isinstance(raw, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in raw)


def _translate(fields: ConfigFields, name: str, entries: Any, means: Mapping[str, str]) -> Words:
    words = []
    for i, entry in enumerate(entries):
        # YAML's keys are text: 1 and true in a config are "1" there
        key = "null" if entry is None else str(int(entry)) if isinstance(entry, bool) else str(entry)
        word = means.get(key, means.get("others", entry)) if isinstance(entry, str | int | None) else None
        if not isinstance(word, str):
            raise ConfigError(f"{fields.where}{fields.spelt(name)}[{i}] is {show(entry)}; expected a word")
        words.append(word)
    return words
