"""`attnreg show` of orders, features, architectures and steps, and what `attnreg list` leaves out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest


def test_show_prints_entries(run: Callable[..., Any]) -> None:
    result = run("show", "cuda/hopper-sinks")
    assert result.status == 0
    assert "cuda/hopper-sinks   order   priorities.yaml:" in result.out
    assert [e["kind"] for e in json.loads(run("show", "cuda/mha", "--json").out)["entries"]] == ["order"]
    assert [entry["name"] for entry in json.loads(run("show", "mha", "--json").out)["entries"]][:2] == [
        "cuda/mha",
        "rocm/mha",
    ]


UNKNOWN = [
    (["hopper-sink"], "default has no entry 'hopper-sink'", "did you mean `cuda/hopper-sinks`?"),
    (["flash_att"], "default has no entry 'flash_att'", "did you mean `FLASH_ATTN`?"),
    (
        ["HPC_ATTN"],
        "default has no entry 'HPC_ATTN'",
        "`attnreg show HPC_ATTN --registry vllm-0.33.0` shows that release's",
    ),
    (
        ["zzzzzz"],
        "default has no entry 'zzzzzz'",
        "`attnreg list` lists backends and orders, `attnreg models` model families",
    ),
]


@pytest.mark.parametrize(("words", "message", "help_"), UNKNOWN, ids=[case[0][0] for case in UNKNOWN])
def test_an_unknown_name_gets_one_suggestion(
    run: Callable[..., Any], words: list[str], message: str, help_: str
) -> None:
    assert run("show", *words) == (2, "", f"attnreg: {message}\n  help: {help_}\n")


def test_a_list_for_hardware_leaves_out_what_no_variant_of_can_run_there(run: Callable[..., Any]) -> None:
    names = {row_["name"] for row_ in json.loads(run("list", "--arch", "H100", "--json").out)["backends"]}
    assert "HOPPER_ATTN" in names
    assert "CUTLASS_MLA" not in names


def test_an_architecture_whose_table_was_not_read_shows_no_backends(run: Callable[..., Any]) -> None:
    shown = run("show", "gfx1151", "--engine", "vllm-0.33").out
    assert "not known: no table was read for it" in shown
    assert "FLASH_ATTN" not in shown
