"""Which word each layer of a stack has: the patterns of a family's file.

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
from typing import Any, NamedTuple

from attnreg.compile.conditions import Parser
from attnreg.compile.yaml_source import Path_
from attnreg.models.fields import ConfigError, ConfigFields, anything, integer, show
from attnreg.models.values import ConfigCondition, compile_condition, compile_value

# each form's keys, the first of which names it, and what stands under them; what ends in ? may be left out
PATTERNS: Mapping[str, Mapping[str, str]] = {
    "list": {"list": "field", "means": "words?", "decides_count": "boolean?", "longer_is_cut": "boolean?"},
    "runs": {"runs": "field", "means": "words?"},
    "repeat": {"repeat": "cycle", "means": "words?"},
    "every": {"every": "value", "at": "value?", "is": "pattern", "others": "pattern"},
    "layers": {"layers": "indices", "from": "value?", "is": "pattern", "others": "pattern"},
    "below": {"below": "value", "is": "pattern", "others": "pattern"},
}
# what every form may have beside its own
BESIDE: Mapping[str, str] = {"when": "condition?", "note": "text?"}
_INDEX = integer(-(2**31))
Words = Sequence[str]
# of so many layers: whether the layer of an index is meant; None where the pattern does not apply
Chosen = Callable[[ConfigFields, int], Callable[[int], bool] | None]


class Pattern(NamedTuple):
    """``words(fields, count)`` is one word a layer, or None where the pattern does not apply.

    A ``count`` of None asks for as many as the config itself says. ``vocabulary`` holds the words that the pattern can
    give by itself, whatever the config says.
    """

    words: Callable[[ConfigFields, int | None], Words | None]
    vocabulary: frozenset[str]
    fields: tuple[str, ...] = ()


def compile_pattern(raw: Any, parser: Parser, path: Path_) -> Pattern:
    """The pattern that ``raw`` says; what is wrong with it goes to the parser's problems."""
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
    """Whether a mapping has the keys of its form, and under the plain ones what belongs there; reported if not."""
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


# what stands under a key that is no value, pattern or condition: in words, and the test of it
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
    """The patterns that say of some layers one thing and of the others another."""
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
    """The layers that ``every`` and ``below`` mean, and the fields that say it."""
    least = integer(0 if kind == "below" else 1)
    limit = compile_value(raw[kind], parser, (*path, kind), least)
    at = compile_value(raw["at"], parser, (*path, "at"), _INDEX) if "at" in raw else None

    def chosen(fields: ConfigFields, count: int) -> Callable[[int], bool] | None:
        number = limit.get(fields, least)
        if number is None:
            return None
        # arithmetic may come to less than 0, below which there is no layer; but every one of 0 layers is none
        number = (_INDEX if kind == "below" else least)(fields, (*limit.names, kind)[0], number)
        if kind == "below":
            return lambda i: bool(i < number)
        phase = number - 1 if at is None else at.checked(fields, _INDEX, "at")
        return None if phase is None else lambda i: i % number == phase % number

    return chosen, limit.names


def _indices(kind: str, raw: Mapping[str, Any], parser: Parser, path: Path_) -> tuple[Chosen, tuple[str, ...]]:
    """The layers that ``layers`` means, and the fields that say it; a list there is one of indices, not of values."""
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
