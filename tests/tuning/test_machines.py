"""Machines that samples name: a file that somebody made up and signed is refused where no such machine can be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT
from support.suite.examples import examples

import attnreg
from attnreg import AttentionRequest
from attnreg.analysis.check.evidence import contradictions
from attnreg.analysis.timings.machines import impossible, of_the_future
from attnreg.analysis.timings.samples import Cell, Samples, read_samples, signature
from attnreg.cli.commands import main
from attnreg.loader import load_registry

REQUEST = AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8, block_size=16)
LATENT = AttentionRequest(
    head_size=576, head_size_v=512, num_heads=16, num_kv_heads=1, block_size=64, attention="mla", kv_lora_rank=512
)
H200 = {"platform": "cuda", "arch": "sm90", "device": "NVIDIA H200", "packages": {"torch": "2.11"}}


DECODE = Cell(REQUEST, 32, 1, 4095)


def samples(cell: Cell = DECODE, us: float = 1e4, **machine: Any) -> Samples:
    out = Samples({**H200, **machine}, "default@1", {"A": "1"}, "2026-11-26", cells=[cell])
    out.turns = {(0, "A"): [[us + turn, us + 1.5, us + 2.5] for turn in range(4)]}
    return out


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({}, ""),
        ({"device": "NVIDIA H100 80GB HBM3"}, ""),
        ({"device": "NVIDIA Something 9"}, ""),
        ({"device": "NVIDIA A100-SXM4-80GB"}, "NVIDIA A100-SXM4-80GB is sm80, and the file says sm90"),
        ({"arch": "gfx942"}, "gfx942 is no architecture of cuda"),
        ({"arch": "sm91"}, "sm91 is no architecture of cuda"),
        ({"platform": "tpu"}, "there is no platform 'tpu'"),
    ],
)
def test_a_machine_that_there_cannot_be(default: attnreg.Registry, machine: Any, message: str) -> None:
    found = impossible(samples(**machine), default.vocabulary)
    assert found.startswith(message) if message else not found


@pytest.mark.parametrize(
    ("cell", "floor"),
    [
        # 512 MiB of keys and values at 4.8 TB/s
        (DECODE, 111.8),
        # half of 4 x 32 heads x 2,048 x 2,048 pairs of 2 x 256 operations at 990 teraflops
        (Cell(REQUEST, 4, 2048, 0), 138.8),
        # an H200's memory holds latents once
        (Cell(LATENT, 512, 1, 4095), 503.3),
        # 8-bit keys: half of the bytes
        (Cell(replace(REQUEST, kv_dtype="fp8"), 32, 1, 4095), 55.9),
    ],
)
def test_times_that_no_such_device_can_reach(default: attnreg.Registry, cell: Cell, floor: float) -> None:
    """Its clocks may be raised, and its caches keep something: so much more is allowed, and no more."""
    assert cell.least_us(4800, 990) == pytest.approx(floor, rel=0.01)
    assert not impossible(samples(cell, 0.7 * floor), default.vocabulary)
    found = impossible(samples(cell, 0.6 * floor), default.vocabulary)
    assert found.startswith(f"A, {cell.words}: ")
    assert "H200 takes" in found
    # another machine may be faster
    assert not impossible(samples(cell, 0.6 * floor, device="NVIDIA Something 9"), default.vocabulary)


def seen(cell: Cell, limit: Callable[[int, int], bool]) -> tuple[set[int], int]:
    """The keys that the queries of a cell see, and how many pairs they are, counted one by one."""
    pairs = [
        (query, key)
        for query in range(cell.context, cell.context + cell.queries)
        for key in range(query + 1)
        if limit(query, key)
    ]
    return {key for _, key in pairs}, len(pairs)


LIMITS: dict[str, Callable[[int], tuple[tuple[str, Any], Callable[[int, int], bool]]]] = {
    "sliding_window": lambda n: (("sliding_window", n), lambda query, key: query - key < n),
    "asymmetric_window": lambda n: (("asymmetric_window", (n - 1, 2)), lambda query, key: query - key < n),
    "chunk": lambda n: (("chunk", n), lambda query, key: query // n == key // n),
}


@examples(100)
@given(st.sampled_from([*LIMITS]), st.integers(1, 20), st.integers(1, 30), st.integers(0, 30))
def test_no_more_is_counted_than_is_seen(feature: str, number: int, queries: int, context: int) -> None:
    numbers, limit = LIMITS[feature](number)
    cell = Cell(replace(REQUEST, features=frozenset({feature})), 1, queries, context, (numbers,))
    keys, pairs = seen(cell, limit)
    # the pairs exactly; of the keys of a window those of one query
    assert cell._seen()[1] == pairs
    assert (cell._seen()[0] == len(keys)) if feature == "chunk" else (cell._seen()[0] <= len(keys))


CHOSEN = replace(LATENT, attention="mla_sparse", num_heads=128, index_topk=2048)


@pytest.mark.parametrize(
    ("cell", "floor"),
    [
        # 64 requests of 2,048 latents each, and as many queries of 16 heads with their outputs
        (Cell(replace(CHOSEN, num_heads=16), 64, 1, 32767), (64 * 2048 * 576 + 64 * 16 * 1088) * 2 / 4.8e6),
        # 2,048 queries, of which the last sees 2,048 latents: 2 x 128 x 1,088 operations a pair
        (Cell(CHOSEN, 1, 2048, 8192), 2048 * 2048 * 2 * 128 * 1088 / 990e6),
        # how many tokens are chosen is not known: queries and outputs alone
        (Cell(replace(CHOSEN, index_topk=None), 4096, 1, 32767), 4096 * 128 * 1088 * 2 / 4.8e6),
        (Cell(replace(REQUEST, features={"sparse_blocks"}), 4096, 1, 4095), 4096 * 32 * 256 * 2 / 4.8e6),
        # the last chunk of 1,024 has 512 keys
        (Cell(replace(REQUEST, features={"chunk"}), 512, 1, 4607, (("chunk", 1024),)),
         512 * (512 * 8 + 32) * 256 * 2 / 4.8e6),
        (Cell(replace(REQUEST, features={"asymmetric_window"}), 512, 1, 4095, (("asymmetric_window", (255, 0)),)),
         512 * (256 * 8 + 32) * 256 * 2 / 4.8e6),
        # of what is that small, the launch
        (Cell(replace(REQUEST, features={"chunk"}), 1, 1, 1024), 1.0),
    ],
)  # fmt: skip
def test_no_form_of_attention_is_timed_without_a_bound(default: attnreg.Registry, cell: Cell, floor: float) -> None:
    assert cell.least_us(4800, 990) == pytest.approx(floor, rel=0.01)
    assert cell.least_us() >= 1
    if floor > 1:
        assert "H200 takes" in impossible(samples(cell, 0.6 * floor), default.vocabulary)


def test_what_was_measured_is_possible(default: attnreg.Registry) -> None:
    for file in sorted((ROOT / "registry/measurements").glob("*.jsonl")):
        assert impossible(read_samples(file), default.vocabulary) == ""


def test_every_gpu_that_has_a_name_says_what_it_can_do(default: attnreg.Registry) -> None:
    for word in default.vocabulary.words_of("device").values():
        assert 0 < word.facts["gigabytes"] < 50_000, word.name
        assert 0 < word.facts.get("teraflops", 1) < 10_000, word.name


def test_a_day_that_has_not_been() -> None:
    tomorrow = date.today() + timedelta(days=1)
    assert not of_the_future(replace(samples(), date=tomorrow.isoformat()))
    later = (tomorrow + timedelta(days=1)).isoformat()
    assert of_the_future(replace(samples(), date=later)) == f"the samples are of {later}, and today is {date.today()}"


def test_a_made_up_file_ranks_nothing(
    default: attnreg.Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Signed anew, as whoever makes one up does it: `tune --from` refuses it, and `check` finds it."""
    found = read_samples(ROOT / "registry/measurements/nvidia_h200_2026-11-26.jsonl")
    for turns in found.turns.values():
        turns[0][0] /= 4
    lines = [found.head(), *({"cell": cell.to_dict()} for cell in found.cells)]
    for (cell, backend), turns in found.turns.items():
        lines += [{"us": turn, "of": cell, "backend": backend} for turn in turns]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file = tmp_path / "faster.jsonl"
    file.write_text(text + json.dumps(signature(found.machine, text.encode())) + "\n")
    assert main(["tune", "--from", str(file), "-o", str(tmp_path / "t.yaml")]) == 2
    assert "H200 takes" in capsys.readouterr().err
    assert not (tmp_path / "t.yaml").exists()
    order = next(o for orders in default.orders.values() for o in orders if o.measured is not None)
    assert order.measured is not None
    (finding,) = contradictions(default, order, replace(order.measured, file=str(file)))
    assert finding.code == "missing-evidence"
    assert "H200 takes" in finding.message


@pytest.mark.parametrize("most", ["0", "-1", "fast", "true"])
def test_what_a_device_can_do_is_a_number(most: str, tmp_path: Path) -> None:
    overlay = tmp_path / "o.yaml"
    overlay.write_text(
        f'vocabulary:\n  words:\n    devices:\n      H300: {{arch: sm90, gigabytes: {most}, legend: "A GPU."}}\n'
    )
    with pytest.raises(attnreg.RegistryError, match="gigabytes are a number of at least 1, got"):
        load_registry(None, [overlay])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        # three digits are stated
        ({"ratio": 1.11}, None),
        ({"ratio": 1.31}, "its samples show HOPPER_ATTN to be 1.11x as fast as FLASH_ATTN/FA3, not 1.31x"),
        ({"of": "FLASH_ATTN/FA3", "over": "HOPPER_ATTN"},
         "its samples show FLASH_ATTN/FA3 to be 0.90x as fast as HOPPER_ATTN, not 1.11x"),
        ({"over": "TORCH_SDPA/cuDNN"},
         "in no sample of a request that it takes were HOPPER_ATTN and TORCH_SDPA/cuDNN timed side by side"),
    ],
)  # fmt: skip
def test_an_order_that_states_what_was_not_measured(
    default: attnreg.Registry, changes: dict[str, Any], says: str | None
) -> None:
    (order,) = (order for order in default.orders["cuda"] if order.name == "hopper-prompts")
    assert order.measured is not None
    found = [finding.message for finding in contradictions(default, order, replace(order.measured, **changes))]
    assert found == ([] if says is None else [f"cuda/hopper-prompts says what was not measured: {says}"])
