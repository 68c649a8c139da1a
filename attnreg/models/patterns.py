"""Which word each layer of a stack has: the pattern primitives of models.yaml.

A pattern is a word for all layers; a list, of which the first that applies counts; or a mapping with one of

    list: FIELD        one entry a layer (a list, or the letters of a string), turned into words by ``means``;
                       ``decides_count``: its length is the number of layers; ``longer_is_cut``: what is over is dropped
    runs: FIELD        a list of [words, times], each of which is these words so many times over, turned by ``means``
    repeat: [...]      these words over and over (or a field that holds them), turned into words by ``means``
    every: N           layer i is ``is`` where i % N is ``at`` (the last of each N, if left out), else ``others``
    layers: [...]      these layers are ``is``, counted from ``from`` (0, if left out; a negative one from the end)
    below: N           the first N layers are ``is``, else ``others``

and perhaps ``when``, the condition under which it applies, and ``note``, what it assumes of a family not known. It does
not apply where the field that it names is missing, null or an empty list. N, ``at`` and ``layers`` are values; ``is``
and ``others`` are patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnreg.models.fields import ConfigError, ConfigFields, anything, integer, show
from attnreg.models.values import Complain, Condition, Value, compile_condition, compile_value

KEYS = {
    "list": {"means", "decides_count", "longer_is_cut"},
    "runs": {"means"},
    "repeat": {"means"},
    "every": {"at", "is", "others"},
    "layers": {"from", "is", "others"},
    "below": {"is", "others"},
}
_INDEX = integer(-(2**31))
Words = Sequence[str]


@dataclass(frozen=True)
class Pattern:
    """``words(fields, count)`` is one word a layer, or None where the pattern does not apply.

    A ``count`` of None asks for as many as the config itself says. ``vocabulary`` holds the words that the pattern can
    give by itself, whatever the config says.
    """

    words: Callable[[ConfigFields, int | None], Words | None]
    vocabulary: frozenset[str]
    fields: tuple[str, ...] = ()


def compile_pattern(raw: Any, complain: Complain, path: tuple[str | int, ...] = ()) -> Pattern:
    """The pattern that ``raw`` says; what is wrong with it goes to ``complain(path, message)``."""
    if isinstance(raw, str):
        return Pattern(lambda _, count: None if count is None else [raw] * count, frozenset({raw}))
    if isinstance(raw, list) and raw:
        options = [compile_pattern(item, complain, (*path, i)) for i, item in enumerate(raw)]

        def first(fields: ConfigFields, count: int | None) -> Words | None:
            return next((words for o in options if (words := o.words(fields, count)) is not None), None)

        return Pattern(first, frozenset().union(*(o.vocabulary for o in options)), _names(options))
    kinds = [key for key in raw if key in KEYS] if isinstance(raw, Mapping) else []
    if len(kinds) != 1:
        complain(path, f"expected a word, a list of patterns, or a mapping with one of {', '.join(KEYS)}")
        return Pattern(lambda *_: None, frozenset())
    kind = kinds[0]
    for key in raw:
        if key not in (kind, "when", "note", *KEYS[kind]):
            known = ", ".join([*sorted(KEYS[kind]), "when", "note"])
            complain((*path, key), f"unknown key `{key}` beside `{kind}`; known: {known}")
    condition = compile_condition(raw["when"], complain, (*path, "when")) if "when" in raw else None
    build = {"list": _list, "runs": _runs, "repeat": _repeat}.get(kind, _split)
    pattern = build(kind, raw, complain, path)
    if condition is None and "note" not in raw:
        return pattern
    guarded = _guarded(condition, pattern, raw.get("note"))
    decided_by = [name for name, _ in condition.parts] if condition else []
    return Pattern(guarded, pattern.vocabulary, tuple(dict.fromkeys((*pattern.fields, *decided_by))))


def _guarded(
    condition: Condition | None, pattern: Pattern, note: str | None
) -> Callable[[ConfigFields, int | None], Words | None]:
    def words(fields: ConfigFields, count: int | None) -> Words | None:
        found = pattern.words(fields, count) if condition is None or condition.holds(fields) else None
        if found is not None and note:
            fields.notes.append(note)
        return found

    return words


def _names(patterns: Sequence[Pattern]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for pattern in patterns for name in pattern.fields))


def _list(kind: str, raw: Mapping[str, Any], complain: Complain, path: tuple[str | int, ...]) -> Pattern:
    name, means = raw[kind], _means(raw, complain, path)
    if not isinstance(name, str):
        complain((*path, kind), "expected the name of a field")
        name = ""
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


def _runs(kind: str, raw: Mapping[str, Any], complain: Complain, path: tuple[str | int, ...]) -> Pattern:
    name, means = raw[kind], _means(raw, complain, path)
    if not isinstance(name, str):
        complain((*path, kind), "expected the name of a field")
        name = ""

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


def _repeat(kind: str, raw: Mapping[str, Any], complain: Complain, path: tuple[str | int, ...]) -> Pattern:
    cycle, means = raw[kind], _means(raw, complain, path)
    fixed = isinstance(cycle, list)
    if not (isinstance(cycle, str) or (fixed and cycle and all(isinstance(word, str) for word in cycle))):
        complain((*path, kind), "expected a list of words, or the name of a field that holds them")
        cycle = ""

    def words(fields: ConfigFields, count: int | None) -> Words | None:
        entries = cycle if fixed else fields.value(cycle)
        if entries is None or count is None:
            return None
        if not isinstance(entries, list | tuple) or not entries:
            raise fields.error(cycle, "expected a list of words")
        known = entries if fixed else _translate(fields, cycle, entries, means)
        return [known[i % len(known)] for i in range(count)]

    return Pattern(words, frozenset(cycle if fixed else means.values()), () if fixed else (cycle,))


def _split(kind: str, raw: Mapping[str, Any], complain: Complain, path: tuple[str | int, ...]) -> Pattern:
    """The patterns that say of some layers one thing and of the others another."""
    for key in ("is", "others"):
        if key not in raw:
            complain(path, f"`{kind}` needs `{key}`, the word of {'those' if key == 'is' else 'the other'} layers")
    if "is" not in raw or "others" not in raw:
        return Pattern(lambda *_: None, frozenset())
    inside, outside = (compile_pattern(raw[k], complain, (*path, k)) for k in ("is", "others"))
    # a list of layers is no list of alternatives
    fixed = raw[kind] if kind == "layers" and isinstance(raw[kind], list) else None
    limit = compile_value(raw[kind] if fixed is None else None, complain, (*path, kind))
    start = compile_value(raw.get("from", 0), complain, (*path, "from"))
    at = compile_value(raw["at"], complain, (*path, "at")) if "at" in raw else None
    names = limit.names

    def chosen(fields: ConfigFields, count: int) -> Callable[[int], bool] | None:
        if kind == "layers":
            return _layers(fields, count, fixed, limit, start)
        number = limit.get(fields, integer(0 if kind == "below" else 1))
        if number is None:
            return None
        if kind == "below":
            return lambda i: i < number
        phase = number - 1 if at is None else at.get(fields, _INDEX)
        return None if phase is None else lambda i: i % number == phase % number

    def words(fields: ConfigFields, count: int | None) -> Words | None:
        choose = None if count is None else chosen(fields, count)
        if choose is None or count is None:
            return None
        yes, no = inside.words(fields, count), outside.words(fields, count)
        return None if yes is None or no is None else [yes[i] if choose(i) else no[i] for i in range(count)]

    vocabulary = inside.vocabulary | outside.vocabulary
    return Pattern(words, vocabulary, tuple(dict.fromkeys((*names, *inside.fields, *outside.fields))))


def _layers(
    fields: ConfigFields, count: int, fixed: list[Any] | None, field: Value, start: Value
) -> Callable[[int], bool] | None:
    indices = field.get(fields, anything) if fixed is None else fixed
    if indices is None:
        return None
    name = field.names[0] if field.names else "layers"
    first = start.get(fields, _INDEX)
    if not isinstance(indices, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in indices):
        raise fields.error(name, "expected a list of the indices of layers")
    if fixed is None and (wrong := [i for i in indices if not -count <= i - first < count]):
        raise ConfigError(
            f"{fields.where}{fields.spelt(name)} names layer {wrong[0]}, and there are {count} "
            f"(counted from {first}); give indices of layers"
        )
    chosen = {(i - first) % count if -count <= i - first < count else -1 for i in indices} if count else set()
    return chosen.__contains__


def _means(raw: Mapping[str, Any], complain: Complain, path: tuple[str | int, ...]) -> dict[str, str]:
    means = raw.get("means", {})
    if not isinstance(means, Mapping) or not all(isinstance(word, str) for word in means.values()):
        complain((*path, "means"), "expected a mapping from entries to words")
        return {}
    return dict(means)


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
