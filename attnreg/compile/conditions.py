"""Parser: turns plain data into conditions and matchers, and reports every problem with its location.

`attnreg.language.conditions` shows the grammar. It is the same for the facets of a registry and for the fields of a
model's config (`attnreg.language.vocabulary.OpenFacets`). A registry's words are known; a field may hold any JSON
value. For a field, ``1`` equals ``1.0``, but neither equals ``true`` or ``"1"``. Bounds and ``multiple_of`` accept only
numbers, and a pattern with ``*`` or ``?`` only text. A list or a mapping can only be tested for null.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeGuard

from attnreg.compile.source.yaml_source import Document, Path_, as_written, shown, unquoted
from attnreg.errors import Location, Problem, did_you_mean
from attnreg.language.conditions import ALWAYS, Clause, Condition
from attnreg.language.matchers import (
    ANY,
    Matcher,
    Requirement,
    all_of,
    any_of,
    bounded,
    equals,
    field_bounded,
    field_equals,
    field_glob,
    installed,
    integer,
    integer_range,
    is_number,
    negation,
    one_of,
    some_of,
)
from attnreg.language.numbers import Float, as_data, bounds_help
from attnreg.language.vocabulary import Architecture, Facet, Word

INTEGER_OPERATORS = ("min", "max", "below", "multiple_of", "not")
ARCH_OPERATORS = ("min", "max", "below", "not")
WORD_OPERATORS = ("not",)
# keys of a condition that are not facets
FORMS = ("any", "not", "without")
_GLOB = re.compile(r"[*?]")
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*([<>=!~].*)?\Z")
# specifiers that are certainly valid; other ones need the package `packaging`, whose import is slow
_PLAIN_VERSIONS = re.compile(r"\s*(?:[<>]=?|[=!]=)\s*[0-9]+(?:\.[0-9]+)*\s*\Z")


class Facets(Protocol):
    """The facets that conditions may name: a `Vocabulary`, or `OpenFacets` for the fields of a model's config."""

    @property
    def facets(self) -> Mapping[str, Facet]: ...

    @property
    def architectures(self) -> Mapping[str, Architecture]: ...

    @property
    def packages(self) -> Mapping[str, Word]: ...

    def facet(self, name: str) -> Facet | None: ...

    def help_for(self, facet: str, unknown: str) -> str: ...

    def missing(self, name: str, forms: Sequence[str] = ()) -> tuple[str, str]: ...


class Parser:
    """Turns plain data into conditions and matchers; adds each problem, with its location, to ``problems``.

    ``of_row`` says whether a condition may differ from backend to backend; an order's condition may not.
    """

    def __init__(self, words: Facets, document: Document, problems: list[Problem], *, of_row: bool = True) -> None:
        self.words = words
        self.doc = document
        self.problems = problems
        self.of_row = of_row

    def problem(self, path: Path_, message: str, help_: str = "", *, key: bool = False) -> None:
        where = ".".join(str(p) for p in path if not isinstance(p, int))
        self.problems.append(self.doc.problem(path, f"{where}: {message}" if where else message, help_, key=key))

    def condition(self, raw: object, path: Path_) -> Condition:
        """The condition at ``path``; an empty mapping always holds."""
        where = self.doc.at(*path)
        if not isinstance(raw, dict):
            self.problem(path, f"expected a condition (facet: matcher), got {shown(raw)}")
            return ALWAYS
        clauses: list[Clause] = []
        any_of: list[tuple[Condition, ...]] = []
        none_of: list[Condition] = []
        for key, value in raw.items():
            here = (*path, key)
            if key == "any":
                if not isinstance(value, list) or not value:
                    help_ = "one of them must hold"
                    self.problem(here, f"`any` takes a list of conditions, got {shown(value)}", help_)
                    continue
                any_of.append(tuple(self.condition(item, (*here, i)) for i, item in enumerate(value)))
            elif key == "not":
                none_of.append(self.condition(value, here))
                if value == {}:
                    self.problem(here, "an empty condition always holds, so this never does", "say what must not hold")
            elif key == "without":
                clauses += self._without(value, here)
            else:
                clauses += self._clause(key, value, here)
        return Condition(tuple(clauses), tuple(any_of), tuple(none_of), where)

    def _clause(self, name: str, raw: object, path: Path_) -> list[Clause]:
        facet = self.words.facet(name)
        if facet is None:
            self.problem(path, *self.words.missing(name, FORMS), key=True)
            return []
        if facet.of == "selection" and not self.of_row:
            message = f"`{name}` cannot be used here: its value differs from backend to backend"
            self.problem(path, message, "rows, waivers and derived facets may ask for it", key=True)
        return [Clause(name, self.matcher(raw, facet, path), self.doc.key_at(*path))]

    def matcher(self, raw: object, facet: Facet, path: Path_) -> Matcher:
        """The matcher in the data. Reports unknown words, operators and types, and a matcher that accepts no value."""
        if facet.kind == "words":
            return self._set_test(raw, facet, path)
        if facet.kind == "packages":
            return self._packages_test(raw, path)
        return self._matcher(raw, facet, path)

    def _matcher(self, raw: object, facet: Facet, path: Path_) -> Matcher:
        if isinstance(raw, list):
            if not raw:
                self.problem(path, "the list is empty", "name at least one value")
            return any_of([self._matcher(item, facet, (*path, i)) for i, item in enumerate(raw)])
        before = len(self.problems)
        test = self._operators(raw, facet, path) if isinstance(raw, dict) else self._value(raw, facet, path)
        # a single known word always matches something, so only other matchers are tested
        if len(self.problems) == before and (isinstance(raw, dict) or facet.kind == "integer"):
            try:
                if _is_empty(test, facet):
                    below = {*test.constants, *filter(test.predicate, range(facet.least))}
                    help_ = f"{facet.name} is {facet.least} or more; " if any(n < facet.least for n in below) else ""
                    help_ += "mend its bounds, or remove it"
                    self.problem(path, f"nothing is {test.text}: the range is empty", help_)
            except ValueError as e:
                self.problem(path, str(e), "smaller numbers will do")
        return test

    def _value(self, raw: object, facet: Facet, path: Path_) -> Matcher:
        if facet.kind == "field":
            return self._field(raw, path)
        if raw is None:
            return equals(None, "not given")
        if facet.kind == "integer":
            return self._integer(raw, path)
        if facet.kind == "text":
            return self._text(raw, path)
        if isinstance(raw, str) and _GLOB.search(raw):
            return self._pattern(raw, facet, path)
        return self._known(raw, facet, path)

    def _integer(self, raw: object, path: Path_) -> Matcher:
        if not _is_int(raw):
            self.problem(path, f"expected an integer, got {shown(raw)}", unquoted(raw) or bounds_help(raw))
            return ANY
        return integer(raw)

    def _pattern(self, raw: str, facet: Facet, path: Path_) -> Matcher:
        accepted = frozenset(w for w in facet.words if isinstance(w, str) and fnmatchcase(w, raw))
        if not accepted:
            self.problem(path, f"`{raw}` matches no {_noun(facet)}", self._words_hint(raw, facet))
        # print the names of architectures: "sm100, sm103" is clearer than "sm10?"
        named = [a for a in self.words.architectures if a in accepted] if facet.kind == "arch" else []
        return one_of(accepted, ", ".join(named) or raw, named)

    def _field(self, raw: object, path: Path_) -> Matcher:
        if meant := self.doc.boolean_elsewhere(raw, *path):
            self.problem(path, f"`{raw}` is text here, and no boolean", f"write {meant}, or quote it for the text")
        if isinstance(raw, str) and not isinstance(raw, Float) and _GLOB.search(raw):
            return field_glob(raw)
        return field_equals(as_data(raw), "not given" if raw is None else as_written(raw))

    def _unknown(self, raw: object, facet: Facet, path: Path_) -> None:
        alike = isinstance(raw, str) or type(raw) in map(type, facet.words)
        what = f"unknown {_noun(facet)} '{raw}'" if alike else f"expected a word, got {shown(raw)}"
        self.problem(path, what, self._words_hint(raw, facet))

    def _known(self, raw: object, facet: Facet, path: Path_) -> Matcher:
        # compared by type too: true is not 1
        known = (
            raw in facet.known if isinstance(raw, str) else any(raw == w and type(raw) is type(w) for w in facet.words)
        )
        if isinstance(raw, Float) or not known:
            self._unknown(raw, facet, path)
            return ANY
        return equals(raw, as_written(raw))

    def _text(self, raw: object, path: Path_) -> Matcher:
        if not isinstance(raw, str) or isinstance(raw, Float):
            self.problem(path, f"expected text, got {shown(raw)}", "quote it")
            return ANY
        if _GLOB.search(raw):
            help_ = "text has no list of words for a pattern to choose from; name each, as in [llama, llama4]"
            self.problem(path, f"`{raw}` is a pattern, and text is compared as a whole", help_)
            return ANY
        return equals(raw, raw)

    def _operators(self, raw: dict[str, Any], facet: Facet, path: Path_) -> Matcher:
        allowed = _operators_of(facet)
        if not raw:
            self.problem(path, "the matcher is empty", f"give at least one of {', '.join(allowed)}")
        tests, bounds = list[Matcher](), dict[str, Any]()
        for op, value in raw.items():
            here = (*path, op)
            if op not in allowed:
                self.problem(here, f"unknown operator `{op}`", did_you_mean(op, allowed), key=True)
            elif op == "not":
                tests.append(self._negation(value, facet, here))
            elif facet.kind == "arch":
                tests.append(self._arch_bound(op, value, here))
            else:
                bounds |= self._bound(op, value, facet, here)
        if bounds and facet.kind == "field":
            tests.insert(0, field_bounded(**bounds))
            if _holds_no_number(**bounds):
                self.problem(path, f"nothing is {tests[0].text}: the range is empty", "mend its bounds, or remove it")
        elif bounds:
            tests.insert(0, bounded(**bounds))
        return tests[0] if len(tests) == 1 else all_of(tests)

    def _bound(self, op: str, raw: object, facet: Facet, path: Path_) -> dict[str, float]:
        """Operator -> its bound; empty if the data is not a number."""
        broken = facet.kind == "field" and op != "multiple_of"
        value: Any = as_data(raw) if broken else raw
        if not (is_number(value) if broken else _is_int(value)) or not math.isfinite(value):
            expected = "a number" if broken else "an integer"
            self.problem(path, f"expected {expected}, got {shown(raw)}", unquoted(raw, "" if broken else " or a point"))
            return {}
        if op == "multiple_of" and value < 1:
            self.problem(path, f"expected an integer of at least 1, got {shown(raw)}")
            return {}
        return {op: value}

    def _negation(self, raw: object, facet: Facet, path: Path_) -> Matcher:
        """The matcher of `not`. If the list has null, the value must be given, and the text says so."""
        test = negation(self._matcher(raw, facet, path))
        if raw is None:
            return replace(test, text="given")
        if isinstance(raw, list) and None in raw:
            given = [(i, v) for i, v in enumerate(raw) if v is not None]
            others = ", ".join(self._matcher(v, facet, (*path, i)).text for i, v in given)
            return replace(test, text=f"given and not {others}")
        return test

    def _arch_bound(self, op: str, value: object, path: Path_) -> Matcher:
        archs = self.words.architectures
        if not isinstance(value, str) or value not in archs:
            self._unknown(value, self.words.facets["arch"], path)
            return ANY
        bound = archs[value]
        keep = {"min": operator.ge, "max": operator.le, "below": operator.lt}[op]
        accepted = frozenset(a.name for a in archs.values() if a.series == bound.series and keep(a.rank, bound.rank))
        return one_of(accepted, {"min": f"{value} or later", "max": f"up to {value}", "below": f"before {value}"}[op])

    def _set_test(self, raw: object, facet: Facet, path: Path_) -> Matcher:
        if isinstance(raw, dict):
            return self._of_a_list(raw, facet, path)
        words = self._words(raw, facet, path)
        if raw == []:
            self.problem(path, "the list is empty", f"name at least one {_noun(facet)}; `{{only: []}}` asks for none")
        return Matcher(" and ".join(sorted(words)), words.issubset, mentions=words, form="all")

    def _of_a_list(self, raw: dict[str, Any], facet: Facet, path: Path_) -> Matcher:
        """`any` or `only`, each with a list of words."""
        if len(raw) != 1 or not raw.keys() <= {"any", "only"}:
            help_ = f"write [...], {{any: [...]}} or {{only: [...]}}; `without` says which {facet.name} must be absent"
            self.problem(path, "a set is matched by a list (all of these), by `any` or by `only`", help_)
            return ANY
        ((form, listed),) = raw.items()
        words = self._words(listed, facet, (*path, form))
        if form == "any":
            if listed == []:
                self.problem((*path, form), "the list is empty", f"name at least one {_noun(facet)}")
            return some_of(words)
        text = "none" if not words else "no other than " + ", ".join(sorted(words))
        return Matcher(text, words.issuperset, mentions=words, form="only")

    def _words(self, raw: object, facet: Facet, path: Path_) -> frozenset[str]:
        items = [raw] if isinstance(raw, str) else raw
        if not isinstance(items, list):
            self.problem(path, f"expected a list of {facet.name}, got {shown(raw)}")
            return frozenset()
        known = frozenset(w for w in items if isinstance(w, str) and w in facet.known)
        for i, word in enumerate(items):
            if not isinstance(word, str) or word not in known:
                self._unknown(word, facet, (*path, i))
        return known

    def _words_hint(self, raw: object, facet: Facet) -> str:
        if isinstance(raw, Float) and facet.kind == "arch":
            return "architectures are written as the vocabulary names them, as in sm90: as a number 9.10 would be 9.1"
        if facet.word_set is None and facet.kind != "arch":
            return did_you_mean(as_written(raw), map(as_written, facet.words))
        return self.words.help_for(facet.name, as_written(raw))

    def _without(self, raw: object, path: Path_) -> list[Clause]:
        items = [raw] if isinstance(raw, str) else raw
        if not isinstance(items, list) or not items:
            self.problem(path, f"`without` takes a list of features or flags, got {shown(raw)}")
            return []
        sets = [f for f in self.words.facets.values() if f.kind == "words"]
        known = frozenset[str]().union(*(facet.words for facet in sets))
        for i, word in enumerate(items):
            if not isinstance(word, str) or word not in known:
                what = "unknown feature or flag" if isinstance(word, str) else "expected a word, got"
                self.problem((*path, i), f"{what} {shown(word)}", did_you_mean(as_written(word), known))
        named = frozenset(w for w in items if isinstance(w, str))
        where = self.doc.key_at(*path)
        return [_absent(facet, words, where) for facet in sets if (words := named & facet.known)]

    def _packages_test(self, raw: object, path: Path_) -> Matcher:
        wanted: list[Requirement] = []
        if raw == []:
            self.problem(path, "the list is empty", "name at least one package")
        for i, item in enumerate(raw if isinstance(raw, list) else [raw]):
            here = (*path, i) if isinstance(raw, list) else path
            match = _REQUIREMENT.match(item) if isinstance(item, str) else None
            if match is None:
                self.problem(here, f"expected a package, as in `flash-attn>=2.7`, got {shown(item)}")
            elif match[1] not in self.words.packages:
                self.problem(here, f"unknown package '{match[1]}'", self.words.help_for("packages", match[1]))
            elif match[2] and not _names_versions(match[2]):
                self.problem(here, f"`{match[2]}` names no versions", "as in >=2.7, ==2.* or >=2.7,<3")
            else:
                wanted.append(Requirement(match[1], (match[2] or "").strip()))
        return installed(wanted)


def _absent(facet: Facet, words: frozenset[str], where: Location) -> Clause:
    text = "without " + ", ".join(sorted(words))
    return Clause(facet.name, Matcher(text, words.isdisjoint, mentions=words, form="none"), where)


def _is_empty(test: Matcher, facet: Facet) -> bool:
    if facet.kind == "integer":
        every = integer_range([test])[facet.least :]
        # constants first: one of them nearly always matches
        likely = (None, *(n for n in (*test.constants, *test.moduli) if n in every))
        return not (any(map(test.matches, likely)) or any(map(test.predicate, every)))
    if facet.kind in ("word", "arch", "boolean", "derived"):
        return not any(test.matches(v) for v in (None, *facet.words))
    return False


def _holds_no_number(
    min: float = -math.inf,  # noqa: A002
    max: float = math.inf,  # noqa: A002
    below: float = math.inf,
    multiple_of: int = 1,
) -> bool:
    # integer arithmetic: a quotient of floats may be rounded to another number
    least = min if multiple_of == 1 or math.isinf(min) else -(-math.ceil(min) // multiple_of) * multiple_of
    return least > max or least >= below


def _operators_of(facet: Facet) -> tuple[str, ...]:
    numeric = facet.kind == "derived" and all(_is_int(w) for w in facet.words if w)
    if numeric or facet.kind in ("integer", "field"):
        return INTEGER_OPERATORS
    return ARCH_OPERATORS if facet.kind == "arch" else WORD_OPERATORS


def _names_versions(text: str) -> bool:
    """Whether a text is a list of PEP 440 specifiers without ``===``, which compares texts instead of versions."""
    parts = text.split(",")
    if all(map(_PLAIN_VERSIONS.match, parts)):
        return True
    from packaging.specifiers import InvalidSpecifier, Specifier

    try:
        return all(Specifier(part).operator != "===" for part in parts)
    except InvalidSpecifier:
        return False


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _noun(facet: Facet) -> str:
    if facet.kind == "words":
        return facet.name.removesuffix("s")
    return {"arch": "architecture", "kv_dtype": "kv dtype"}.get(facet.name, facet.name)
