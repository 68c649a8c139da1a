"""AttentionRequest: what it refuses, word for word; equality, hashing, pickling, its dictionary form, its expansion."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnreg import AttentionRequest, RequestError
from attnreg.request import features_of

WORD = "expected a word of the registry's vocabulary"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"head_size": None}, "head_size is None; every request needs one (elements per head, for example 128)"),
    ({"head_size": 0}, "head_size is 0; expected at least 1"),
    ({"head_size": -8}, "head_size is -8; expected at least 1"),
    ({"head_size": 128.0}, "head_size is 128.0; expected an integer of at least 1"),
    ({"head_size": "128"}, "head_size is '128'; expected an integer of at least 1"),
    ({"head_size": True}, "head_size is True; expected an integer of at least 1"),
    ({"block_size": 0}, "block_size is 0; expected at least 1"),
    ({"v_head_dim": -1}, "v_head_dim is -1; expected at least 0"),
    ({"dtype": ""}, f"dtype is ''; {WORD}"),
    ({"dtype": None}, f"dtype is None; {WORD}"),
    ({"kv_dtype": 8}, f"kv_dtype is 8; {WORD}"),
    ({"model": ["gpt_oss"]}, f"model is ['gpt_oss']; {WORD}"),
    ({"features": "sinks"}, "features is 'sinks'; expected a set of words, for example {'sinks'}"),
    ({"features": None}, "features is None; expected a set of words, for example {'sinks'}"),
    ({"features": {"sinks", ""}}, f"features is ''; {WORD}"),
    ({"features": [["sinks"]]}, f"features is ['sinks']; {WORD}"),
    (
        {"num_heads": 6, "num_kv_heads": 4},
        (
            "num_heads is 6 and num_kv_heads is 4; the second must divide the first "
            "(each KV head serves a whole group of query heads)"
        ),
    ),
    (
        {"extra": {"dtype": "float16"}},
        "extra names 'dtype', which is a field of AttentionRequest; pass it by keyword",
    ),
    ({"extra": {"x": 1.5}}, "extra['x'] is 1.5; expected a word, an integer, a boolean or None"),
    ({"extra": {1: "x"}}, f"extra is 1; {WORD}"),
    ({"extra": 5}, "extra is 5; expected a mapping of facets to values"),
    ({"extra": "ab"}, "extra is 'ab'; expected a mapping of facets to values"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[case[1][:40] for case in REFUSED])
def test_what_cannot_be_meant_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        AttentionRequest(**{"head_size": 128, **changes})
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


def test_a_latent_may_lack_its_rotary_or_its_nope_part() -> None:
    request = AttentionRequest(head_size=512, qk_nope_head_dim=256, qk_rope_head_dim=0)
    assert request.qk_rope_head_dim == 0


def test_it_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        AttentionRequest(head_size=128).head_size = 64


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"features": ["sinks", "alibi"]}, {"features": frozenset({"alibi", "sinks"})}),
    ({"features": (w for w in ["sinks", "sinks"])}, {"features": {"sinks"}}),
    ({"extra": {"b": 1, "a": "x"}}, {"extra": (("a", "x"), ("b", 1))}),
    # a value width that does not differ says nothing
    ({"head_size_v": 128}, {}),
]


@pytest.mark.parametrize(("one", "other"), SAME, ids=["a list", "a generator", "pairs", "one width"])
def test_two_ways_to_say_the_same_are_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    a, b = AttentionRequest(head_size=128, **one), AttentionRequest(head_size=128, **other)
    assert a == b
    assert hash(a) == hash(b)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(AttentionRequest) if f.init])
def test_every_field_takes_part_in_equality(field: str) -> None:
    other: dict[str, Any] = {"features": {"sinks"}, "extra": {"x": 1}, "kv_dtype": None, "model": "m"}
    words = ("dtype", "attention", "attn_type", "role", "phase")
    value = other.get(field, "another" if field in words else 7)
    assert AttentionRequest(**{"head_size": 128, field: value}) != AttentionRequest(head_size=128)


def test_hashes_of_another_process_do_not_travel() -> None:
    code = """
import pickle, sys
from attnreg import AttentionRequest, Platform
request = AttentionRequest(head_size=64, features={'sinks'}, extra={'x': 1})
platform = Platform(platform='rocm', arch='gfx942', flags={'aiter'}, packages={'torch': '2.13'})
sys.stdout.buffer.write(pickle.dumps((request, platform, hash(request))))
"""
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    request, platform, hash_there = pickle.loads(done.stdout)
    here = AttentionRequest(head_size=64, features={"sinks"}, extra={"x": 1})
    assert request == here
    assert {request: "found"}[here] == "found"
    assert hash(here) != hash_there, "the seeds agree by chance: this test says nothing"
    assert platform.flags == {"aiter"}
    assert {platform: "found"}[dataclasses.replace(platform)] == "found"


words = st.text("abc_", min_size=1, max_size=4)
sizes = st.none() | st.integers(1, 1 << 31)
requests = st.builds(
    lambda heads, kv_heads, **fields: AttentionRequest(
        num_heads=heads and heads * (kv_heads or 1), num_kv_heads=kv_heads, **fields
    ),
    heads=sizes,
    kv_heads=sizes,
    head_size=st.integers(1, 1 << 40),
    head_size_v=sizes,
    dtype=words,
    kv_dtype=st.none() | words,
    block_size=sizes,
    attention=words,
    attn_type=words,
    role=words,
    phase=words,
    features=st.sets(words, max_size=3),
    qk_rope_head_dim=st.none() | st.integers(0, 9),
    index_topk=sizes,
    model=st.none() | words,
    extra=st.dictionaries(
        words.map("x".__add__), st.none() | words | st.integers(-(2**63) + 1, 2**63 - 1) | st.booleans(), max_size=3
    ),
)


@given(requests)
def test_round_trips(request: AttentionRequest) -> None:
    for copy in (
        AttentionRequest.from_dict(request.to_dict()),
        pickle.loads(pickle.dumps(request)),
        dataclasses.replace(request),
    ):
        assert copy == request
        assert hash(copy) == hash(request)


def test_the_dictionary_holds_what_differs_from_the_defaults() -> None:
    assert AttentionRequest(head_size=128).to_dict() == {"head_size": 128}
    request = AttentionRequest(head_size=64, kv_dtype=None, features={"sinks", "alibi"}, extra={"x": True})
    assert request.to_dict() == {
        "head_size": 64,
        "kv_dtype": None,
        "features": ["alibi", "sinks"],
        "extra": {"x": True},
    }


def test_from_dict_names_what_is_wrong() -> None:
    with pytest.raises(RequestError, match=r"^unknown request field 'head_sise'; known: head_size, num_heads, "):
        AttentionRequest.from_dict({"head_sise": 128})
    with pytest.raises(RequestError, match=r"^head_size is None; every request needs one"):
        AttentionRequest.from_dict({"dtype": "float16"})


def test_facts_hold_every_facet_and_are_the_callers_own() -> None:
    request = AttentionRequest(head_size=128, extra={"x": 1})
    facts = request.facts()
    assert facts["head_size"] == 128
    assert facts["x"] == 1
    assert "extra" not in facts
    facts["head_size"] = 64
    assert request.facts()["head_size"] == 128


EXPANDED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "DeepSeek-V3: keys of 128 + 64, values of 128, a KV head for each query head",
        {"head_size": 576, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_heads": 16},
        {"head_size": 192, "head_size_v": 128, "num_kv_heads": 16},
    ),
    (
        "values as wide as keys are not said twice",
        {"head_size": 576, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128},
        {"head_size": 128, "head_size_v": None, "num_kv_heads": None},
    ),
    ("unknown dimensions leave the width", {"head_size": 576, "num_heads": 8}, {"head_size": 576, "num_kv_heads": 8}),
]


@pytest.mark.parametrize(("fields", "expected"), [case[1:] for case in EXPANDED], ids=[case[0] for case in EXPANDED])
def test_expanded_is_what_prefill_computes(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    latent = AttentionRequest(attention="mla", num_kv_heads=1, features={"lse"}, **fields)
    expanded = latent.expanded()
    assert expanded == dataclasses.replace(latent, phase="prefill", **{"head_size_v": None, **expected})


def test_features_follow_from_what_a_layer_comes_with() -> None:
    assert features_of() == frozenset()
    assert features_of(sliding_window=None, sinks=False, softcap=None, alibi=False) == frozenset()
    # a number of 0 is given; only None and False are not
    assert features_of(sliding_window=0, softcap=0.0, sinks=True) == {"sliding_window", "softcap", "sinks"}
    everything = ("alibi", "mm_prefix", "per_head_quant_scales", "score_bias", "sparse_blocks")
    assert features_of(**dict.fromkeys(everything, 1)) == set(everything)
    assert features_of(causal=False) == {"non_causal"}
    assert features_of(attn_type="encoder_only", causal=False) == frozenset()


def test_features_do_not_look_into_tensors() -> None:
    class Tensor:
        def __bool__(self) -> bool:
            raise AssertionError("a tensor of several elements has no truth value")

        __eq__ = __bool__  # type: ignore[assignment]
        __hash__ = None  # type: ignore[assignment]

    assert features_of(sinks=Tensor(), alibi=Tensor()) == {"sinks", "alibi"}
