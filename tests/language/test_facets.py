"""What is known of the facets that every request and platform has: that it is what they themselves accept."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.registries import tiny

from attnreg import AttentionRequest, Platform, Registry, RequestError, select
from attnreg.language.facets import CORE, LINKED, MAIN_FACETS, PROVEN, CoreFacet, options, ordinary, partner_of

ORDINARY = {name: facet.ordinary for name, facet in CORE.items()}
REQUEST = {name: value for name, value in ORDINARY.items() if CORE[name].of == "request"}
PLATFORM = {name: value for name, value in ORDINARY.items() if CORE[name].of == "platform"}
OTHER: dict[str, Any] = {
    "integer": 2,
    "word": "other",
    "text": "other",
    "arch": "sm80",
    "words": {"x"},
    "packages": ["x"],
}


def made(changes: dict[str, Any]) -> dict[str, Any]:
    """The facets of an ordinary configuration with some changes, as the request and the platform keep them."""
    request = AttentionRequest(**REQUEST | {k: v for k, v in changes.items() if k in REQUEST})
    platform = Platform(**PLATFORM | {k: v for k, v in changes.items() if k in PLATFORM})
    return request.facts() | platform.facts()


def test_they_are_the_facets_of_a_request_and_a_platform() -> None:
    assert made({}).keys() == CORE.keys()
    assert set(PROVEN) | set(MAIN_FACETS) | {facet for pair in LINKED for facet in pair[:2]} <= CORE.keys()


def test_an_ordinary_configuration_is_one_and_has_a_backend(default: Registry) -> None:
    assert made({}) == ORDINARY
    assert AttentionRequest(**REQUEST) == AttentionRequest(head_size=ordinary("head_size"))
    assert select(AttentionRequest(**REQUEST), Platform(**PLATFORM), registry=default).backend is not None
    assert ordinary("run_kv_dtype") is None


@pytest.mark.parametrize("facet", CORE.values(), ids=list(CORE))
def test_what_is_required_and_the_least_are_what_the_fields_take(facet: CoreFacet) -> None:
    if facet.required:
        with pytest.raises(RequestError, match=f"^{facet.name} is None"):
            made({facet.name: None})
    else:
        assert made({facet.name: None})[facet.name] is None
    assert made({facet.name: OTHER[facet.kinds[0]]})[facet.name] != facet.ordinary
    if facet.kinds == ("integer",):
        assert made({"num_kv_heads": None, facet.name: facet.least})[facet.name] == facet.least
        with pytest.raises(RequestError, match=f"expected at least {facet.least}$"):
            made({facet.name: facet.least - 1})


@pytest.mark.parametrize("name", ["default", "vllm-0.33.0"])
def test_vocabularies_declare_each_as_it_is(name: str, default: Registry) -> None:
    import attnreg

    facets = (default if name == "default" else attnreg.load_registry(name)).vocabulary.facets
    for facet in CORE.values():
        assert (facets[facet.name].of, facets[facet.name].kind in facet.kinds) == (facet.of, True)


def test_options_are_those_that_the_command_has() -> None:
    named = [facet.name for kind in ("word", "integer") for facet in options(kind)]
    assert len(named) == len(set(named))
    single = {name for name in REQUEST if name not in ("features", "model")}
    assert set(named) == single


@given(first=st.integers(1, 300), second=st.integers(1, 300), link=st.sampled_from(LINKED))
@example(64, 64, LINKED[0])
@example(12, 4, LINKED[1])
@example(4, 12, LINKED[1])
def test_linked_facets_fit_where_a_request_takes_both(first: int, second: int, link: tuple[Any, ...]) -> None:
    a, b, fits = link
    assert (partner_of(a), partner_of(b)) == (b, a)
    try:
        facts = made({a: first, b: second})
    except RequestError:
        assert not fits(first, second)
    else:
        assert fits(first, second) == ((facts[a], facts[b]) == (first, second))


def test_facets_without_a_link_have_no_partner() -> None:
    assert partner_of("block_size") is None
    assert partner_of("run_kv_dtype") is None


def test_words_keep_the_order_of_the_data(default: Registry) -> None:
    vocabulary = default.vocabulary
    assert vocabulary.facets["kv_dtype"].words == tuple(vocabulary.words["kv_dtypes"])
    assert vocabulary.facets["features"].words == tuple(vocabulary.features)
    assert vocabulary.facets["arch"].words == tuple(vocabulary.architectures)
    assert vocabulary.words_of("kv_dtype") is vocabulary.words["kv_dtypes"]
    assert vocabulary.words_of("flags") is vocabulary.flags
    assert vocabulary.words_of("head_size") == {}
    for facet in vocabulary.facets.values():
        assert facet.known == set(facet.words)


def test_a_derived_facet_has_its_values_in_the_order_of_its_cases() -> None:
    cases = [{"when": {"arch": "g1"}, "value": True}, {"when": {"arch": "g2"}, "value": 1}, {"value": "rest"}]
    derived = {"kind": {"legend": "l", "cases": [*cases[:2], {"when": {"role": "draft"}, "value": True}, cases[2]]}}
    registry = tiny.load({"A": tiny.row()}, vocabulary={"derived": derived})
    assert list(map(repr, registry.vocabulary.facets["kind"].words)) == ["True", "1", "'rest'"]
    moved = dataclasses.replace(registry.vocabulary.facets["kind"], words=())
    assert moved.known == frozenset()
