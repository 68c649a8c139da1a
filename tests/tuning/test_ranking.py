"""Rankings and the orders that follow: noise ranks nothing, and few conditions take what was measured."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

import attnreg
from attnreg import AttentionRequest, Platform
from attnreg.analysis.timings.ranking import compared, rankable, ranked
from attnreg.analysis.timings.rules import PHASES, MeasuredOrder, merged, names_of, rules_of
from attnreg.analysis.timings.samples import Cell, Samples
from attnreg.errors import Location
from attnreg.language.measured import Measured

LAYER = AttentionRequest(head_size=64, num_heads=4, num_kv_heads=2)


def timed(times: dict[str, float], noise: float = 0.01, turns: int = 8, cells: int = 1, seed: int = 0) -> Samples:
    """Samples whose times scatter by a share; what slows a turn slows all backends."""
    random = Random(seed)
    out = Samples({}, "", {}, "")
    out.cells = [Cell(LAYER, 1, 1, 64 + i) for i in range(cells)]
    for cell in range(cells):
        for _ in range(turns):
            slow = random.uniform(1, 3)
            for name, us in times.items():
                turn = [us * slow * random.uniform(1 - noise, 1 + noise) for _ in range(5)]
                out.turns.setdefault((cell, name), []).append(turn)
    return out


def test_what_slows_a_machine_down_slows_all_backends() -> None:
    samples = timed({"A": 100, "B": 131})
    found = compared(samples, [0], "A", "B")
    assert found.ratio == pytest.approx(1.31, rel=0.02)
    assert found.noise < 0.02
    assert found.differs
    assert not compared(samples, [0], "B", "A").differs


@pytest.mark.parametrize(
    ("times", "noise", "order"),
    [
        ({"A": 100, "B": 50, "C": 75}, 0.01, ["B", "C", "A"]),
        # within the noise they stay as they were
        ({"A": 100, "B": 99}, 0.3, ["A", "B"]),
        # under 2 % nothing is said, however fine the times are
        ({"A": 100, "B": 99}, 0.0005, ["A", "B"]),
        ({"A": 100, "B": 101, "C": 50}, 0.001, ["C", "A", "B"]),
    ],
)
def test_only_what_differs_beyond_the_noise_is_ranked(times: dict[str, float], noise: float, order: list[str]) -> None:
    for seed in range(5):
        assert ranked(timed(times, noise, seed=seed), [0], ["A", "B", "C"]) == order


def test_over_several_cells_the_mean_decides() -> None:
    samples = timed({"A": 100, "B": 80}, cells=2)
    samples.turns[1, "A"] = [[us / 4 for us in turn] for turn in samples.turns[1, "A"]]
    assert ranked(samples, [0], ["A", "B"]) == ["B", "A"]
    assert ranked(samples, [0, 1], ["A", "B"]) == ["A", "B"]


def test_what_was_wrong_or_is_missing_somewhere_is_not_ranked() -> None:
    samples = timed({"A": 100, "B": 50, "C": 10}, cells=2)
    samples.problems[1, "C"] = "wrong: output[0] is 1, exactly 2"
    del samples.turns[0, "B"]
    assert rankable(samples, [0, 1], ["A", "B", "C"]) == ["A"]
    assert ranked(samples, [1], ["A", "B", "C"]) == ["B", "A"]


@pytest.mark.parametrize(
    ("ratio", "noise", "text"),
    [
        (1.31, 0.012, "A is 1.31x as fast as B (± 1 %), measured 2026-11-22 on a device"),
        (1.5, 9.0, "A is as fast as B, as far as the noise tells (± 900 %), measured 2026-11-22 on a device"),
        (1.01, 0.001, "A is as fast as B, as far as the noise tells (± 0.1 %), measured 2026-11-22 on a device"),
        (1.11, 0.003, "A is 1.11x as fast as B (± 0.3 %), measured 2026-11-22 on a device"),
        (1.11, 0.0094, "A is 1.11x as fast as B (± 0.9 %), measured 2026-11-22 on a device"),
        (1.11, 0.0096, "A is 1.11x as fast as B (± 1 %), measured 2026-11-22 on a device"),
        (1.11, 0.0004, "A is 1.11x as fast as B (± < 0.1 %), measured 2026-11-22 on a device"),
        (0.9, 0.2, "A is as fast as B, as far as the noise tells (± 20 %), measured 2026-11-22 on a device"),
    ],
)
def test_a_measurement_claims_no_more_than_its_noise_allows(ratio: float, noise: float, text: str) -> None:
    measured = Measured("f", ratio, noise, "A", "B", Location("f", 1, 1), "a device", "2026-11-22")
    assert measured.text == text
    unread = replace(measured, device="", date="")
    assert unread.text == text.replace("measured 2026-11-22 on a device", "measured in f")


def test_one_turn_says_nothing() -> None:
    assert not compared(timed({"A": 1, "B": 99}, turns=1), [0], "A", "B").differs


def rule(order: str, **values: Any) -> MeasuredOrder:
    known: dict[str, Any] = {
        "attention": "mha", "attn_type": "decoder", "role": "target", "dtype": "bfloat16", "kv_dtype": "auto",
        "head_size": 64, "head_size_v": None, "phase": "any", "features": frozenset(), **values,
    }  # fmt: skip
    return MeasuredOrder(tuple(order), {name: frozenset({value}) for name, value in known.items()}, (0,), tuple(order))


def test_neighbours_with_one_order_become_one_condition() -> None:
    rules = [rule("AB", head_size=size, phase=phase) for size in (64, 128) for phase in PHASES]
    (one,) = merged(rules)
    assert one.when == {
        "attention": "mha", "attn_type": "decoder", "role": "target", "dtype": "bfloat16", "kv_dtype": "auto",
        "head_size": [64, 128], "features": {"only": []},
    }  # fmt: skip


def test_conditions_follow_where_winners_differ() -> None:
    rules = merged([rule("AB", phase="prefill"), rule("BA", phase="decode"), rule("BA", phase="any")])
    assert {(r.order, str(r.when.get("phase"))) for r in rules} == {
        (("A", "B"), "prefill"),
        (("B", "A"), "['any', 'decode']"),
    }


def test_features_are_bounded_by_those_that_were_measured() -> None:
    sinks, both = frozenset({"sinks"}), frozenset({"sinks", "sliding_window"})
    (one,) = merged([rule("AB", features=sinks), rule("AB", features=both)])
    assert one.when["features"] == {"only": ["sinks", "sliding_window"]}
    assert one.when["any"] == [{"features": ["sinks"]}]
    # another order stands between them
    three = merged([rule("AB"), rule("BA", features=sinks), rule("AB", features=both)])
    assert len(three) == 3
    assert [len(max(r.values["features"], key=len)) for r in three] == [0, 1, 2]


def test_every_backend_that_may_be_ranked_has_a_name(default: attnreg.Registry) -> None:
    platform = Platform(platform="cuda", arch="sm90")
    names = names_of(default, platform, replace(LAYER, head_size=96))
    assert names[0] == "FLASH_ATTN/" + default.backends["FLASH_ATTN"].variant_names[0]
    assert "TRITON_ATTN" in names
    assert any(name.partition("/")[0] == "TORCH_SDPA" for name in names)
    assert all(default.row(name) is not None for name in names)
    assert len(names) == len(set(names))


def test_what_was_not_measured_keeps_behind_what_it_stood_behind(default: attnreg.Registry) -> None:
    platform = Platform(platform="cuda", arch="sm90", packages={"torch": "2.11", "triton": "3.6"}, device="H200")
    layer = AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8, block_size=16, dtype="float16")
    samples = timed({"TRITON_ATTN": 100, "FLASH_ATTN/FA3": 200, "TORCH_SDPA/gathered": 50}, cells=1)
    samples.cells = [Cell(layer, 4, 1, 100)]
    (rule,) = [r for r in rules_of(samples, default, platform) if "any" in r.values["phase"]]
    assert rule.order == ("TORCH_SDPA/gathered", "TRITON_ATTN", "FLASH_ATTN/FA3")
    assert [name for name in rule.entries if name in rule.order] == [*rule.order]
    # other variants of a backend are named by it, which asks for none of them alone
    behind = rule.entries[rule.entries.index("FLASH_ATTN/FA3") + 1 :]
    assert behind == ("FLASH_ATTN", "FLASHINFER", "HOPPER_ATTN")
    assert rule.entries[2] == "FLEX_ATTENTION"


def test_what_the_order_does_not_have_enters_it_where_it_is_faster(default: attnreg.Registry) -> None:
    platform = Platform(platform="cuda", arch="sm90", packages={"torch": "2.11", "triton": "3.6"}, device="H200")
    samples = timed({"TRITON_ATTN": 50, "FLEX_ATTENTION": 100, "TORCH_SDPA/gathered": 200}, cells=1)
    samples.cells = [Cell(AttentionRequest(head_size=256, num_heads=8, num_kv_heads=8, block_size=16), 4, 1, 100)]
    (rule,) = [r for r in rules_of(samples, default, platform) if "any" in r.values["phase"]]
    assert rule.order[-1] == "TORCH_SDPA/gathered"
    assert "TORCH_SDPA/gathered" not in rule.entries
