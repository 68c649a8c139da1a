"""The one condition grammar: parse it, evaluate it, say it in words, and list the values that it distinguishes.

A condition maps facets to matchers, all of which must hold::

    {arch: sm90}   {arch: {min: sm100, below: sm110}}   {kv_dtype: [auto, "fp8*"]}   {head_size: {multiple_of: 16}}
    {features: [sinks]}   {without: [sinks]}   {not: {...}}   {any: [{...}, {...}]}

A matcher is a value (``null``: not given), a word with ``*`` and ``?``, a list of matchers (one of them), or operators,
all of which must hold. For set facets a list asks for all of its words. A value that is not given satisfies no bound.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from attnreg.compile.yaml_source import Document, Float, Path_, as_written, shown
from attnreg.errors import Location, Problem, did_you_mean
from attnreg.language.matchers import (
    ANY,
    Matcher,
    Requirement,
    all_of,
    any_of,
    bounded,
    equals,
    glob,
    installed,
    integer,
    integer_range,
    negation,
    one_of,
)
from attnreg.language.vocabulary import ASKED, Facet, Vocabulary

Point = Mapping[str, Any]
NOWHERE = Location("", 0, 0)
INTEGER_OPERATORS = ("min", "max", "below", "multiple_of", "not")
ARCH_OPERATORS = ("min", "max", "below", "not")
WORD_OPERATORS = ("not",)
_GLOB = re.compile(r"[*?]")
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*([<>=!~].*)?\Z")
# PEP 440: a wildcard only after == and !=, at least two numbers after ~=
_NUMBER = r"\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev\d+)?"
_VERSION = rf"\s*(?:(?:[<>]=?|[=!]=)\s*{_NUMBER}|[=!]=\s*\d+(?:\.\d+)*\.\*|~=\s*\d+\.{_NUMBER})\s*"
_VERSIONS = re.compile(rf"{_VERSION}(?:,{_VERSION})*\Z")


@dataclass(frozen=True, slots=True)
class Clause:
    """One facet and the test it must pass, with the place that says so."""

    facet: str
    matcher: Matcher
    where: Location

    def holds(self, point: Point) -> bool:
        return self.matcher.matches(point[self.facet])

    def describe(self) -> str:
        """The clause in words: ``arch sm90 or later``, ``sinks``, ``flag aiter``, ``without alibi``."""
        text, form = self.matcher.text, self.matcher.form
        if form == "none":
            return text
        if form == "only":
            return f"{self.facet} {text}"
        if form == "all":
            noun = {"features": "", "flags": "flag ", "packages": "package "}.get(self.facet, f"{self.facet} ")
            return " and ".join(noun + word for word in sorted(map(str, self.matcher.mentions)))
        return f"{self.facet} {text}"


@dataclass(frozen=True, slots=True)
class Condition:
    """Clauses that must all hold, of each ``any_of`` group at least one condition, and none of ``none_of``."""

    clauses: tuple[Clause, ...] = ()
    any_of: tuple[tuple[Condition, ...], ...] = ()
    none_of: tuple[Condition, ...] = ()
    where: Location = NOWHERE

    def holds(self, point: Point) -> bool:
        """Whether the condition holds at a point (facet -> value)."""
        for clause in self.clauses:
            if not clause.matcher.matches(point[clause.facet]):
                return False
        for group in self.any_of:
            if not any(condition.holds(point) for condition in group):
                return False
        for condition in self.none_of:  # noqa: SIM110  (a loop costs nothing where there is none; this is called often)
            if condition.holds(point):
                return False
        return True

    def describe(self) -> str:
        """The condition in words."""
        parts = [clause.describe() for clause in self.clauses]
        parts += ["(" + " or ".join(c.describe() for c in group) + ")" for group in self.any_of]
        parts += [f"not ({condition.describe()})" for condition in self.none_of]
        return " and ".join(parts) or "always"

    def walk(self) -> Iterator[Clause]:
        """Every clause in the condition, those of its parts included."""
        yield from self.clauses
        for group in self.any_of:
            for condition in group:
                yield from condition.walk()
        for condition in self.none_of:
            yield from condition.walk()

    @property
    def facets(self) -> tuple[str, ...]:
        """The facets that the condition names, each once, in their order."""
        return tuple(dict.fromkeys(clause.facet for clause in self.walk()))


ALWAYS = Condition()


class Parser:
    """Turns plain data into conditions and tests; what is wrong is added to ``problems`` with its place.

    ``of_row`` says whether they are a backend's: whatever decides between backends is the same for all of them.
    """

    def __init__(
        self, vocabulary: Vocabulary, document: Document, problems: list[Problem], *, of_row: bool = True
    ) -> None:
        self.vocabulary = vocabulary
        self.doc = document
        self.problems = problems
        self.of_row = of_row

    def problem(self, path: Path_, message: str, help_: str = "", *, key: bool = False) -> None:
        where = ".".join(str(p) for p in path if not isinstance(p, int))
        self.problems.append(self.doc.problem(path, f"{where}: {message}" if where else message, help_, key=key))

    def condition(self, raw: Any, path: Path_) -> Condition:
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
            elif key in self.vocabulary.facets:
                if key == ASKED and not self.of_row:
                    message = f"`{ASKED}` is no matter of requests: it differs from backend to backend"
                    self.problem(here, message, "rows, waivers and derived facets may ask for it", key=True)
                facet = self.vocabulary.facets[key]
                clauses.append(Clause(key, self.matcher(value, facet, here), self.doc.key_at(*here)))
            else:
                known = [*self.vocabulary.facets, "any", "not", "without"]
                self.problem(here, f"unknown facet `{key}`", did_you_mean(key, known), key=True)
        return Condition(tuple(clauses), tuple(any_of), tuple(none_of), where)

    def matcher(self, raw: Any, facet: Facet, path: Path_) -> Matcher:
        """The matcher that the data stands for. Reports an unknown word, operator or type, and a matcher of nothing."""
        if facet.kind == "words":
            return self._set_test(raw, facet, path)
        if facet.kind == "packages":
            return self._packages_test(raw, path)
        return self._matcher(raw, facet, path)

    # matchers of one value -------------------------------------------------------------------------------------------

    def _matcher(self, raw: Any, facet: Facet, path: Path_) -> Matcher:
        if isinstance(raw, list):
            if not raw:
                self.problem(path, "the list is empty", "name at least one value")
            return any_of([self._matcher(item, facet, (*path, i)) for i, item in enumerate(raw)])
        before = len(self.problems)
        test = (self._operators if isinstance(raw, dict) else self._value)(raw, facet, path)
        if len(self.problems) == before:
            try:
                if _is_empty(test, facet):
                    self.problem(path, f"nothing is {test.text}: the range is empty", "mend its bounds, or remove it")
            except ValueError as e:
                self.problem(path, str(e), "smaller numbers will do")
        return test

    def _value(self, raw: Any, facet: Facet, path: Path_) -> Matcher:
        if raw is None:
            return equals(None, "not given")
        if facet.kind == "integer":
            if isinstance(raw, bool) or not isinstance(raw, int):
                self.problem(path, f"expected an integer, got {shown(raw)}", "write it without quotes or a point")
                return ANY
            return integer(raw)
        if facet.kind == "text":
            return self._text(raw, path)
        if facet.kind == "derived" and any(isinstance(w, int) for w in facet.words) and not isinstance(raw, str):
            return self._known(raw, facet, path)
        if not isinstance(raw, str):
            if any(raw == w and type(raw) is type(w) for w in facet.words):
                return equals(raw, as_written(raw))
            self._unknown(raw, facet, path)
            return ANY
        if _GLOB.search(raw):
            accepted = frozenset(w for w in facet.words if isinstance(w, str) and fnmatchcase(w, raw))
            if not accepted:
                self.problem(path, f"`{raw}` matches no {_noun(facet)}", _words_hint(raw, facet))
            # a person knows sm100 and sm103 better than sm10?
            named = [a for a in self.vocabulary.architectures if a in accepted] if facet.kind == "arch" else []
            return one_of(accepted, ", ".join(named) or raw, named)
        return self._known(raw, facet, path)

    def _unknown(self, raw: Any, facet: Facet, path: Path_) -> None:
        alike = isinstance(raw, str) or type(raw) in map(type, facet.words)
        what = f"unknown {_noun(facet)} '{raw}'" if alike else f"expected a word, got {shown(raw)}"
        self.problem(path, what, _words_hint(raw, facet))

    def _known(self, raw: Any, facet: Facet, path: Path_) -> Matcher:
        if isinstance(raw, Float) or not any(raw == w and type(raw) is type(w) for w in facet.words):
            self._unknown(raw, facet, path)
            return ANY
        return equals(raw, as_written(raw))

    def _text(self, raw: Any, path: Path_) -> Matcher:
        if not isinstance(raw, str) or isinstance(raw, Float):
            self.problem(path, f"expected text, got {shown(raw)}", "quote it")
            return ANY
        if _GLOB.search(raw):
            return glob(raw)
        return equals(raw, raw)

    def _operators(self, raw: dict[str, Any], facet: Facet, path: Path_) -> Matcher:
        numeric = facet.kind == "integer" or (facet.kind == "derived" and all(_is_int(w) for w in facet.words if w))
        allowed = INTEGER_OPERATORS if numeric else ARCH_OPERATORS if facet.kind == "arch" else WORD_OPERATORS
        if not raw:
            self.problem(path, "the matcher is empty", f"give at least one of {', '.join(allowed)}")
        tests, bounds = [], {}
        for op, value in raw.items():
            here = (*path, op)
            if op not in allowed:
                self.problem(here, f"unknown operator `{op}`", did_you_mean(op, allowed), key=True)
            elif op == "not":
                tests.append(self._negation(value, facet, here))
            elif facet.kind == "arch":
                tests.append(self._arch_bound(op, value, here))
            elif not _is_int(value):
                self.problem(here, f"expected an integer, got {shown(value)}", "write it without quotes or a point")
            elif op == "multiple_of" and value < 1:
                self.problem(here, f"expected an integer of at least 1, got {shown(value)}")
            else:
                bounds[op] = value
        if bounds:
            tests.insert(0, bounded(**bounds))
        return tests[0] if len(tests) == 1 else all_of(tests)

    def _negation(self, raw: Any, facet: Facet, path: Path_) -> Matcher:
        """`not`; where it names null, the value must be given, and that is how it is said."""
        test = negation(self._matcher(raw, facet, path))
        if raw is None:
            return replace(test, text="given")
        if isinstance(raw, list) and None in raw:
            given = [(i, v) for i, v in enumerate(raw) if v is not None]
            others = ", ".join(self._matcher(v, facet, (*path, i)).text for i, v in given)
            return replace(test, text=f"given and not {others}")
        return test

    def _arch_bound(self, op: str, value: Any, path: Path_) -> Matcher:
        archs = self.vocabulary.architectures
        if not isinstance(value, str) or value not in archs:
            self._unknown(value, self.vocabulary.facets["arch"], path)
            return ANY
        bound = archs[value]
        keep = {"min": operator.ge, "max": operator.le, "below": operator.lt}[op]
        accepted = frozenset(a.name for a in archs.values() if a.series == bound.series and keep(a.rank, bound.rank))
        return one_of(accepted, {"min": f"{value} or later", "max": f"up to {value}", "below": f"before {value}"}[op])

    # matchers of sets ------------------------------------------------------------------------------------------------

    def _set_test(self, raw: Any, facet: Facet, path: Path_) -> Matcher:
        if isinstance(raw, dict):
            return self._only(raw, facet, path)
        words = self._words(raw, facet, path)
        if raw == []:
            self.problem(path, "the list is empty", f"name at least one {_noun(facet)}; `{{only: []}}` asks for none")
        return Matcher(" and ".join(sorted(words)), words.issubset, mentions=words, form="all")

    def _only(self, raw: dict[str, Any], facet: Facet, path: Path_) -> Matcher:
        if set(raw) != {"only"}:
            help_ = f"write [...] or {{only: [...]}}; `without` says which {facet.name} must be absent"
            self.problem(path, "a set is matched by a list (all of these) or by `only`", help_)
            return ANY
        words = self._words(raw["only"], facet, (*path, "only"))
        text = "none" if not words else "no other than " + ", ".join(sorted(words))
        return Matcher(text, words.issuperset, mentions=words, form="only")

    def _words(self, raw: Any, facet: Facet, path: Path_) -> frozenset[str]:
        items = [raw] if isinstance(raw, str) else raw
        if not isinstance(items, list):
            self.problem(path, f"expected a list of {facet.name}, got {shown(raw)}")
            return frozenset()
        known = frozenset(w for w in items if isinstance(w, str) and w in facet.words)
        for i, word in enumerate(items):
            if not isinstance(word, str) or word not in known:
                self._unknown(word, facet, (*path, i))
        return known

    def _without(self, raw: Any, path: Path_) -> list[Clause]:
        items = [raw] if isinstance(raw, str) else raw
        if not isinstance(items, list) or not items:
            self.problem(path, f"`without` takes a list of features or flags, got {shown(raw)}")
            return []
        clauses, where = [], self.doc.key_at(*path)
        named = frozenset(w for w in items if isinstance(w, str))
        sets = [f for f in self.vocabulary.facets.values() if f.kind == "words"]
        for facet in sets:
            words = named & facet.words
            if words:
                text = "without " + ", ".join(sorted(words))
                clauses.append(Clause(facet.name, Matcher(text, words.isdisjoint, mentions=words, form="none"), where))
        for i, word in enumerate(items):
            if not isinstance(word, str) or not any(word in f.words for f in sets):
                hint = did_you_mean(as_written(word), [w for f in sets for w in f.words])
                what = "unknown feature or flag" if isinstance(word, str) else "expected a word, got"
                self.problem((*path, i), f"{what} {shown(word)}", hint)
        return clauses

    def _packages_test(self, raw: Any, path: Path_) -> Matcher:
        wanted: list[Requirement] = []
        if raw == []:
            self.problem(path, "the list is empty", "name at least one package")
        for i, item in enumerate(raw if isinstance(raw, list) else [raw]):
            here = (*path, i) if isinstance(raw, list) else path
            match = _REQUIREMENT.match(item) if isinstance(item, str) else None
            if match is None:
                self.problem(here, f"expected a package, as in `flash-attn>=2.7`, got {shown(item)}")
            elif match[1] not in self.vocabulary.packages:
                hint = did_you_mean(match[1], self.vocabulary.packages)
                self.problem(here, f"unknown package '{match[1]}'", hint)
            elif match[2] and not _VERSIONS.match(match[2]):
                self.problem(here, f"`{match[2]}` names no versions", "as in >=2.7, ==2.* or >=2.7,<3")
            else:
                wanted.append(Requirement(match[1], (match[2] or "").strip()))
        return installed(wanted)


def _is_empty(test: Matcher, facet: Facet) -> bool:
    if facet.kind == "integer":
        every = integer_range([test])
        # its constants first: one of them nearly always shows that there is something
        likely = (None, *(n for n in (*test.constants, *test.moduli) if n in every))
        return not (any(map(test.matches, likely)) or any(map(test.predicate, every)))
    if facet.kind in ("word", "arch", "boolean", "derived"):
        return not any(test.matches(v) for v in (None, *facet.words))
    return False


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _noun(facet: Facet) -> str:
    if facet.kind == "words":
        return facet.name.removesuffix("s")
    return {"arch": "architecture", "kv_dtype": "kv dtype"}.get(facet.name, facet.name)


def _words_hint(raw: Any, facet: Facet) -> str:
    if isinstance(raw, Float) and facet.kind == "arch":
        return "architectures are written as the vocabulary names them, as in sm90: as a number 9.10 would be 9.1"
    return did_you_mean(as_written(raw), map(as_written, facet.words))
