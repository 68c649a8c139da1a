"""What would make a candidate win: exact texts for a few, and for any request that the change does what it says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.registries import asking, tiny
from support.registries.asking import BASE, MLA, at, named
from support.suite.examples import examples

from attnreg import AttentionRequest, Platform, Registry, RequestError, Selection, load_registry
from attnreg.selection.remedies import Change, Remedy, remedy
from attnreg.selection.selector import evaluate

GPT_OSS = {"head_size": 64, "num_heads": 64, "num_kv_heads": 8, "features": frozenset({"sinks", "sliding_window"})}


def remedies(selection: Selection) -> dict[str, str | None]:
    found = {c.name: remedy(selection, c) for c in selection.candidates if c is not selection.chosen and c.reasons}
    return {name: answer.text if answer else None for name, answer in found.items()}


# where, change to the base request, candidate, what would make it win
TEXTS: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("gfx942", GPT_OSS, "ROCM_ATTN", "with --backend ROCM_ATTN"),
    ("gfx942", GPT_OSS, "ROCM_AITER_FA", "with --flag aiter --flag aiter_mha"),
    ("gfx942", GPT_OSS, "ROCM_AITER_UNIFIED_ATTN", "with --flag aiter"),
    ("gfx942", GPT_OSS, "TURBOQUANT", "with --kv-dtype turboquant_k8v4"),
    ("gfx90a", GPT_OSS, "ROCM_AITER_UNIFIED_ATTN", "on gfx942, with --flag aiter"),
    ("gfx942", {}, "ROCM_AITER_FA", "with --flag aiter --flag aiter_mha"),
    # aiter's kernels still rank higher
    ("gfx942 +aiter", {"kv_dtype": "fp8_e5m2"}, "ROCM_AITER_UNIFIED_ATTN", "with --kv-dtype auto"),
    ("gfx942 -triton", {}, "ROCM_ATTN", "with package triton>=3.6"),
    ("sm90", {"head_size": 100}, "FLASH_ATTN", "for head_size 104"),
    ("sm90", {"head_size": 100}, "FLASHINFER", "for head_size 128, with --backend FLASHINFER"),
    ("sm75", {}, "FLASH_ATTN", "on sm80"),
    ("sm80", {**MLA, "kv_dtype": "int8_per_token_head"}, "TRITON_MLA", "with --kv-dtype auto"),
    # the nearest KV dtypes are FLASH_ATTN's too, which ranks higher
    ("sm90", {"kv_dtype": "int8_per_token_head"}, "FLASHINFER", "with --kv-dtype float16"),
    (
        "sm90 -flash-attn-3 -flash-attn-4 -kernels -vllm",
        {"dtype": "float16"},
        "FLASH_ATTN",
        "with package flash-attn-3",
    ),
    ("xe2", {"block_size": 16}, "FLASH_ATTN", "with --block-size 64"),
    ("gfx942 +aiter +aiter_mla", {**MLA, "num_heads": 12}, "ROCM_AITER_MLA", "for num_heads 16"),
    ("sm100", {**MLA, "qk_nope_head_dim": 96}, "FLASHINFER_MLA", "with --qk-nope-head-dim 128"),
    # between the request and the one that is served lie requests whose order does not name the backend
    (
        "x86_64",
        {"attention": "mla", "head_size": 32, "num_kv_heads": None},
        "CPU_MLA",
        "for head_size 576",
    ),
]


@pytest.mark.parametrize(("where", "change", "name", "text"), TEXTS, ids=[f"{t[0]}: {t[2]} {t[3]}" for t in TEXTS])
def test_texts(default: Registry, where: str, change: dict[str, Any], name: str, text: str | None) -> None:
    selection = evaluate(AttentionRequest(**{**BASE, **change}), at(where, default), default)
    assert remedies(selection)[name] == text


def holds(answer: Remedy, selection: Selection, name: str) -> bool:
    """Whether a backend or variant is chosen after the changes, asked for by name if the remedy says so."""
    request, platform = selection.request, selection.platform
    try:
        for change in answer.changes:
            request, platform = change.apply(request, platform)
        after = evaluate(request, platform, selection.registry, answer.by_name or selection.requested)
    except RequestError:
        return False
    return after.chosen is not None and not after.fails and name in (after.chosen.name, after.chosen.title)


@pytest.mark.slow(reason="evaluates every remedy")
@given(data=st.data())
@examples(120)
def test_a_remedy_does_what_it_says_and_no_part_of_it_is_idle(default: Registry, data: st.DataObject) -> None:
    request, platform = data.draw(asking.requests(default)), data.draw(asking.platforms(default))
    backend = data.draw(st.none() | st.sampled_from(sorted(default.backends)))
    selection = evaluate(request, platform, default, backend)
    for candidate in selection.candidates:
        if candidate.reasons and (answer := remedy(selection, candidate)) is not None:
            name = named(selection, candidate)
            assert holds(answer, selection, name)
            if answer.by_name:
                assert not holds(dataclasses.replace(answer, by_name=None), selection, name)
            for change in answer.changes:
                rest = tuple(c for c in answer.changes if c is not change)
                assert not holds(dataclasses.replace(answer, changes=rest), selection, name)


def test_a_variant_that_an_order_names_is_mended_for_itself(default: Registry) -> None:
    features = frozenset({"adaptive_verification", "alibi", "asymmetric_window"})
    request = AttentionRequest(head_size=32, dtype="bfloat16", role="draft", phase="prefill", features=features)
    selection = evaluate(request, at("sm90", default), default)
    answers = {c.title: remedy(selection, c) for c in selection.candidates if c.name == "FLASH_ATTN"}
    assert {title: answer.text for title, answer in answers.items() if answer} == {
        "FLASH_ATTN/FA3": "without alibi, asymmetric_window",
        "FLASH_ATTN/FA2": "without asymmetric_window",
    }


def test_what_one_variant_lacks_is_not_asked_for_where_another_is_chosen(default: Registry) -> None:
    """The first reason is flash-attn, which FA2 needs; with another head FA4 is chosen, which is installed."""
    request = AttentionRequest(
        head_size=32, dtype="bfloat16", attention="mla", attn_type="decoder", role="draft", phase="prefill",
        qk_nope_head_dim=0, kv_dtype=None,
    )  # fmt: skip
    platform = Platform(platform="cuda", arch="sm100", packages={"flash-attn-4": ""})
    found = remedies(evaluate(request, platform, default))
    assert found["FLASH_ATTN_PREFILL"] == "with --qk-nope-head-dim 64"


def test_usual_requests_always_have_a_way(default: Registry) -> None:
    for arch in default.vocabulary.architectures:
        selection = evaluate(AttentionRequest(**GPT_OSS), at(arch, default), default)
        assert all(text for text in remedies(selection).values()), arch


ROW = {
    "any": tiny.row(requires={"any": [{"flags": ["fast"]}, {"arch": "g2"}]}),
    "none": tiny.row(requires={"not": {"arch": "g1"}}),
    "flag off": tiny.row(requires={"without": ["slow"]}),
    "feature off": tiny.row(capabilities={"features": ["sinks"]}, requires={"without": ["sinks"]}),
    "derived": tiny.row(requires={"quantized": True}),
    "old package": tiny.row(requires={"packages": ["lib>=2,<3"]}),
    "boolean": tiny.row(requires={"eager": True}),
    "integer": tiny.row(requires={"ranks": {"multiple_of": 4, "min": 10}}),
    "rule": tiny.row(rules=[{"when": {"quantized": False, "arch": "g1"}, "reject": "r"}]),
    "text": tiny.row(requires={"model": "gpt"}),
    "denied": tiny.row(),
}
MENDED: list[tuple[str, str | None]] = [
    ("any", "with --flag fast"),
    ("none", "on g2"),
    ("flag off", "without flag slow"),
    ("feature off", "without sinks"),
    ("derived", "with --kv-dtype fp8"),
    ("old package", "with package lib>=2,<3"),
    ("boolean", "with --set eager=true"),
    ("integer", "with --set ranks=12"),
    ("rule", "with --kv-dtype fp8"),
    # a model is what it is, and what an overlay denies stays denied
    ("text", None),
    ("denied", None),
]


@pytest.mark.parametrize(("case", "text"), MENDED)
def test_every_kind_of_reason(case: str, text: str | None) -> None:
    overlays = [{"choices": [{"deny": "A"}]}] if case == "denied" else []
    registry = tiny.load({"A": ROW[case]}, vocabulary={"flags": {"fast": "l", "slow": "l"}}, overlays=overlays)
    platform = Platform(platform="gpu", arch="g1", flags={"slow"}, packages={"lib": "1"})
    request = AttentionRequest(head_size=8, features={"sinks"} if case == "feature off" else ())
    selection = evaluate(request, platform, registry)
    assert remedies(selection) == {"A": text}


def test_an_experimental_backend_is_for_who_asks() -> None:
    registry = tiny.load({"A": tiny.row(status="experimental"), "B": tiny.row()})
    selection = evaluate(AttentionRequest(head_size=8), Platform(platform="gpu", arch="g1"), registry)
    answer = remedy(selection, selection.candidates[0])
    assert answer == Remedy((), "A")
    told = {"text": "with --backend A", "changes": [], "by_name": "A", "leads_to": None, "of_model": False}
    assert answer.to_dict() == told


def test_a_remedy_says_which_other_variant_it_leads_to(default: Registry) -> None:
    # the reasons told are those of the dense variant, which takes no head of 512
    platform = Platform(platform="cuda", arch="sm90")
    selection = evaluate(AttentionRequest(head_size=128), platform, default, "FLASHMLA")
    told = selection.candidates[0]
    answer = remedy(selection, told)
    assert (told.title, answer and answer.leads_to) == ("FLASHMLA/dense", "FLASHMLA/paged")
    assert answer is not None
    assert answer.sentence == "would win, as FLASHMLA/paged, for attention mla, head_size 512"
    # no other is named where the one told of is chosen
    selection = evaluate(AttentionRequest(head_size=576, kv_lora_rank=512), platform, default, "FLASHMLA/dense")
    assert (answer := remedy(selection, selection.candidates[0])) is not None
    assert answer.leads_to is None


def test_what_was_asked_for_by_name_is_mended_for_who_asks_again(default: Registry) -> None:
    selection = evaluate(AttentionRequest(**{**BASE, "head_size": 100}), at("sm90", default), default, "FLASHINFER")
    answer = remedy(selection, selection.candidates[0])
    assert answer == Remedy((Change("head_size", 128),))
    assert answer.to_dict()["changes"] == [{"facet": "head_size", "value": 128, "drop": False}]


def test_a_required_backend_is_mended_without_asking_again() -> None:
    registry = load_registry("default", [{"choices": [{"require": "FLASHINFER"}]}])
    selection = evaluate(AttentionRequest(**{**BASE, "head_size": 100}), at("sm90", registry), registry)
    assert remedies(selection) == {"FLASHINFER": "for head_size 128"}
