"""What is known to fail once it is chosen: it is said so, and is no remedy, no alternative and not valid too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from support.registries import tiny
from support.registries.asking import BASE, at, named

from attnreg import AttentionRequest, NoBackendError, Platform, Registry, RequestError, Selection, load_registry, select
from attnreg.selection.refusal import alternatives, full_dict
from attnreg.selection.remedies import Remedy, remedy
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import trace_lines

BROKEN = [{"when": {"kv_dtype": "fp8"}, "fails": "no kernel was built"}]
ORDER = {"gpu": [{"name": "all", "order": ["A", "B", "C"]}]}


def ask(registry: Registry, backend: str | None = None, **fields: Any) -> Selection:
    return evaluate(
        AttentionRequest(**{"head_size": 128, **fields}), Platform(platform="gpu", arch="g1"), registry, backend
    )


def timeless(lines: list[str]) -> list[str]:
    return [re.sub(r"\.yaml:\d+", ".yaml", line) for line in lines]


def test_an_accepted_candidate_says_why_it_would_fail() -> None:
    registry = tiny.load({"A": tiny.row(), "B": tiny.row(consequences=BROKEN), "C": tiny.row()}, ORDER)
    selection = ask(registry, kv_dtype="fp8")
    assert timeless(trace_lines(selection)) == [
        "A  1st choice of 3 (order gpu/all, priorities.yaml)",
        "B  accepted, and would then fail: no kernel was built  [backends.yaml]",
        "C  valid too, ranked lower  [priorities.yaml]",
    ]
    assert not selection.fails
    a, b, c = full_dict(selection)["candidates"]
    assert (a["fails"], c["fails"]) == ([], [])
    assert (b["accepted"], [f["text"] for f in b["fails"]]) == (True, ["no kernel was built"])
    assert b["fails"] == ask(registry, "B", kv_dtype="fp8").to_dict()["consequences"]
    assert ask(registry).failures == {}


def test_the_one_that_is_preferred_fails_by_the_point_of_its_name() -> None:
    """The first candidate is judged as a user named it, the others as the order tries them."""
    registry = load_registry("vllm-0.33.0", [{"choices": [{"prefer": "TRITON_ATTN"}]}])
    selection = evaluate(AttentionRequest(**BASE, kv_dtype="fp8"), at("sm86", registry), registry)
    assert selection.fails
    assert selection.failures[1] == tuple(f for f in selection.consequences if f.kind == "fails")


def test_who_would_fail_is_no_alternative() -> None:
    rows = {"A": tiny.row(capabilities={"kv_dtypes": "auto"}), "B": tiny.row(consequences=BROKEN), "C": tiny.row()}
    with pytest.raises(NoBackendError) as caught:
        select(
            AttentionRequest(head_size=128, kv_dtype="fp8"),
            Platform(platform="gpu", arch="g1"),
            tiny.load(rows, ORDER),
            "A",
        )
    assert caught.value.alternatives == ("C",)
    assert str(caught.value).splitlines()[-1] == "  help: would accept it: C"
    del rows["C"]
    error = NoBackendError(ask(tiny.load(rows), "A", kv_dtype="fp8"))
    assert error.alternatives == ()
    assert str(error).splitlines()[-1] == "  help: no other backend serves it either"


def test_a_remedy_goes_on_to_what_does_not_fail() -> None:
    broken = [{"when": {"head_size": {"min": 100}}, "fails": "no kernel was built"}]
    kernel = {"head_sizes": [64, 128], "dtypes": ["float16"]}
    selection = ask(tiny.load({"A": tiny.row(capabilities=kernel, consequences=broken)}), head_size=100)
    # the nearest head size fails
    assert (answer := remedy(selection, selection.candidates[0])) is not None
    assert answer.text == "for head_size 64, with --dtype float16"
    # after the one change that is needed another removes the failure
    selection = ask(
        tiny.load({"A": tiny.row(capabilities={"dtypes": ["float16"]}, consequences=BROKEN)}), kv_dtype="fp8"
    )
    assert (answer := remedy(selection, selection.candidates[0])) is not None
    assert answer.text == "with --dtype float16 --kv-dtype auto"
    # no claim names the size from which it fails
    broken = [{"when": {"head_size": {"not": {"max": 512}}}, "fails": "no kernel was built"}]
    registry = tiny.load({"A": tiny.row(capabilities={"dtypes": ["float16"]}, consequences=broken)})
    selection = ask(registry, head_size=600)
    assert (answer := remedy(selection, selection.candidates[0])) is not None
    assert answer.text == "for head_size 512, with --dtype float16"
    always = [{"fails": "no kernel was built"}]
    selection = ask(tiny.load({"A": tiny.row(capabilities=kernel, consequences=always)}))
    assert remedy(selection, selection.candidates[0]) is None


# registry, where, change to the base request, candidate, why it would fail
FOUND: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("vllm-0.33.0", "sm86", {"kv_dtype": "fp8"}, "TRITON_ATTN", "vLLM raises when it builds the layer"),
    ("vllm-0.33.0", "sm86", {"features": {"softcap"}}, "FLEX_ATTENTION", "vLLM raises when it builds the layer"),
    ("vllm-0.28.0", "gfx1201", {"kv_dtype": "fp8_e5m2", "dtype": "float32"}, "TRITON_ATTN", "the first forward stops"),
]


@pytest.mark.parametrize(("name", "where", "fields", "candidate", "text"), FOUND)
def test_a_late_failure_of_an_engine_is_told_of_the_losers(
    name: str, where: str, fields: dict[str, Any], candidate: str, text: str
) -> None:
    registry = load_registry(name)
    selection = evaluate(AttentionRequest(**BASE, **fields), at(where, registry), registry)
    assert not selection.fails
    (told,) = [line for line in trace_lines(selection, {candidate}) if candidate in line]
    assert f"accepted, and would then fail: {text}" in told
    refused = evaluate(selection.request, selection.platform, registry, "TURBOQUANT")
    assert candidate not in alternatives(refused)


# registry, where, change to the base request, who is chosen, and how it then fails
CHOSEN: list[tuple[str, str, dict[str, Any], str, str]] = [
    # a layer that falls back to a FlashAttention which the class does not ask about
    ("vllm-0.33.0", "sm110", {"head_size": 512}, "FLASH_ATTN", "heads of up to 256"),
    ("vllm-0.33.0", "sm90", {"head_size": 512, "features": {"batch_invariant"}}, "FLASH_ATTN", "heads of up to 256"),
    ("vllm-0.20.0", "sm100", {"head_size": 512}, "FLASH_ATTN", "heads of up to 256"),
    ("vllm-0.33.0", "sm103", {"head_size": 160, "features": {"sinks"}}, "FLASH_ATTN", "which has no sinks"),
    (
        "vllm-0.33.0",
        "sm100",
        {"head_size": 136, "extra": {"is_diffusion": True}},
        "FLASH_ATTN",
        "FlashAttention 4 alone",
    ),
    # decode context parallelism
    ("vllm-0.33.0", "sm120", {"features": {"dcp", "sinks"}}, "FLASHINFER", "which has no sinks"),
    ("vllm-0.28.0", "sm100", {"features": {"dcp", "sinks"}}, "FLASHINFER", "which has no sinks"),
    ("vllm-0.20.0", "sm100", {"features": {"dcp", "sinks"}}, "FLASHINFER", "which has no sinks"),
    ("vllm-0.33.0", "sm90", {"features": {"dcp"}, "kv_dtype": "nvfp4"}, "FLASHINFER", "reads no nvfp4 cache"),
    ("vllm-0.33.0", "sm80", {"features": {"dcp", "non_causal"}, "head_size": 512}, "FLASHINFER", "no kernel for it"),
    # formats that only some kernels inside a class read
    (
        "vllm-0.33.0",
        "sm100",
        {"kv_dtype": "nvfp4", "extra": {"use_trtllm_attention": False}},
        "FLASHINFER",
        "alone read",
    ),
    ("vllm-0.24.0", "sm90", {"kv_dtype": "nvfp4"}, "FLASHINFER", "needs data-centre Blackwell"),
    ("vllm-0.33.0", "sm100", {"kv_dtype": "nvfp4", "features": {"non_causal"}}, "FLASHINFER", "over an nvfp4 cache"),
    ("vllm-0.33.0", "x86_64_amx", {"kv_dtype": "fp8", "head_size": 80}, "CPU_ATTN", "heads in multiples of 32"),
    ("vllm-0.33.0", "xe2", {"kv_dtype": "fp8_e5m2"}, "FLASH_ATTN", "reads no fp8_e5m2 cache"),
    (
        "vllm-0.33.0",
        "xe2",
        {"kv_dtype": "fp8_e5m2", "head_size": 256, "features": {"mm_prefix"}},
        "TRITON_FLASH_ATTN",
        "e5m2",
    ),
    (
        "vllm-0.33.0",
        "gfx942",
        {"kv_dtype": "octave_k3v4", "head_size": 256, "extra": {"rotary_part": "other"}},
        "ROCM_OCTAVE",
        "64 rotary elements",
    ),
    # the rotation of a packed cache's keys is one of a power of two
    *(
        (name, "sm90", {"kv_dtype": "turboquant_4bit_nc", "head_size": 96}, "TURBOQUANT", "a power of two")
        for name in ("vllm-0.20.0", "vllm-0.28.0", "vllm-0.33.0")
    ),
    ("vllm-0.33.0", "gfx942", {"kv_dtype": "ultraquant_4bit", "head_size": 80}, "ULTRAQUANT", "each 32 elements"),
    ("vllm-0.33.0", "sm80", {"kv_dtype": "turboquant_k8v4", "head_size": 512}, "TURBOQUANT", "heads of up to 256"),
    # encoders keep no cache, and their code refuses its dtype all the same
    *(
        (name, where, {"attn_type": "encoder_only", "kv_dtype": "fp8"}, backend, "without a KV cache")
        for name in ("vllm-0.20.0", "vllm-0.24.0", "vllm-0.33.0")
        for where, backend in {"sm89": "TRITON_ATTN", "sm90": "FLASH_ATTN", "gfx942": "ROCM_ATTN"}.items()
    ),
]
SPARSE: dict[str, Any] = {"attention": "mla_sparse", "head_size": 576, "num_kv_heads": 1, "block_size": 64}


@pytest.mark.parametrize(("name", "where", "fields", "backend", "text"), CHOSEN)
def test_a_late_failure_of_an_engine_is_told_of_the_winner(
    name: str, where: str, fields: dict[str, Any], backend: str, text: str
) -> None:
    registry = load_registry(name)
    selection = evaluate(AttentionRequest(**{**BASE, **fields}), at(where, registry), registry)
    assert selection.backend is not None
    assert selection.backend.name == backend
    assert any(text in f.text for f in selection.consequences if f.kind == "fails"), selection.consequences


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("vllm-0.33.0", {"kv_dtype": "auto"}, "with DCP the kernel reads a quantised cache only"),
        ("vllm-0.30.0", {"kv_dtype": "auto"}, "with DCP the kernel reads a quantised cache only"),
        ("vllm-0.28.0", {"kv_dtype": "fp8"}, "gives DCP no sums"),
        ("vllm-0.33.0", {"kv_dtype": "fp8", "num_heads": 32}, "at most 31 query heads on a rank"),
        (
            "vllm-0.33.0",
            {"kv_dtype": "fp8", "num_heads": 16, "extra": {"dcp_ranks": 8}},
            "at most 64 query heads of all",
        ),
        ("vllm-0.33.0", {"kv_dtype": "fp8", "num_heads": 16, "extra": {"dcp_ranks": 4}}, None),
        ("vllm-0.33.0", {"kv_dtype": "fp8", "num_heads": 16, "features": {"dcp", "pcp"}}, None),
    ],
)
def test_decode_context_parallelism_of_sparse_mla(name: str, fields: dict[str, Any], text: str | None) -> None:
    registry = load_registry(name)
    selection = evaluate(
        AttentionRequest(**{**BASE, **SPARSE, "features": {"dcp"}, **fields}), at("sm90", registry), registry
    )
    assert selection.backend is not None
    assert selection.backend.name == "FLASHMLA_SPARSE"
    told = [f.text for f in selection.consequences if f.kind == "fails"]
    assert [text in said if text else said for said in told] == ([True] if text else [])


def test_the_remedies_of_an_engine_lead_into_no_failure() -> None:
    registry = load_registry("vllm-0.30.0")
    selection = evaluate(AttentionRequest(**BASE, kv_dtype="fp8_ds_mla"), at("sm86", registry), registry)
    found = {c.name: remedy(selection, c) for c in selection.candidates}
    assert found["TRITON_ATTN"] is not None
    assert found["TRITON_ATTN"].text == "with --kv-dtype int8_per_token_head"
    registry = load_registry("vllm-0.33.0")
    request = AttentionRequest(**BASE, kv_dtype="fp8", features={"softcap"})
    selection = evaluate(request, at("sm86", registry), registry)
    answer = next(remedy(selection, c) for c in selection.candidates if c.name == "FLEX_ATTENTION")
    # without the softcap, which a model does not give up
    assert answer is not None
    assert answer.of_model


# at random -----------------------------------------------------------------------------------------------------------


def questions(registry: Registry, count: int) -> Iterator[tuple[AttentionRequest, Platform, str | None]]:
    """Plain layers with options that some kernels take and then stop at."""
    rng, vocabulary = Random(registry.name), registry.vocabulary
    features = [f for f in ("alibi", "softcap", "sinks", "sliding_window") if f in vocabulary.features]
    for _ in range(count):
        arch = rng.choice(list(vocabulary.architectures.values()))
        request = AttentionRequest(
            head_size=rng.choice([64, 80, 128, 256]),
            num_heads=32,
            num_kv_heads=8,
            block_size=rng.choice([None, 16, 32, 64]),
            dtype=rng.choice(["bfloat16", "float16", "float32"]),
            kv_dtype=rng.choice(["auto", *vocabulary.words["kv_dtypes"]]),
            features=rng.sample(features, rng.choice([0, 0, 1, 2])),
        )
        flags = [flag for flag in vocabulary.flags if rng.random() < 0.15]
        backend = rng.choice([None, None, *registry.backends])
        yield request, Platform(platform=arch.platform, arch=arch.name, flags=flags), backend


def applied(answer: Remedy, selection: Selection) -> Selection:
    request, platform = selection.request, selection.platform
    for change in answer.changes:
        request, platform = change.apply(request, platform)
    return evaluate(request, platform, selection.registry, answer.by_name or selection.requested)


@pytest.mark.slow(reason="all requests of a release")
@pytest.mark.parametrize(
    "name", ["default", "vllm-0.20.0", "vllm-0.28.0", "vllm-0.30.0", "vllm-0.33.0", "sglang-0.5.23"]
)
def test_nothing_that_is_offered_is_known_to_fail(name: str) -> None:
    registry, failing, offered = load_registry(name), 0, 0
    for request, platform, backend in questions(registry, 150):
        try:
            selection = evaluate(request, platform, registry, backend)
        except RequestError:
            continue
        by_name = [(a, evaluate(request, platform, registry, a)) for a in alternatives(selection)]
        for candidate in selection.candidates:
            failing += candidate.rank in selection.failures
            if candidate.accepted and candidate.rank not in selection.failures:
                asked = named(selection, candidate)
                by_name.append((asked, evaluate(request, platform, registry, asked)))
            answer = remedy(selection, candidate) if candidate.reasons else None
            if answer is not None:
                by_name.append((answer.text, applied(answer, selection)))
                assert by_name[-1][1].backend is not None, (request, platform, answer)
        offered += len(by_name)
        for what, after in by_name:
            assert not after.fails, (request, platform, what)
    # the sample has what this is about
    assert bool(failing) == (name != "default")
    assert offered or not registry.orders
