"""What selection says where no backend accepts a request, and where a request cannot be."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from typing import Any

import pytest
from support.registries import tiny
from support.registries.asking import BASE, at
from support.rows.words import features

from attnreg import AttentionRequest, NoBackendError, Platform, Registry, RequestError, select
from attnreg.selection import selector
from attnreg.selection.refusal import alternatives, full_dict
from attnreg.selection.selector import evaluate


def test_the_error_is_the_whole_trace_with_the_nearest_and_the_alternatives() -> None:
    rows = {
        "A": tiny.row(capabilities={"head_sizes": {"max": 64}, "kv_dtypes": "auto"}),
        "B": tiny.row(capabilities={"head_sizes": [64, 128]}, requires={"flags": ["fast"]}),
        "LATE": tiny.row(only_on_request="it is slow"),
    }
    registry = tiny.load(rows, {"gpu": [{"name": "all", "order": ["A", "B"]}]})
    request = AttentionRequest(head_size=100, kv_dtype="fp8")
    with pytest.raises(NoBackendError) as caught:
        select(request, Platform(platform="gpu", arch="g1"), registry)
    assert _without_lines(caught.value) == (
        "No backend accepts this request on gpu g1 (order `gpu/all`, priorities.yaml):\n"
        "  A  kv_dtype is fp8; supported: auto  [backends.yaml]\n"
        "     head_size is 100; supported: up to 64  [backends.yaml]\n"
        "  B  flag fast is off  [backends.yaml]\n"
        "     head_size is 100; supported: 64, 128  [backends.yaml]\n"
        "  help: would accept it if asked for by name: LATE"
    )
    assert caught.value.alternatives == ("LATE",)
    with pytest.raises(NoBackendError) as caught:
        select(
            dataclasses.replace(request, features=frozenset({"sinks"})), Platform(platform="gpu", arch="g1"), registry
        )
    assert str(caught.value).splitlines()[-1] == "  help: the nearest is A, with 3 reasons against it"
    assert caught.value.selection.nearest is caught.value.selection.candidates[0]
    with pytest.raises(NoBackendError) as caught:
        select(
            dataclasses.replace(request, features=frozenset({"sinks"})),
            Platform(platform="gpu", arch="g1"),
            registry,
            "LATE",
        )
    assert str(caught.value).splitlines()[-1] == "  help: no other backend serves it either"
    with pytest.raises(NoBackendError) as caught:
        select(request, Platform(platform="npu", arch="n1"), registry)
    assert str(caught.value) == f"The answer is not known on npu n1: {registry.name} says nothing of npu"


def test_a_refusal_looks_for_alternatives_only_when_it_is_read(
    default: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    judge = selector.evaluate_anew
    monkeypatch.setattr(selector, "evaluate_anew", lambda *args: asked.append(args[3]) or judge(*args))
    registry = dataclasses.replace(default)
    request = AttentionRequest(**BASE, **features("sinks"))
    with pytest.raises(NoBackendError) as caught:
        select(request, at("sm120", default), registry, "FLASH_ATTN")
    assert asked == ["FLASH_ATTN"]
    assert "would accept it: FLASHINFER, TRITON_ATTN, FLEX_ATTENTION" in str(caught.value)
    assert len(asked) > 3
    # and once
    refused, seen = caught.value.selection, len(asked)
    assert caught.value.alternatives == ("FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
    assert alternatives(refused) == ("FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
    assert full_dict(refused)["alternatives"] == ["FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"]
    assert len(asked) == seen
    assert alternatives(select(request, at("sm90", default), default)) == ()


def test_sending_a_refusal_elsewhere_selects_nothing(default: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = evaluate(AttentionRequest(**BASE, **features("sinks")), at("sm120", default), default, "FLASH_ATTN")
    error = NoBackendError(refused)
    monkeypatch.setattr(selector, "evaluate_anew", None)
    assert pickle.loads(pickle.dumps(refused)) == copy.deepcopy(refused) == refused
    assert pickle.loads(pickle.dumps(error)).selection == refused
    monkeypatch.undo()
    # what was read travels with the error, as it may be another answer elsewhere
    assert error.alternatives == ("FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
    monkeypatch.setattr(selector, "evaluate_anew", None)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def _without_lines(error: NoBackendError) -> str:
    return re.sub(r"\.yaml:\d+", ".yaml", str(error))


CONDITIONS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("flags on", {"flags": ["fast"]}, ["flag fast is off"]),
    ("flags off", {"without": ["slow"]}, ["flag slow is on; needs it off"]),
    ("flags only", {"flags": {"only": ["fast"]}}, ["flag slow is on; needs it off"]),
    ("any flag", {"flags": {"any": ["fast", "faster"]}}, ["needs flag fast or flag faster"]),
    ("any feature", {"features": {"any": ["alibi", "lse"]}}, ["only for requests with alibi or lse"]),
    ("features on", {"features": ["alibi"]}, ["only for requests with alibi"]),
    ("features off", {"without": ["sinks"]}, ["not for requests with sinks"]),
    ("features only", {"features": {"only": ["alibi"]}}, ["not for requests with sinks"]),
    ("a package", {"packages": ["lib"]}, ["package lib is not installed"]),
    ("a version of a package", {"packages": ["lib>=2"]}, ["package lib is not installed; needs >=2"]),
    ("an old package", {"packages": ["old>=2"]}, ["package old is version 1.0; needs >=2"]),
    ("a package of no known version", {"packages": ["odd>=2"]}, ["package odd is version unknown; needs >=2"]),
    ("a value", {"head_size": {"min": 200}}, ["head_size is 128; needs 200 or more"]),
    ("a value that is not given", {"block_size": {"min": 16}}, ["block_size is not given; needs 16 or more"]),
    ("a boolean", {"eager": True}, ["eager is false; needs true"]),
    ("a derived value", {"quantized": True}, ["quantized is false (vocabulary.yaml:*); needs true"]),
    (
        "one of two",
        {"any": [{"arch": "g2"}, {"flags": ["fast"]}]},
        ["needs arch g2 or flag fast"],
    ),
    ("none of", {"not": {"arch": "g1"}}, ["not for arch g1"]),
    ("several", {"arch": "g2", "flags": ["fast"]}, ["arch is g1; needs g2", "flag fast is off"]),
]


@pytest.mark.parametrize(("condition", "reasons"), [c[1:] for c in CONDITIONS], ids=[c[0] for c in CONDITIONS])
@pytest.mark.parametrize("place", ["requires", "when", "if"])
def test_an_unmet_condition_is_said_part_by_part(place: str, condition: dict[str, Any], reasons: list[str]) -> None:
    variants = [{"name": "V", "when": condition}] if place == "when" else []
    backend = tiny.row(
        requires=condition if place == "requires" else None, variants=variants, capabilities={"features": ["sinks"]}
    )
    entry = {"backend": "A", "if": condition} if place == "if" else "A"
    vocabulary = {
        "flags": {"fast": "l", "faster": "l", "slow": "l"},
        "features": {"sinks": "l", "alibi": "l", "lse": "l"},
        "packages": {"lib": {"legend": "l"}, "old": {"legend": "l"}, "odd": {"legend": "l"}},
    }
    registry = tiny.load({"A": backend}, {"gpu": [{"name": "all", "order": [entry]}]}, vocabulary=vocabulary)
    packages = {"old": "1.0", "odd": "unknown"}
    platform = Platform(platform="gpu", arch="g1", flags={"slow"}, packages=packages)
    request = AttentionRequest(head_size=128, features={"sinks"}, extra={"eager": False})
    candidate = evaluate(request, platform, registry).candidates[0]
    assert [re.sub(r"yaml:\d+", "yaml:*", r.text) for r in candidate.reasons] == reasons
    assert {r.kind for r in candidate.reasons} == {{"if": "order", "when": "variant"}.get(place, place)}


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"kv_dtype": "fp8_e4m4"}, "kv_dtype names 'fp8_e4m4', which {} does not know; did you mean `fp8_e4m3`?"),
    ({"dtype": "bf16"}, "dtype names 'bf16', which {} does not know; "),
    ({"attention": "mha2"}, "attention names 'mha2', which {} does not know; did you mean `mha`?"),
    ({"attn_type": "decodr"}, "attn_type names 'decodr', which {} does not know; did you mean `decoder`?"),
    ({"role": "targt"}, "role names 'targt', which {} does not know; did you mean `target`?"),
    ({"phase": "prefil"}, "phase names 'prefil', which {} does not know; did you mean `prefill`?"),
    (features("sink", "alibi"), "features names 'sink', which {} does not know; did you mean `sinks`?"),
    ({"extra": {"run_kv_dtype": "fp8"}}, "run_kv_dtype is no facet of {}; did you mean `kv_dtype`?"),
    ({"extra": {"arch": "sm90"}}, "extra names 'arch', which belongs to the platform and cannot be given"),
    (
        {"extra": {"kv_quantized": True}},
        (
            "extra names 'kv_quantized', which is derived from others and cannot be given; "
            "give what it follows from: kv_dtype"
        ),
    ),
]


@pytest.mark.parametrize(("change", "message"), UNKNOWN, ids=[case[1][:30] for case in UNKNOWN])
def test_unknown_words_are_named_with_the_nearest(default: Registry, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        select(AttentionRequest(**{**BASE, **change}), at("sm90", default), default)
    assert str(caught.value).startswith(message.format(default.title))


WRONG_PLATFORMS: list[tuple[dict[str, Any], str]] = [
    ({"platform": "cuda", "arch": "gfx942"}, "arch is gfx942, which belongs to platform rocm, not cuda"),
    ({"platform": "cuda", "arch": "sm91"}, "arch names 'sm91', which {} does not know; did you mean `sm90`"),
    ({"platform": "rcom", "arch": "gfx942"}, "platform names 'rcom', which {} does not know; did you mean `rocm`?"),
    (
        {"platform": "rocm", "arch": "gfx942", "flags": {"aitr"}},
        "flags names 'aitr', which {} does not know; did you mean `aiter`?",
    ),
]


@pytest.mark.parametrize(("fields", "message"), WRONG_PLATFORMS, ids=[case[1][:30] for case in WRONG_PLATFORMS])
def test_a_platform_that_cannot_be(default: Registry, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        select(AttentionRequest(**BASE), Platform(**fields), default)
    assert str(caught.value).startswith(message.format(default.title))


@pytest.mark.parametrize("name", ["FLASH_ATN", "", "flash_attn"])
def test_an_unknown_backend(default: Registry, name: str) -> None:
    with pytest.raises(RequestError, match=f"^unknown backend '{name}'; "):
        select(AttentionRequest(**BASE), at("sm90", default), default, name)


EXTRA: list[tuple[Any, Any, str | None]] = [
    ("eager", True, None),
    ("eager", 1, None),
    ("eager", "yes", "eager names 'yes', which {} does not know; known: False, True"),
    ("ranks", 4, None),
    ("ranks", 0, None),
    ("ranks", -1, "ranks is -1; expected an integer of at least 0"),
    ("ranks", "4", "ranks is '4'; expected an integer of at least 0"),
    ("eager", None, None),
]


@pytest.mark.parametrize(("facet", "value", "message"), EXTRA, ids=str)
def test_facets_that_a_registry_declares_are_checked(facet: str, value: Any, message: str | None) -> None:
    # each value decides something, so that one of the wrong type would go wrong there
    rules = [{"when": {"ranks": {"min": 9}}, "reject": "r"}, {"when": {"eager": False}, "reject": "e"}]
    registry = tiny.load({"A": tiny.row(rules=rules)})
    request = AttentionRequest(head_size=1, extra={facet: value})
    if message is None:
        assert select(request, Platform(platform="gpu", arch="g1"), registry).backend
    else:
        with pytest.raises(RequestError) as caught:
            select(request, Platform(platform="gpu", arch="g1"), registry)
        assert str(caught.value) == message.format(registry.title)
