"""HOPPER_ATTN's kernel for few queries on a machine without a GPU: compiled, and for which launches it is planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.compilers.compiler import Compiler
from support.layers.kernel_trials import Case

from attnreg.kernels.hopper import decode_plans
from attnreg.kernels.triton.planned.arguments import AttentionTensors
from attnreg.kernels.triton.schedule import KeyLengths, Launch
from attnreg.kernels.triton.target import target_for
from attnreg.kernels.triton.tiles import Config


# a product is of 16 keys, or words, by 16 columns, or keys, by 8 rows; a load is of 16 bytes a lane,
# but those of values of 64, which are not counted
@pytest.mark.parametrize(
    ("name", "products", "loads", "registers"),
    [
        # two pages a warp; two programs a multiprocessor have 255 registers, three 168, five 96
        ("8 rows", 2 * (8 + 8), 2 * (4 + 4), 255),
        ("16 rows, e5m2, HND", 2 * (8 + 8), 4 + 4, 255),
        ("heads of 64, window, sinks", 4 + 4, 2, 96),
        ("heads of 64, 16 rows, softcap", 2 * (4 + 4), 2, 168),
    ],
)
def test_the_loop_waits_for_no_other_warp(
    compiler: Compiler, name: str, products: int, loads: int, registers: int
) -> None:
    kernel = compiler.call("hopper_attn", "compiled_decode", name)
    assert not kernel.spills
    assert (kernel.products, kernel.loads, kernel.barriers) == (products, loads, 0)
    assert kernel.registers <= registers


@pytest.mark.parametrize(
    ("name", "registers"),
    [("16 rows, e5m2, HND", 255), ("heads of 64, 16 rows, softcap", 168), ("many requests", 255)],
)
def test_sharing_keys_out_leaves_the_loop_as_it_is(compiler: Compiler, name: str, registers: int) -> None:
    alone, shared = (compiler.call("hopper_attn", "compiled_decode", name, in_graph) for in_graph in (False, True))
    assert not shared.spills
    assert (shared.products, shared.loads, shared.barriers) == (alone.products, alone.loads, 0)
    assert shared.registers <= registers


CASES: list[tuple[str, list[int], list[int], dict[str, Any], list[int]]] = [
    ("tokens", [1, 1], [900, 9], {}, [8]),
    ("two queries of groups of 8", [2, 2], [900, 9], {"heads": (16, 2)}, [16]),
    ("one head a group", [1], [900], {"heads": (8, 8)}, [8]),
    ("tokens beside a prompt", [1, 300], [900, 300], {}, [8]),
    ("prompts alone", [300], [300], {}, []),
    ("more rows than a tile has", [5, 1], [900, 9], {}, []),
    ("wide heads", [1], [900], {"head_size": 256}, []),
    ("values of another width", [1], [900], {"head_size_v": 64}, []),
    ("16 bits", [1], [900], {"kv_dtype": "auto"}, []),
    ("pages of another size", [1], [900], {"block_size": 24}, []),
    ("requests that differ in causality", [1, 1], [900, 9], {"causal": [True, False]}, []),
    ("slopes, which the kernel does not add", [1], [900], {"features": frozenset({"alibi"})}, []),
    # of the class of several queries the largest has 16, and that of one query is alone
    ("batch invariant, one query", [1, 1], [900, 9], {"features": frozenset({"batch_invariant"})}, [8]),
    ("batch invariant, two queries", [2, 1], [900, 9], {"features": frozenset({"batch_invariant"})}, [8]),
]


@pytest.mark.parametrize(("queries", "keys", "facts", "rows"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_launches_of_the_kernel(
    compiler: Compiler, queries: list[int], keys: list[int], facts: dict[str, Any], rows: list[int]
) -> None:
    launches = compiler.call("hopper_attn", "rows_of_decode", queries, keys, facts)
    assert [of for of, _ in launches] == rows


@pytest.mark.parametrize(
    ("requests", "keys", "facts", "splits"),
    [
        # 8 KV heads, and 264 programs at once
        (64, 8192, {}, 1), (8, 131072, {}, 4), (1, 256, {}, 2), (1, 131072, {}, 32), (4, 8448, {}, 8),
        # of a window there are few keys to split
        (8, 131072, {"sliding_window": 128, "features": frozenset({"sliding_window"})}, 1),
    ],
)  # fmt: skip
def test_splits_fill_the_multiprocessors(
    monkeypatch: pytest.MonkeyPatch, requests: int, keys: int, facts: dict[str, Any], splits: int
) -> None:
    monkeypatch.setattr(decode_plans, "target_of", lambda device: target_for("cuda", 90, 132))
    spec = replace(Case([1], [1], heads=(32, 8), head_size=128, dtype=torch.bfloat16, kv_dtype="fp8").spec, **facts)
    cache = torch.zeros(2, 16, 8, 128, dtype=torch.float8_e4m3fn)
    token = Launch(Config(16, 64, 4, 3), 1, 1, 4, True, 7, 256, 1)
    query = torch.zeros(requests, 32, 128)
    few = decode_plans.FewQueries(spec, True, [1] * requests, KeyLengths.alike(keys), query.device)
    launch = decode_plans.planned(few, token, AttentionTensors(query, cache, cache, query))
    assert launch is not None
    assert launch.chosen.splits == splits


@pytest.mark.parametrize(
    ("requests", "facts", "shared"),
    [
        # 264 programs at once, of 8 KV heads; and of one, with more rows
        (64, {}, 33), (1000, {}, 33), (8, {"num_heads": 8, "num_kv_heads": 1}, 264),
        (1, {}, 0), (1025, {}, 0),
        (64, {"sliding_window": 128, "features": frozenset({"sliding_window"})}, 0),
        (64, {"features": frozenset({"batch_invariant"})}, 0),
    ],
    ids=("64", "1000", "one KV head", "one", "too many", "window", "batch_invariant"),
)  # fmt: skip
def test_programs_share_keys_out_in_graphs(
    monkeypatch: pytest.MonkeyPatch, requests: int, facts: dict[str, Any], shared: int
) -> None:
    monkeypatch.setattr(decode_plans, "target_of", lambda device: target_for("cuda", 90, 132))
    spec = replace(Case([1], [1], heads=(32, 8), head_size=128, dtype=torch.bfloat16, kv_dtype="fp8").spec, **facts)
    cache = torch.zeros(2, 16, spec.num_kv_heads, 128, dtype=torch.float8_e4m3fn)
    token = Launch(Config(16, 64, 4, 3), 1, 1, spec.num_heads // spec.num_kv_heads, True, 7, 256, 1)
    query = torch.zeros(requests, spec.num_heads, 128)
    few = decode_plans.FewQueries(spec, True, [1] * requests, KeyLengths.any_of(131072), query.device)
    launch = decode_plans.planned(few, token, AttentionTensors(query, cache, cache, query))
    assert launch is not None
    assert launch.chosen.shared == shared
    assert launch.variant.code.shares is None or launch.variant.code.shares.programs == shared
    assert (launch.merge is not None) == (launch.chosen.splits > 1 or shared > 0)


@pytest.mark.parametrize(
    ("features", "apart", "planned"),
    [(("batch_invariant",), 520, True), (("batch_invariant",), 513, False), (("lse",), 513, True)],
    ids=["rows of 16 bytes", "other rows", "of no batch-invariant layer"],
)
@pytest.mark.parametrize("other", ["query", "output"])
def test_the_kernel_of_a_request_depends_on_no_other_request(
    monkeypatch: pytest.MonkeyPatch, features: tuple[str, ...], apart: int, planned: bool, other: str
) -> None:
    """Rows that begin at odd addresses run the portable kernel, so no row of such a batch may run this one."""
    monkeypatch.setattr(decode_plans, "target_of", lambda device: target_for("cuda", 90, 132))
    spec = Case([1], [1], heads=(4, 1), head_size=128, dtype=torch.bfloat16, kv_dtype="fp8").spec
    spec = replace(spec, features=frozenset(features))
    cache = torch.zeros(2, 16, 1, 128, dtype=torch.float8_e4m3fn)
    token = Launch(Config(16, 64, 4, 3), 1, 1, 4, True, 7, 256, 1)
    rows = torch.zeros(3, apart, dtype=torch.bfloat16)[:, :512].unflatten(1, (4, 128))
    even = torch.zeros(3, 4, 128, dtype=torch.bfloat16)
    tensors = AttentionTensors(query=even, key=cache, value=cache, output=even)._replace(**{other: rows})
    few = decode_plans.FewQueries(spec, True, [1] * 3, KeyLengths.alike(900), even.device)
    assert (decode_plans.planned(few, token, tensors) is not None) == planned
