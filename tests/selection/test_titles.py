"""What is printed of a question tells it from every other one: requests and platforms that differ, differ in words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.registries import asking
from support.registries.asking import at
from support.suite.examples import examples

from attnreg import AttentionRequest, Platform, Registry, RequestError, load_registry
from attnreg.selection.wording import platform_words, request_words

# an overlay's own facets and words, some of them like words that are printed for something else
OVERLAY = {
    "facets": {
        "tier": {"of": "request", "kind": "word", "words": "tiers", "legend": "A word."},
        "streams": {"of": "request", "kind": "integer", "legend": "A number."},
        "pinned": {"of": "request", "kind": "boolean", "legend": "A truth value."},
        "note": {"of": "request", "kind": "text", "legend": "Any text."},
    },
    "features": {"bidirectional": "Like the phrase of non_causal.", "chunks": "Like another.", "draft": "Like a role."},
    "words": {"tiers": {"gold": "One.", "sinks": "Like a feature."}},
}


@pytest.fixture(scope="module")
def extended() -> Registry:
    return load_registry("default", [{"vocabulary": OVERLAY}])


def values_of(facet: str, registry: Registry) -> st.SearchStrategy[Any]:
    """Any value of a request's facet, as the vocabulary declares it."""
    about = registry.vocabulary.facets[facet]
    text = st.sampled_from(["llama", "", "a · sinks", "a, b", "true", "1"]) | st.text(max_size=5)
    return {
        "word": st.sampled_from([None, *about.words]),
        "integer": st.none() | st.integers(1, 600),
        "boolean": st.sampled_from([None, True, False]),
        "text": st.none() | text,
        "words": st.sets(st.sampled_from(about.words or ("",)), max_size=3),
    }[about.kind]


def changed(request: AttentionRequest, facet: str, value: Any) -> AttentionRequest:
    fields = {name: getattr(request, name) for name, f in AttentionRequest.__dataclass_fields__.items() if f.init}
    change = {facet: value} if facet in fields else {"extra": {**dict(request.extra), facet: value}}
    return AttentionRequest(**{**fields, **change})


@given(data=st.data())
@examples(300)
def test_requests_that_differ_in_any_facet_differ_in_words(extended: Registry, data: st.DataObject) -> None:
    names = [name for name, facet in extended.vocabulary.facets.items() if facet.of == "request"]
    assert {"head_size_v", "index_topk", "block_size", "cache_layout", "tier", "note"} <= set(names)
    one = data.draw(asking.requests(extended))
    facet = data.draw(st.sampled_from(names))
    try:
        one = changed(one, facet, data.draw(values_of(facet, extended)))
        other = changed(one, facet, data.draw(values_of(facet, extended)))
    except RequestError:
        assume(False)
    titles = " · ".join(request_words(one)), " · ".join(request_words(other))
    assert (titles[0] == titles[1]) == (one == other)


@given(data=st.data())
@examples(200)
def test_requests_drawn_apart_have_the_same_words_only_if_they_are_equal(
    extended: Registry, data: st.DataObject
) -> None:
    one, other = (data.draw(asking.requests(extended)) for _ in range(2))
    assert (request_words(one) == request_words(other)) == (one == other)


@given(data=st.data())
@examples(200)
def test_platforms_that_differ_differ_in_words(default: Registry, data: st.DataObject) -> None:
    one, other = (data.draw(asking.platforms(default)) for _ in range(2))
    flags, packages = (data.draw(st.sampled_from([one, other])) for _ in range(2))
    near = Platform(platform=one.platform, arch=one.arch, flags=flags.flags, packages=packages.packages)
    for second in (other, near):
        titles = {" · ".join(platform_words([p], default.vocabulary)) for p in (one, second)}
        assert len(titles) == len({one, second})


def test_packages_say_whose_they_are(default: Registry) -> None:
    bare = Platform(platform="cpu", arch="aarch64", packages=())
    some = Platform(platform="cpu", arch="aarch64", packages={"flash-attn": "2.8.1", "triton": ""})  # type: ignore[arg-type]
    any_ = Platform(platform="cpu", arch="aarch64")

    def words(platform: Platform, **options: bool) -> str:
        return platform_words([platform], default.vocabulary, **options)[-1]

    assert words(any_) == "every package assumed"
    assert (words(some), words(bare)) == ("only packages flash-attn==2.8.1, triton", "no package")
    assert words(some, installed=True) == "packages as installed here: flash-attn==2.8.1, triton"
    assert words(bare, installed=True) == "packages as installed here: none"


PLACES = [
    (["gfx942"], {}, "ROCm gfx942 (MI300X, …)"),
    (["gfx942", "gfx950"], {}, "ROCm gfx942 (MI300X, …), gfx950 (MI350X, …)"),
    (["sm90", "gfx942"], {}, "CUDA sm90 (H100, …) and ROCm gfx942 (MI300X, …)"),
    (["xe_hpc", "xe2"], {}, "XPU, every architecture"),
    (["gfx942"], {"here": True}, "this machine, ROCm gfx942 (MI300X, …)"),
]


@pytest.mark.parametrize(("archs", "options", "words"), PLACES, ids=[p[2] for p in PLACES])
def test_platforms_are_named_with_all_their_architectures(
    default: Registry, archs: list[str], options: dict[str, bool], words: str
) -> None:
    platforms = [at(arch, default) for arch in archs]
    assert platform_words(platforms, default.vocabulary, **options) == [words, "every package assumed"]


def test_flags_are_named(default: Registry) -> None:
    assert platform_words([at("gfx942 +aiter", default)], default.vocabulary)[1] == "flag aiter"
    two = [at("gfx942 +aiter_mha +aiter", default), at("gfx950 +aiter_mha +aiter", default)]
    assert platform_words(two, default.vocabulary)[1] == "flags aiter, aiter_mha"
    mixed = platform_words([at("gfx942 +aiter", default), at("gfx950", default)], default.vocabulary)
    assert mixed == [
        *("ROCm gfx942 (MI300X, …)", "flag aiter", "every package assumed"),
        *("ROCm gfx950 (MI350X, …)", "every package assumed"),
    ]
