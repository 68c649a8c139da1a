"""The condition grammar: what each matcher accepts, and how it is said in words."""

from __future__ import annotations

from typing import Any

import pytest
from support.registries.conditions import MATCHERS, PACKAGES, SET_MATCHERS, parse

from attnreg.language.matchers import Requirement


@pytest.mark.parametrize(("facet", "matcher", "text", "accepted", "refused"), MATCHERS)
def test_matchers_of_one_value(facet: str, matcher: str, text: str, accepted: list[Any], refused: list[Any]) -> None:
    parsed, problems = parse(f"{{{facet}: {matcher}}}")
    assert problems == []
    assert parsed.describe() == f"{facet} {text}"
    assert [v for v in (*accepted, *refused) if parsed.holds({facet: v})] == accepted


@pytest.mark.parametrize(
    ("facet", "matcher", "text"),
    [
        ("head_size", "64", "64"),
        ("head_size", "[64, 128]", "64 or 128"),
        ("head_size", "[64, {min: 128, max: 256}, {multiple_of: 512}]", "64, 128 to 256 or multiples of 512"),
        ("head_size", "{multiple_of: 8, not: 64}", "multiples of 8, not 64"),
        ("arch", "[g9, 'g10*']", "g9, g10 or g100"),
        ("kv_dtype", "[null, auto]", "not given or auto"),
        ("kv_dtype", "{not: [fp8, auto]}", "not fp8, auto"),
        ("kv_dtype", "{not: [null, auto, fp8]}", "given and not auto, fp8"),
    ],
)
def test_at_the_end_of_a_sentence_the_last_of_several_follows_an_or(facet: str, matcher: str, text: str) -> None:
    parsed, problems = parse(f"{{{facet}: {matcher}}}")
    assert problems == []
    assert parsed.clauses[0].matcher.in_words == text


@pytest.mark.parametrize(("facet", "matcher", "text", "accepted", "refused"), SET_MATCHERS)
def test_matchers_of_sets(
    facet: str, matcher: str, text: str, accepted: list[set[str]], refused: list[set[str]]
) -> None:
    parsed, problems = parse(f"{{{facet}: {matcher}}}")
    assert problems == []
    assert parsed.describe() == text
    assert [v for v in (*accepted, *refused) if parsed.holds({facet: frozenset(v)})] == accepted


@pytest.mark.parametrize(
    ("matcher", "text", "accepted"),
    [
        ("[lib]", "package lib", "any; lib; lib 2; lib ?; lib x; both"),
        ("lib", "package lib", "any; lib; lib 2; lib ?; lib x; both"),
        # a package without a version is taken at its word, a version that is none is not
        ("['lib>=2']", "package lib>=2", "any; lib 2; lib ?; both"),
        ("[lib >= 2 , flash-attn]", "package flash-attn and package lib>= 2", "any; both"),
        ("['flash-attn>=2.6,<2.7']", "package flash-attn>=2.6,<2.7", "any; flash"),
        ("['flash-attn==2.7.*']", "package flash-attn==2.7.*", "any; both"),
        ("['flash-attn~=2.5']", "package flash-attn~=2.5", "any; both; flash"),
    ],
)
def test_matchers_of_packages(matcher: str, text: str, accepted: str) -> None:
    parsed, problems = parse(f"{{packages: {matcher}}}")
    assert problems == []
    assert parsed.describe() == text
    assert "; ".join(name for name, installed in PACKAGES.items() if parsed.holds({"packages": installed})) == accepted


def test_a_pre_release_counts_as_a_version() -> None:
    assert Requirement("lib", ">=2").met_by((("lib", "2.1.dev3"),))
    assert not Requirement("lib", ">=2").met_by((("lib", "2.0.dev3"),))


@pytest.mark.parametrize(
    ("versions", "met"),
    [
        ("==2.8.3+cu12", "2.8.3+cu12"),
        ("!=2.8.3+cu12", "2.0 2.8.3 2.8.3+cu13 2.10 1!2.0"),
        ("==2.8.3", "2.8.3 2.8.3+cu12 2.8.3+cu13"),
        (">=1!2.0", "1!2.0"),
        (">= 2.8 , <1!0", "2.8.3 2.8.3+cu12 2.8.3+cu13 2.10"),
        ("~=2.8", "2.8.3 2.8.3+cu12 2.8.3+cu13 2.10"),
        ("==2.8.*", "2.8.3 2.8.3+cu12 2.8.3+cu13"),
        ("<2.8.3rc1", "2.0"),
    ],
)
def test_versions_are_those_of_pep_440(versions: str, met: str) -> None:
    parsed, problems = parse(f"{{packages: ['lib{versions}']}}")
    assert problems == []
    known = ("2.0", "2.8.3", "2.8.3+cu12", "2.8.3+cu13", "2.10", "1!2.0")
    assert " ".join(v for v in known if parsed.holds({"packages": (("lib", v),)})) == met


def test_without_covers_features_and_flags() -> None:
    parsed, problems = parse("{without: [sinks, fast]}")
    assert problems == []
    assert parsed.describe() == "without fast and without sinks"
    assert parsed.facets == ("flags", "features")
    points = [(f, g) for f in (set(), {"sinks"}, {"alibi"}) for g in (set(), {"fast"}, {"slow"})]
    held = [(f, g) for f, g in points if parsed.holds({"features": frozenset(f), "flags": frozenset(g)})]
    assert held == [(set(), set()), (set(), {"slow"}), ({"alibi"}, set()), ({"alibi"}, {"slow"})]


@pytest.mark.parametrize(
    ("text", "words", "facets"),
    [
        ("{}", "always", ()),
        ("{arch: g9, role: draft}", "arch g9 and role draft", ("arch", "role")),
        (
            "{any: [{arch: g9}, {role: draft, eager: true}]}",
            "(arch g9 or role draft and eager true)",
            "arch role eager",
        ),
        (
            "{role: draft, not: {arch: g9, eager: true}}",
            "role draft and not (arch g9 and eager true)",
            "role arch eager",
        ),
        ("{not: {any: [{arch: g9}, {arch: g10}]}}", "not ((arch g9 or arch g10))", ("arch",)),
    ],
)
def test_conditions_in_words(text: str, words: str, facets: Any) -> None:
    parsed, problems = parse(text)
    assert problems == []
    assert parsed.describe() == words
    assert parsed.facets == (tuple(facets.split()) if isinstance(facets, str) else facets)


def test_every_clause_knows_its_place() -> None:
    parsed, _ = parse("arch: g9\nany:\n  - {role: draft}\n  - {without: [sinks]}\n")
    assert [str(clause.where) for clause in parsed.walk()] == ["c.yaml:1:1", "c.yaml:3:6", "c.yaml:4:6"]


GPU = {"arch": "g10", "flags": frozenset({"fast"})}
# a condition -> whether it is decided on a g10 with the flag `fast`, what refutes it, and what is left of it
PARTLY_KNOWN: list[tuple[str, bool | None, str, str]] = [
    ("{arch: g10, flags: [fast]}", True, "always", "always"),
    ("{arch: g9, head_size: 64}", False, "arch g9", "head_size 64"),
    ("{arch: {min: g10}, head_size: 64}", None, "always", "head_size 64"),
    ("{without: [fast], role: draft}", False, "without fast", "role draft"),
    ("{any: [{arch: g10}, {head_size: 64}]}", True, "always", "always"),
    ("{any: [{arch: g9}, {arch: g10, head_size: 64}, {role: draft}]}", None, "always", "(head_size 64 or role draft)"),
    ("{any: [{arch: g9}, {flags: [slow]}]}", False, "(arch g9 or flag slow)", "()"),
    ("{not: {arch: g10}}", False, "not (arch g10)", "always"),
    ("{not: {arch: g9, head_size: 64}}", True, "always", "always"),
    ("{not: {arch: g10, head_size: 64}}", None, "always", "not (head_size 64)"),
]


@pytest.mark.parametrize(("text", "decided", "refuted", "rest"), PARTLY_KNOWN, ids=[p[0] for p in PARTLY_KNOWN])
def test_what_a_condition_says_where_some_facets_are_known(
    text: str, decided: bool | None, refuted: str, rest: str
) -> None:
    whole, problems = parse(text)
    assert problems == []
    assert whole.decided(GPU) is decided
    assert whole.refuted(GPU).describe() == refuted
    assert whole.remainder(GPU).describe() == rest
