"""What moves between two registries for concrete layers, and the lines of data that say why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.registries import tiny
from support.registries.tiny import row

from attnreg import AttentionRequest, Platform, Registry, RequestError, load_registry
from attnreg.analysis.diff import diff
from attnreg.analysis.lock import drift, read_lock, write_lock
from attnreg.analysis.moves import AskedGroup, compare, paired
from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.language.engine.architectures import NATIVE
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.selection.question import Question

G1 = Platform(platform="gpu", arch="g1")


def ask(platform: Platform = G1, **facets: Any) -> tuple[AskedGroup, Platform]:
    request = AttentionRequest(**{"head_size": 8, **facets})
    return AskedGroup("m", "", "", (request, request)), platform


def why(before: Registry, after: Registry, item: tuple[AskedGroup, Platform]) -> tuple[str, list[str], list[str]]:
    """The titles, what else changes, and the reasons without their places."""
    (move,) = compare([item[0]], [item[1]], before, after).moves
    reasons = [f"{w.side}: {w.text}" for w in move.why]
    return f"{move.before.title} → {move.after.title}", list(move.changes), reasons


def order(*names: str, **more: Any) -> dict[str, Any]:
    return {"gpu": [{"name": "all", "order": list(names), **more}]}


VARIANTS = [{"name": "V1", "when": {"arch": "g1"}}, {"name": "V2"}]
SINKS = {"capabilities": {"features": ["sinks"]}}
WHY: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str, list[str], list[str]]] = [
    (
        "the old choice refuses",
        {"backends": {"A": row(), "B": row()}},
        {"backends": {"A": row(capabilities={"head_sizes": {"multiple_of": 16}}), "B": row()}},
        {},
        "A → B",
        [],
        ["after: A: head_size is 8; supported: multiples of 16"],
    ),
    (
        "the new choice accepts at last",
        {"backends": {"A": row(), "B": row(**SINKS)}},
        {"backends": {"A": row(**SINKS), "B": row(**SINKS)}},
        {"features": {"sinks"}},
        "B → A",
        [],
        ["before: A: sinks is not supported"],
    ),
    (
        "the order is another",
        {"backends": {"A": row(), "B": row()}, "priorities": order("A", "B")},
        {"backends": {"A": row(), "B": row()}, "priorities": order("B", "A")},
        {},
        "A → B",
        [],
        ["after: B: 1st choice of 2 (order gpu/all, priorities.yaml:2); A is valid too, ranked lower"],
    ),
    (
        "the order is another, and the old choice would fail",
        {"backends": {"A": row(), "B": row()}, "priorities": order("A", "B")},
        {"backends": {"A": row(consequences=[{"fails": "no kernel"}]), "B": row()}, "priorities": order("B", "A")},
        {},
        "A → B",
        [],
        ["after: B: 1st choice of 2 (order gpu/all, priorities.yaml:2); A is accepted, and would then fail: no kernel"],
    ),
    (
        "the order names it no more",
        {"backends": {"A": row(), "B": row()}},
        {"backends": {"A": row(), "B": row()}, "priorities": order("B")},
        {},
        "A → B",
        [],
        ["after: the order gpu/all does not name A"],
    ),
    (
        "it is gone",
        {"backends": {"A": row(), "B": row()}},
        {"backends": {"B": row()}},
        {},
        "A → B",
        [],
        ["after: tiny has no A"],
    ),
    (
        "nothing accepts any more",
        {"backends": {"A": row()}},
        {"backends": {"A": row(rules=[{"when": {"arch": "g1"}, "reject": "it is broken there"}])}},
        {},
        "A → none",
        [],
        ["after: A: it is broken there"],
    ),
    (
        "something accepts at last",
        {"backends": {"A": row(requires={"arch": "g2"})}},
        {"backends": {"A": row()}},
        {},
        "none → A",
        [],
        ["before: A: arch is g1; needs g2"],
    ),
    (
        "more reasons than are told",
        {"backends": {"A": row(), "B": row(**SINKS, requires={"ranks": None})}},
        {
            "backends": {
                "A": row(requires={"ranks": 2, "eager": True, "arch": "g2", "block_size": 7}),
                "B": row(),
            }
        },
        {},
        "A → B",
        [],
        [
            "after: A: ranks is not given; needs 2",
            "after: A: eager is not given; needs true",
            "after: A: arch is g1; needs g2",
            "after: A: 1 more reasons",
        ],
    ),
    (
        "a user requires another",
        {"backends": {"A": row(), "B": row()}},
        {"backends": {"A": row(), "B": row()}, "overlays": [{"choices": [{"require": "B"}]}]},
        {},
        "A → B",
        [],
        ["after: required by <overlay>:3"],
    ),
    (
        "a user prefers another",
        {"backends": {"A": row(), "B": row()}},
        {"backends": {"A": row(), "B": row()}, "overlays": [{"choices": [{"prefer": "B"}]}]},
        {},
        "A → B",
        [],
        ["after: B: preferred by <overlay>:3 (order gpu/all, priorities.yaml:2); A is valid too, ranked lower"],
    ),
    (
        "variants are new",
        {"backends": {"A": row()}},
        {"backends": {"A": row(variants=VARIANTS)}},
        {},
        "A → A/V1",
        [],
        ["after: A has variants now; V1 is for arch g1"],
    ),
    (
        "a variant is gone",
        {"backends": {"A": row(variants=VARIANTS)}},
        {"backends": {"A": row(variants=VARIANTS[1:])}},
        {},
        "A/V1 → A/V2",
        [],
        ["after: A has no variant V1; V2 is for always"],
    ),
    (
        "a variant refuses",
        {"backends": {"A": row(variants=VARIANTS)}},
        {"backends": {"A": row(variants=[{"name": "V1", "when": {"arch": "g2"}}, VARIANTS[1]])}},
        {},
        "A/V1 → A/V2",
        [],
        ["after: A/V1: arch is g1; needs g2"],
    ),
    (
        "an earlier variant accepts at last",
        {"backends": {"A": row(variants=[{"name": "V1", "when": {"arch": "g2"}}, VARIANTS[1]])}},
        {"backends": {"A": row(variants=VARIANTS)}},
        {},
        "A/V2 → A/V1",
        [],
        ["before: A/V1: arch is g1; needs g2"],
    ),
    (
        "variants change places",
        {"backends": {"A": row(variants=[{"name": "V1"}, {"name": "V2"}])}},
        {"backends": {"A": row(variants=[{"name": "V2"}, {"name": "V1"}])}},
        {},
        "A/V1 → A/V2",
        [],
        ["after: A/V2 is tried before A/V1"],
    ),
    (
        "a variant is denied",
        {"backends": {"A": row(variants=VARIANTS)}},
        {"backends": {"A": row(variants=VARIANTS)}, "overlays": [{"choices": [{"deny": "A/V1"}]}]},
        {},
        "A/V1 → A/V2",
        [],
        ["after: A/V1: denied by the overlay"],
    ),
    (
        "a variant is denied no more",
        {"backends": {"A": row(variants=VARIANTS)}, "overlays": [{"choices": [{"deny": "A/V1"}]}]},
        {"backends": {"A": row(variants=VARIANTS)}},
        {},
        "A/V2 → A/V1",
        [],
        ["before: A/V1: denied by the overlay"],
    ),
    (
        "a user prefers another variant",
        {"backends": {"A": row(variants=VARIANTS)}},
        {"backends": {"A": row(variants=VARIANTS)}, "overlays": [{"choices": [{"prefer": "A/V2"}]}]},
        {},
        "A/V1 → A/V2",
        [],
        ["after: A/V2: preferred by <overlay>:3 (order gpu/all, priorities.yaml:2)"],
    ),
    (
        "it becomes slow",
        {"backends": {"A": row(**SINKS)}},
        {"backends": {"A": row(emulated={"sinks": "slow"})}},
        {"features": {"sinks"}},
        "A → A",
        ["emulates sinks (slow)"],
        ["after: the row of A"],
    ),
    (
        "the blocks of the KV cache are others",
        {"backends": {"A": row(capabilities={"block_sizes": {"multiple_of": 16}})}},
        {"backends": {"A": row(capabilities={"block_sizes": {"multiple_of": 64}})}},
        {},
        "A → A",
        ["block_size multiples of 16 → multiples of 64"],
        ["after: the row of A"],
    ),
    (
        "it is known to fail",
        {"backends": {"A": row()}},
        {"backends": {"A": row(consequences=[{"when": {"dtype": "bfloat16"}, "fails": "no kernel was built"}])}},
        {},
        "A → A",
        ["is chosen, and then fails: no kernel was built"],
        ["after: A fails"],
    ),
    (
        "it is no longer known to fail",
        {"backends": {"A": row(consequences=[{"fails": "no kernel was built"}])}},
        {"backends": {"A": row()}},
        {},
        "A → A",
        ["is no longer known to fail"],
        ["before: A fails"],
    ),
    (
        "it fails otherwise",
        {"backends": {"A": row(consequences=[{"fails": "no kernel was built"}])}},
        {"backends": {"A": row(consequences=[{"fails": "an assertion"}])}},
        {},
        "A → A",
        ["fails otherwise than before: an assertion"],
        ["after: A fails"],
    ),
    (
        "another workspace, and a kernel",
        {"backends": {"A": row(consequences=[{"workspace": "4 MiB"}])}},
        {"backends": {"A": row(consequences=[{"workspace": "8 MiB"}, {"runs": "the wide kernel"}])}},
        {},
        "A → A",
        [
            "kernel: not stated → the wide kernel",
            "workspace: 4.0 MiB → 8.0 MiB",
        ],
        ["after: the row of A", "after: the row of A", "before: the row of A"],
    ),
    (
        "it needs a newer package",
        {"backends": {"A": row(requires={"packages": ["lib"]})}},
        {"backends": {"A": row(requires={"packages": ["lib>=2"]})}},
        {},
        "A → A",
        ["needs lib → lib>=2"],
        ["after: the row of A"],
    ),
]


@pytest.mark.parametrize(
    ("before", "after", "facets", "titles", "changes", "reasons"), [w[1:] for w in WHY], ids=[w[0] for w in WHY]
)
def test_why_it_moves(
    before: Any, after: Any, facets: dict[str, Any], titles: str, changes: list[str], reasons: list[str]
) -> None:
    assert why(tiny.load(**before), tiny.load(**after), ask(**facets)) == (titles, changes, reasons)


def test_a_failure_is_cited_where_it_stands(tmp_path: Path) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text("backends:\n  TRITON_ATTN:\n    consequences: [{fails: it was seen to}]\n", encoding="utf-8")
    after = load_registry("default", overlays=[overlay])
    item, platform = ask(Platform(platform="cuda", arch="sm75"), head_size=64)
    (move,) = compare([item], [platform], load_registry("default"), after).moves
    assert [str(w) for w in move.why] == ["after: TRITON_ATTN fails  [mine.yaml:3]"]
    (move,) = compare([item], [platform], after, load_registry("default")).moves
    assert [str(w) for w in move.why] == ["before: TRITON_ATTN fails  [mine.yaml:3]"]


def test_what_a_backend_checks_at_last_is_no_move() -> None:
    loose = tiny.load({"A": row(unchecked=["sinks"])})
    strict = tiny.load({"A": row(**SINKS)})
    item, platform = ask(features={"sinks"})
    assert compare([item], [platform], loose, strict).moves == ()
    assert why(strict, loose, (item, platform))[1] == ["accepts sinks unchecked"]


def test_a_word_that_neither_registry_knows_is_no_all_clear() -> None:
    registry = tiny.load({"A": row()})
    for item, platform in (
        ask(kv_dtype="fp3"),
        ask(extra={"colour": "red"}),
        ask(Platform(platform="gpu", arch="g9")),
        ask(Platform(platform="gpu", arch="g1", flags={"quick"})),
    ):
        with pytest.raises(RequestError):
            compare([item], [platform], registry, registry)


def test_layers_that_only_one_side_has() -> None:
    request = AttentionRequest(head_size=8)
    questions = [Question(request, "l", "2 layers (0–1)"), Question(None, "mixer", "1 layer (2)")]
    registry = tiny.load({"A": row()})
    (item,) = paired("m", questions, [])
    (move,) = compare([item], [G1], registry, registry).moves
    assert (move.before.title, move.after.title) == ("A", "not known")
    assert [str(w) for w in move.why] == ["after: the model has no such layers"]
    assert compare(paired("m", questions, questions), [G1], registry, registry).moves == ()


def members(*indices: int) -> frozenset[object]:
    return frozenset(("", index) for index in indices)


def test_layers_that_the_two_sides_group_otherwise() -> None:
    plain, slow = AttentionRequest(head_size=8), AttentionRequest(head_size=8, kv_dtype="fp8")
    before = [
        Question(plain, "a", "4 layers (0–3)", members(0, 1, 2, 3)),
        Question(plain, "a", "1 layer (9)", members(9)),
    ]
    after = [
        Question(slow, "b", "2 layers (1–2)", members(1, 2)),
        Question(plain, "a", "2 layers (0, 3)", members(0, 3)),
    ]
    asked = [(item.layers, item.label, item.requests) for item in paired("m", before, after)]
    assert asked == [
        ("2 layers (1–2)", "b", (plain, slow)),
        ("2 layers (0, 3)", "a", (plain, plain)),
        ("1 layer (9)", "a", (plain, None)),
    ]
    # the prefill of a latent is no other request of the same layers
    prefill = AttentionRequest(head_size=8, phase="prefill")
    (old, new) = paired("m", [Question(plain, "", "x", members(0))], [Question(prefill, "", "y", members(0))])
    assert (old.requests, new.requests) == ((plain, None), (None, prefill))


def test_an_engine_that_asks_about_prompts_apart() -> None:
    whole, decode, prefill = (AttentionRequest(head_size=8, phase=phase) for phase in ("any", "decode", "prefill"))
    one, two = [Question(whole, "", "x")], [Question(decode, "", "x"), Question(prefill, "", "x")]
    assert [item.requests for item in paired("m", one, two)] == [(whole, decode), (whole, prefill)]
    assert [item.requests for item in paired("m", two, one)] == [(decode, whole), (prefill, whole)]
    # prompts apart beside both phases are another kernel's
    assert paired("m", one, [*one, two[1]])[1].requests == (None, prefill)


def questions_of(path: Path, registry: Registry, kv_dtype: str) -> list[Question]:
    """The questions about a model. Whisper's encoder is left out: 0.20 has no facet for it, and so no lock of 0.20."""
    asked = model_questions(str(path), ModelOptions(given={"kv_dtype": kv_dtype}), registry).questions
    return [q for q in asked if q.request is None or (q.request.role, q.request.model) != ("encoder", "whisper")]


def known_requests(registry: Registry, kv_dtype: str) -> Iterator[AskedGroup]:
    for name, path in bundled_configs().items():
        questions = questions_of(path, registry, kv_dtype)
        yield from paired(name, questions, questions)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e5m2"])
def test_diff_the_boxes_and_the_lock_agree_about_an_upgrade(kv_dtype: str, tmp_path: Path) -> None:
    before, after = (load_registry(name) for name in ("vllm-0.20.0", "vllm-0.33.0"))
    asked = [*known_requests(after, kv_dtype)]

    def both_serve(group: AskedGroup) -> bool:
        names = {str(dict(request.extra)["architecture"]) for request in group.requests if request}
        tables = [registry.architectures for registry in (before, after)]
        served = [table and table.of([name]) for table in tables for name in names]
        return all(one is not None and one.how == NATIVE for one in served)

    archs = ("sm75", "sm90", "sm100", "sm120", "gfx942", "gfx1250", "x86_64")
    architectures = after.vocabulary.architectures
    platforms = [Platform(platform=architectures[name].platform, arch=name) for name in archs]
    compared = compare(asked, platforms, before, after)
    moves = (*compared.moves, *compared.renamed)

    locked = tmp_path / "attnreg.lock"
    questions = {name: questions_of(path, before, kv_dtype) for name, path in bundled_configs().items()}
    locked.write_text(json.dumps(write_lock(before, questions, platforms)))
    by_lock = drift(read_lock(locked), after)
    assert len(by_lock.renamed) == len(compared.renamed) > 0
    drifted = (*by_lock.moves, *by_lock.renamed)
    # a lock has the facets of a config that its own release reads
    facts = [
        [(m.asked.model, m.asked.layers, m.asked.label, m.platform, m.before, m.after) for m in some]
        for some in (moves, drifted)
    ]
    assert len(moves) > 50
    assert sorted(facts[0], key=str) == sorted(facts[1], key=str)

    # the boxes hold every set of flags, and so those moves without any; they know no classes of models
    hopper = {(m.before.title, m.after.title) for m in moves if m.platform.arch == "sm90" and both_serve(m.asked)}
    requests = {item.requests[1] for item in asked if item.requests[1]}
    boxes = {(c.before, c.after) for c in diff(before, after, within={"arch": "sm90"}, requests=requests).changes}
    assert len(hopper) > 2
    assert {pair for pair in hopper if pair[0] != pair[1]} <= {(a or "none", b or "none") for a, b in boxes}


def test_a_run_that_was_refused_has_the_refusal_as_its_reason() -> None:
    before, after = (load_registry(name) for name in ("sglang-0.5.14", "sglang-0.5.23"))
    config = str(bundled_configs()["Qwen3-Next-80B-A3B-Instruct"])
    sides = [model_questions(config, ModelOptions(), registry).questions for registry in (before, after)]
    moves = compare(paired("m", *sides), [Platform(platform="rocm", arch="gfx942")], before, after).moves
    assert {(move.before.title, move.after.title) for move in moves} == {("none", "aiter")}
    assert {(w.side, w.text) for move in moves for w in move.why} == {
        ("before", "the prefix cache of a model with recurrent layers needs CUDA: --disable-radix-cache does without")
    }
