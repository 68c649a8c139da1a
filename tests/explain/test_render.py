"""Explanations as a person reads them: the answer first, every verdict with its line, at any width."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.registries import asking
from support.registries.asking import BASE, at
from support.suite.examples import examples

from attnreg import AttentionRequest, Platform, Registry, load_registry
from attnreg.explain import explain, render
from attnreg.explain.answers import Explanation
from attnreg.explain.grouping import blocks
from attnreg.selection.question import Question
from attnreg.selection.selector import evaluate

SINKS = AttentionRequest(head_size=64, num_heads=64, num_kv_heads=8, features={"sinks", "sliding_window"})
GPT_OSS = Question(
    SINKS, "64/8 heads of 64 · sliding window 128 · sinks", "18 layers (0, 2, … 34)", frozenset(range(18))
)


def shown(explanation: Explanation, width: int, *, brief: bool = False) -> list[str]:
    """What is printed, with the lines of data as `file:*`, two spaces after the reason."""
    console = Console(width=width, file=io.StringIO(), highlight=False)
    render(explanation, console, brief=brief)
    lines = console.file.getvalue().splitlines()
    assert [line for line in lines if len(line) > width or line != line.rstrip()] == []
    columns = {line.index("backends.yaml:") for line in lines if "  backends.yaml:" in line}
    assert len(columns) <= len([line for line in lines if line.startswith(("▸", "✗"))])
    lines = [re.sub(r"\.yaml:\d+", ".yaml:*", line) for line in lines]
    return [re.sub(r"(?<=\S) {2,}(\w+\.yaml:\*)", r"  \1", line) for line in lines]


def every(platform: str, registry: Registry) -> list[Platform]:
    return [Platform(platform=platform, arch=a.name) for a in registry.vocabulary.architectures_of(platform)]


def test_the_answer_then_the_trace(default: Registry) -> None:
    explanation = explain([GPT_OSS], [at("gfx942", default)], default, title="gpt-oss · ROCm gfx942", notes=["n"])
    assert shown(explanation, 100) == [
        "gpt-oss · ROCm gfx942",
        "",
        "18 layers (0, 2, … 34)   64/8 heads of 64 · sliding window 128 · sinks",
        "▸ TRITON_ATTN   4th choice of 5 (order rocm/mha, priorities.yaml:*)",
        "  1 ROCM_AITER_FA/paged      flags aiter, aiter_mha are off  backends.yaml:*",
        "                             ↳ would win with --flag aiter --flag aiter_mha",
        "  2 ROCM_AITER_UNIFIED_ATTN  flag aiter is off  backends.yaml:*",
        "                             ↳ would win with --flag aiter",
        "  3 ROCM_ATTN                emulates sinks (slow); TRITON_ATTN serves them  backends.yaml:*",
        "                             natively",
        "                             ↳ would be chosen with --backend ROCM_ATTN",
        # what makes another model of it is no advice
        "  5 TURBOQUANT/Triton        kv_dtype is auto; supported: turboquant_*  backends.yaml:*",
        "                             ↳ would win with --kv-dtype turboquant_k8v4",
        "",
        "note: n",
    ]


def test_groups_that_only_a_refused_feature_tells_apart_are_printed_once() -> None:
    fewer = {"capabilities": {"remove": {"features": ["sinks", "sliding_window"]}}}
    default = load_registry("default", [{"backends": {"TURBOQUANT": fewer}}])
    full = AttentionRequest(head_size=64, num_heads=64, num_kv_heads=8, features={"sinks"})
    second = Question(full, "64/8 heads of 64 · sinks", "18 layers (1, 3, … 35)")
    lines = shown(explain([GPT_OSS, second], [at("gfx942", default)], default), 110)
    assert lines[:3] == [
        "18 layers (0, 2, … 34)   64/8 heads of 64 · sliding window 128 · sinks",
        "18 layers (1, 3, … 35)   64/8 heads of 64 · sinks",
        "▸ TRITON_ATTN   4th choice of 5 (order rocm/mha, priorities.yaml:*)",
    ]
    features = "sinks, sliding_window (layers 0, 2, … 34) are not supported"
    assert lines[-2:] == [f"{' ' * 29}{features}  backends.yaml:*", ""]
    # another winner, or another reason that is no feature, makes a block of its own
    wide = Question(AttentionRequest(head_size=64, kv_dtype="nvfp4"), "nvfp4", "2 layers (36–37)")
    lines = shown(explain([GPT_OSS, wide, second], [at("gfx942", default)], default), 110)
    assert [line[:9] for line in lines if not line.startswith(" ")] == [
        *("18 layers", "18 layers", "▸ TRITON_", ""),
        *("2 layers ", "✗ no back", ""),
    ]


def test_a_plain_request_is_advised_of_its_features_too(default: Registry) -> None:
    lines = shown(explain([Question(SINKS, "q")], [at("gfx942", default)], default), 110)
    assert lines[-2].strip() == "↳ would win with --kv-dtype turboquant_k8v4"


def test_the_title_of_a_request_is_its_label(default: Registry) -> None:
    explanation = explain([Question(SINKS, "q · r")], [at("sm90", default)], default, title="q · r · CUDA")
    assert shown(explanation, 80)[:3] == ["q · r · CUDA", "", shown(explanation, 80)[2]]
    assert shown(explanation, 80)[2].startswith("▸ HOPPER_ATTN")


def test_a_narrow_terminal_gets_the_reasons_below_the_names(default: Registry) -> None:
    explanation = explain([Question(SINKS, "sinks")], [at("gfx942", default)], default)
    assert shown(explanation, 60)[:9] == [
        "sinks",
        "▸ TRITON_ATTN",
        "  4th choice of 5 (order rocm/mha, priorities.yaml:*)",
        "  1 ROCM_AITER_FA/paged",
        "    flags aiter, aiter_mha are off  backends.yaml:*",
        "    ↳ would win with --flag aiter --flag aiter_mha",
        "  2 ROCM_AITER_UNIFIED_ATTN",
        "    flag aiter is off  backends.yaml:*",
        "    ↳ would win with --flag aiter",
    ]


def test_a_narrower_one_gets_the_places_below_the_reasons(default: Registry) -> None:
    explanation = explain([Question(SINKS, "sinks")], [at("gfx942", default)], default, title="sinks · " * 9)
    assert shown(explanation, 40)[:13] == [
        "sinks · sinks · sinks · sinks · sinks ·",
        "sinks · sinks · sinks · sinks ·",
        "",
        "▸ TRITON_ATTN",
        "  4th choice of 5 (order rocm/mha,",
        "  priorities.yaml:*)",
        "  1 ROCM_AITER_FA/paged",
        "    flags aiter, aiter_mha are off",
        "      backends.yaml:*",
        "    ↳ would win with --flag aiter --flag",
        "      aiter_mha",
        "  2 ROCM_AITER_UNIFIED_ATTN",
        "    flag aiter is off",
    ]


def test_a_wide_terminal_keeps_the_places_near_their_reasons(default: Registry) -> None:
    console = Console(width=200, file=io.StringIO(), highlight=False)
    render(explain([Question(SINKS, "sinks")], [at("gfx942", default)], default), console)
    gaps = re.findall(r"\S( +)backends\.yaml", console.file.getvalue())  # type: ignore[attr-defined]
    assert gaps
    assert min(map(len, gaps)) == 2
    assert max(map(len, gaps)) < 50


FP8 = Question(AttentionRequest(head_size=128, kv_dtype="fp8_e5m2"), "r", "1 layer (3)")
MAMBA = Question(None, "Mamba", "9 layers")
# what attnreg itself runs there
FA3_RUNS = [
    "  ▹ attnreg itself runs TRITON_ATTN: FLASH_ATTN/FA3 runs where it is named: HOPPER_ATTN was measured",
    "    to be faster nearly everywhere, TRITON_ATTN at decoding and with a window (backends.yaml:*)",
]
NATIVE_RUNS = [
    "  ▹ attnreg itself runs HOPPER_ATTN: FLASHINFER/native has no kernel module that attnreg can run",
    "    (backends.yaml:*)",
]
BRIEF: list[tuple[str, list[Question], list[str], list[str]]] = [
    ("a request", [Question(SINKS, "q")], ["sm90"], ["HOPPER_ATTN"]),
    (
        "another kernel runs",
        [Question(AttentionRequest(head_size=72, phase="decode"), "q")],
        ["sm90"],
        ["FLASH_ATTN/FA3", *FA3_RUNS],
    ),
    (
        "all alike",
        [GPT_OSS, Question(SINKS, "r", "18 layers (1, …)", frozenset(range(18, 36)))],
        ["sm90"],
        [
            "HOPPER_ATTN for all 36 layers",
        ],
    ),
    (
        "beside others",
        [GPT_OSS, MAMBA],
        ["sm90"],
        [
            "HOPPER_ATTN for all 18 attention layers",
        ],
    ),
    (
        "two winners",
        [GPT_OSS, FP8, MAMBA],
        ["sm90"],
        [
            "HOPPER_ATTN for 18 layers (0, 2, … 34)   64/8 heads of 64 · sliding window 128 · sinks",
            "FLASHINFER/native for 1 layer (3)   r",
            *NATIVE_RUNS,
            "9 layers   Mamba",
        ],
    ),
    (
        "two platforms",
        [Question(SINKS, "q")],
        ["gfx942", "gfx1201 +aiter"],
        [
            "TRITON_ATTN on gfx942 (MI300X, …)",
            "ROCM_AITER_UNIFIED_ATTN on gfx1201 (RX 9070, …)",
        ],
    ),
    ("nothing", [Question(AttentionRequest(head_size=100, kv_dtype="nvfp4"), "q")], ["sm90"], ["no backend"]),
    (
        "a warning",
        [Question(AttentionRequest(head_size=64, features={"sinks"}), "q")],
        ["ROCM_ATTN"],
        [
            "ROCM_ATTN",
            "  ! ROCM_ATTN emulates sinks (slow): sinks are a second pass over the output",
        ],
    ),
]


@pytest.mark.parametrize(("questions", "where", "lines"), [b[1:] for b in BRIEF], ids=[b[0] for b in BRIEF])
def test_the_winners_alone(default: Registry, questions: list[Question], where: list[str], lines: list[str]) -> None:
    backend, archs = (where[0], ["gfx942"]) if where[0].isupper() else (None, where)
    platforms = [at(arch, default) for arch in archs]
    explanation = explain(questions, platforms, default, backend=backend, title="t", notes=["n"])
    assert shown(explanation, 100, brief=True) == ["t", *lines, "note: n"]


def test_platforms_that_agree_share_a_verdict_with_all_their_values(default: Registry) -> None:
    explanation = explain([Question(SINKS, "sinks")], every("rocm", default), default)
    (answer,) = explanation.answers
    assert [[s.platform.arch for s in v.selections] for v in answer.verdicts] == [
        ["gfx90a", "gfx1100"],
        ["gfx942", "gfx950", "gfx1250"],
        ["gfx1200", "gfx1201"],
    ]
    lines = shown(explanation, 120)
    assert lines[1] == "gfx90a (MI210, …), gfx1100 (RX 7900, …)"
    assert re.match(
        r"  1 ROCM_AITER_FA/paged +arch is gfx90a, gfx1100; needs gfx942, gfx950 or gfx1250 +backends", lines[3]
    )
    assert lines[5].strip() == "↳ would win on gfx942, with --flag aiter --flag aiter_mha"


def test_one_platform_needs_no_heading(default: Registry) -> None:
    lines = shown(explain([Question(SINKS, "sinks")], [at("sm90", default)], default), 80)
    assert lines[:2] == ["sinks", "▸ HOPPER_ATTN   1st choice of 4 (order cuda/hopper-sinks, priorities.yaml:*)"]
    assert "  4 FLASHINFER/XQA  valid too, ranked lower  priorities.yaml:*" in lines


HOW: list[tuple[str, dict[str, Any], str | None, list[Any], list[str]]] = [
    ("asked for", {}, "TRITON_ATTN", [], ["▸ TRITON_ATTN   requested"]),
    ("required", {}, None, [{"require": "TRITON_ATTN"}], ["▸ TRITON_ATTN   required by <overlay>:*"]),
    (
        "preferred",
        {},
        None,
        [{"prefer": "TRITON_ATTN"}],
        ["▸ TRITON_ATTN   preferred by <overlay>:* (order cuda/hopper-prompts, priorities.yaml:*)"],
    ),
    (
        "preferred in vain",
        {"kv_dtype": "nvfp4"},
        None,
        [{"prefer": "FLEX_ATTENTION"}],
        [
            "▸ FLASHINFER/XQA   3rd choice of 6 (order cuda/mha, priorities.yaml:*)",
            "  ▹ attnreg itself runs nothing here: FLASHINFER/XQA has no kernel module that attnreg can run",
            "    (backends.yaml:*)",
            "  ! FLEX_ATTENTION is preferred (<overlay>:*) but not chosen: kv_dtype is nvfp4; supported: auto,",
            "    float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2",
        ],
    ),
    (
        "refused by name",
        {"kv_dtype": "nvfp4"},
        "FLEX_ATTENTION",
        [],
        ["✗ no backend   FLEX_ATTENTION requested", "  would accept it if asked for by name: FLASHINFER"],
    ),
    (
        "nothing",
        {"kv_dtype": "nvfp4", "head_size": 100},
        None,
        [],
        ["✗ no backend   (order cuda/mha, priorities.yaml:*)"],
    ),
]


@pytest.mark.parametrize(("change", "backend", "choices", "lines"), [h[1:] for h in HOW], ids=[h[0] for h in HOW])
def test_how_the_answer_was_come_to(
    change: dict[str, Any], backend: str | None, choices: list[Any], lines: list[str]
) -> None:
    registry = load_registry("default", [{"choices": choices}])
    request = AttentionRequest(**{**BASE, **change})
    explanation = explain([Question(request, "q")], [at("sm90", registry)], registry, backend=backend)
    printed = [re.sub(r"<overlay>:\d+", "<overlay>:*", line) for line in shown(explanation, 100)]
    assert printed[1 : 1 + len(lines)] == lines
    assert explanation.found == (not lines[0].startswith("✗"))


@given(data=st.data())
@examples(40)
def test_any_request_at_any_width(default: Registry, data: st.DataObject) -> None:
    request, width = data.draw(asking.requests(default)), data.draw(st.integers(40, 130))
    platforms = data.draw(st.lists(asking.platforms(default), min_size=1, max_size=4, unique=True))
    explanation = explain([Question(request, "a label")], platforms, default)
    verdicts = explanation.answers[0].verdicts
    # every platform has one verdict, which says of it what the selector does
    assert sorted(map(str, platforms)) == sorted(str(s.platform) for v in verdicts for s in v.selections)
    for verdict in verdicts:
        for selection in verdict.selections:
            assert selection == evaluate(request, selection.platform, default)
            first = verdict.selection
            assert [c.title for c in selection.candidates] == [c.title for c in first.candidates]
            assert [len(c.reasons) for c in selection.candidates] == [len(c.reasons) for c in first.candidates]
    printed = "\n".join(shown(explanation, width))
    words = " ".join(printed.split())
    (block,) = blocks(explanation.answers)
    for number, verdict in enumerate(verdicts):
        for c in block.candidates(verdict):
            assert c.title in words
            for text, where in block.words(number, c):
                # a line of data may stand within a wrapped reason
                said = re.escape(text.split()[0])
                assert re.search(rf"{said}.*?{re.escape(where.file.rpartition('/')[2])}:\*", words)
                assert all(r.asked in text for r in c.reasons if r.kind == "feature" and r.where == where)


def test_a_derived_value_cites_the_case_that_spoke(default: Registry) -> None:
    orders = {
        "cuda": [{"name": "mine", "order": [{"backend": "TRITON_ATTN", "if": {"kv_quantized": True}}, "FLASH_ATTN"]}]
    }
    registry = load_registry("default", [{"orders": orders}])
    lines = shown(explain([Question(SINKS, "q")], [at("sm90", registry)], registry), 110)
    assert re.search(
        r"1 TRITON_ATTN +kv_quantized is false \(vocabulary\.yaml:\*\); needs true +<overlay>:\d+", lines[4]
    )
