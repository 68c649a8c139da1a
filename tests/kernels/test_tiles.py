"""Which tile a launch gets."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import pytest
from support import ROOT

from attnreg.kernels.triton.target import target_for
from attnreg.kernels.triton.tiles import (
    FACTS,
    TABLE,
    Config,
    Shape,
    _row,
    choose_config,
    columns_of,
    facts,
    matching_row,
    tile_rows,
    value_columns,
)

BASE = Shape(
    rows=16, short=True, group=4, block_d=128, block_dv=128, itemsize=2, cache_itemsize=2, paged=True, split=False,
    window=0, extras=False,
)  # fmt: skip
WIDE, WIDEST = {"block_d": 256, "block_dv": 256}, {"block_d": 512, "block_dv": 512}
FP8, FLOAT32 = {"cache_itemsize": 1}, {"itemsize": 4, "cache_itemsize": 4}
LONG = {"short": False, "rows": 128}
SHAPES = {
    "decode": {},
    "decode 64": {"block_d": 64, "block_dv": 64},
    "decode in a graph": {"pairs": 128},
    "64 in a graph": {"block_d": 64, "block_dv": 64, "pairs": 128},
    "decode 8-bit": FP8,
    "decode 64 8-bit": {"block_d": 64, "block_dv": 64, **FP8},
    "decode extras": {"extras": True},
    "decode both": {"extras": True, **FP8},
    "decode 256": WIDE,
    "decode 256 extras": {"extras": True, **WIDE},
    "decode 512": WIDEST,
    "decode float32": FLOAT32,
    "32 rows": {"rows": 32},
    "32 rows split": {"rows": 32, "split": True},
    "64 rows 8-bit": {"rows": 64, **FP8},
    "64 rows extras": {"rows": 64, "extras": True},
    "32 rows 256 extras": {"rows": 32, "extras": True, **WIDE},
    "64 rows 256": {"rows": 64, **WIDE},
    "64 rows 256 extras": {"rows": 64, "extras": True, **WIDE},
    "64 rows 512": {"rows": 64, **WIDEST},
    "128 rows": {"rows": 128},
    "prefill": LONG,
    "prefill packed": {**LONG, "paged": False},
    "prefill MLA": {**LONG, "block_d": 192, "paged": False},
    "prefill window": {**LONG, "window": 128},
    "prefill 1024": {**LONG, "window": 1024},
    "prefill split": {**LONG, "split": True},
    "prefill 8-bit": {**LONG, **FP8},
    "prefill extras": {**LONG, "extras": True},
    "prefill ranges": {**LONG, "extras": True, "ranges": True},
    "prefill mask": {**LONG, "extras": True, "mask": True},
    "prefill both": {**LONG, "extras": True, **FP8},
    "prefill 256": {**LONG, **WIDE},
    "256 extras": {**LONG, **WIDE, "extras": True},
    "256 8-bit": {**LONG, **WIDE, **FP8},
    "prefill 512": {**LONG, **WIDEST},
    "float32": {**LONG, **FLOAT32},
    "float32 extras": {**LONG, **FLOAT32, "extras": True},
    "float32 256": {**LONG, **FLOAT32, **WIDE},
    "float32 512": {**LONG, **FLOAT32, **WIDEST},
}
CHANGES = (
    {}, {"codes": "nibbles", "pairs": 64}, {"codes": "levels"}, {"codes": "others", "pairs": 64},
    {"block_d": 64, "block_dv": 64}, WIDE, {"rows": 64}, LONG, {**LONG, **WIDE}, {**LONG, "codes": "others"},
)  # fmt: skip
PACKED = tuple({**FP8, "packed": True, **more} for more in CHANGES)
TARGETS = {
    "sm75": ("cuda", 75, 40),
    "sm80": ("cuda", 80, 108),
    "sm90": ("cuda", 90, 132),
    "sm100": ("cuda", 100, 148),
    "sm120": ("cuda", 120, 188),
    "gfx942": ("hip", "gfx942", 304),
    "gfx1100": ("hip", "gfx1100", 96),
}

# rows x keys: warps, stages, programs per multiprocessor; / columns of the query at a time; + whole tiles apart
CHOSEN = """
                   sm75            sm80            sm90            sm100           sm120           gfx942       gfx1100
decode             16x32:8:1:2/64  16x64:4:2:4     16x64:4:2:5     16x64:4:2:4     16x64:4:2:4     16x32:4:2:2  16x32:8:2:2
decode 64          16x32:8:1:2/64  16x64:4:2:4     16x64:4:3:6     16x64:4:2:4     16x64:4:2:4     16x32:4:2:2  16x32:8:2:2
decode in a graph  16x32:8:1:2/64  16x64:4:2:4     16x64:4:2:4     16x64:4:2:4     16x64:4:2:4     16x32:4:2:2  16x32:8:2:2
64 in a graph      16x32:8:1:2/64  16x64:4:2:4     16x64:4:3:5     16x64:4:2:4     16x64:4:2:4     16x32:4:2:2  16x32:8:2:2
decode 8-bit       16x32:8:1:2/64  16x128:4:3:2    16x128:4:3:2    16x128:4:3:2    16x64:4:2:2     16x32:4:2:2  16x32:8:2:2
decode 64 8-bit    16x32:8:1:2/64  16x128:4:3:2    16x128:4:3:4    16x128:4:3:2    16x128:4:3:2    16x32:4:2:2  16x32:8:2:2
decode extras      16x32:8:1:2/64  16x32:4:2:4     16x64:4:2:5     16x32:4:2:4     16x32:4:2:4     16x32:4:2:2  16x32:8:2:2
decode both        16x32:8:1:2/64  16x32:8:2:4     16x32:8:2:4     16x32:8:2:4     16x32:8:2:4     16x32:4:2:2  16x32:8:2:2
decode 256         16x32:8:1:2/64  16x32:4:2:4     16x32:4:2:4     16x32:4:2:4     16x32:4:2:4     16x32:4:2:2  16x16:8:2:2/64
decode 256 extras  16x32:8:1:2/64  16x32:4:2:4     16x64:8:2:2     16x32:4:2:4     16x32:4:2:4     16x32:4:2:2  16x16:8:2:2/64
decode 512         16x16:8:1:2/32  16x32:8:2:4     16x32:8:2:4     16x32:8:2:4     16x32:8:2:4     16x16:4:1:2  16x16:8:2:2/64
decode float32     16x32:8:1:2/64  16x32:4:1:2     16x32:4:1:2     16x32:4:1:2     16x32:4:1:2     16x32:4:1:2  16x16:8:1:2/64
32 rows            16x32:8:1:2/64  32x64:8:2:2     32x64:4:3:2     32x64:4:3:2     32x64:8:2:2     32x32:4:2:2  32x32:8:2:2
32 rows split      16x32:8:1:2/64+ 32x64:8:2:2+    32x64:4:3:2+    32x64:4:3:2+    32x64:8:2:2+    32x32:4:2:2+ 16x16:8:2:2/64+
64 rows 8-bit      16x32:8:1:2/64  64x64:8:2:2     64x64:4:3:2     64x64:4:3:2     64x64:8:2:2     64x32:4:2:2  64x32:8:2:2
64 rows extras     16x32:8:1:2/64  32x32:8:2:1     64x64:4:3:2     64x64:8:2:1     32x32:8:2:1     32x32:4:2:2  32x32:8:2:2
32 rows 256 extras 16x32:8:1:2/64  32x32:8:2:1     32x64:4:2:2     32x64:8:2:1     32x32:8:2:1     32x32:4:2:2  16x16:8:2:2/64
64 rows 256        16x32:8:1:2/64  32x32:8:2:1     64x64:8:2:1     64x64:8:2:1     32x32:8:2:1     32x32:4:2:2  16x16:8:2:2/64
64 rows 256 extras 16x32:8:1:2/64  32x32:8:2:1     64x64:8:2:1     64x64:8:2:1     32x32:8:2:1     32x32:4:2:2  16x16:8:2:2/64
64 rows 512        16x16:8:1:2/32  16x32:8:2:1/128 16x32:8:2:1/128 16x32:8:2:1/128 16x32:8:2:1/128 16x16:4:1:2  16x16:8:2:2/64
128 rows           16x32:8:1:2/64  128x64:8:3:1    128x64:8:3:1    128x64:8:3:1    128x64:8:2:1    64x32:4:2:2  64x32:8:2:2
prefill            16x32:8:1:2/64  64x64:8:2:2     128x64:8:3:1+   64x64:8:3:1     64x64:8:2:2     64x32:4:2:2  64x32:8:2:2
prefill packed     16x32:8:1:2/64  64x64:8:2:2     64x64:4:3:2     64x64:8:3:1     64x64:8:2:2     64x32:4:2:2  64x32:8:2:2
prefill MLA        16x32:8:1:2/64  64x32:8:2:2     128x64:8:3:1+   128x32:8:3:1    64x32:8:2:2     32x32:4:2:2  16x16:8:2:2/64
prefill window     16x32:8:1:2/64  64x64:8:2:2     64x32:4:3:4     64x32:4:3:4     64x64:8:2:2     64x32:4:2:2  64x32:8:2:2
prefill 1024       16x32:8:1:2/64  64x64:8:2:2     128x64:8:3:1    64x64:8:3:1     64x64:8:2:2     64x32:4:2:2  64x32:8:2:2
prefill split      16x32:8:1:2/64+ 64x64:8:2:2+    128x64:8:3:1+   64x64:8:3:1+    64x64:8:2:2+    64x32:4:2:2+ 16x16:8:2:2/64+
prefill 8-bit      16x32:8:1:2/64  64x32:8:2:2     128x128:8:3:1   64x32:8:3:1     64x32:8:2:2     64x32:4:2:2  64x32:8:2:2
prefill extras     16x32:8:1:2/64  64x32:4:2:2     64x64:4:3:2     64x64:8:3:1     64x32:4:2:2     32x32:4:2:2  32x32:8:2:2
prefill ranges     16x32:8:1:2/64  64x32:8:2:2     64x64:8:3:1     64x64:8:3:1     64x32:8:2:2     32x32:4:2:2  32x32:8:2:2
prefill mask       16x32:8:1:2/64  64x32:8:2:2     64x64:8:3:1     64x64:8:3:1     64x32:8:2:2     32x32:4:2:2  16x16:8:2:2/64
prefill both       16x32:8:1:2/64  32x32:8:2:2     64x32:8:3:1     64x32:8:3:1     32x32:8:2:2     32x32:4:2:2  32x32:8:2:2
prefill 256        16x32:8:1:2/64  64x32:8:2:2     128x32:8:3:1    128x32:8:3:1    64x32:8:2:2     32x32:4:2:2  16x16:8:2:2/64
256 extras         16x32:8:1:2/64  32x32:8:2:2     128x32:8:3:1    64x64:8:2:1     64x32:8:2:2     32x32:4:2:2  16x16:8:2:2/64
256 8-bit          16x32:8:1:2/64  64x32:8:2:2     64x64:8:2:1     64x64:8:2:1     32x32:8:2:2     16x32:4:2:2  16x16:8:2:2/64
prefill 512        16x16:8:1:2/32  32x32:8:2:1     32x32:8:2:1     32x32:8:2:1     16x32:8:2:1     16x16:4:1:2  16x16:8:2:2/64
float32            16x32:8:1:2/64  16x32:4:1:2     16x32:4:1:2     16x32:4:1:2     16x32:4:1:2     16x32:4:1:2  16x16:8:1:2/64
float32 extras     16x32:8:1:2/64  16x32:8:1:2/64  16x32:8:1:2/64  16x32:8:1:2/64  16x32:8:1:2/64  16x32:4:1:2  16x16:8:1:2/64
float32 256        16x16:8:1:2/64  16x32:8:1:2/64  16x32:8:1:2/64  16x32:8:1:2/64  16x32:8:1:2/64  16x16:4:1:2  16x16:8:1:2/64
float32 512        16x16:8:1:2/32  16x16:8:1:2/32  16x16:8:1:2/32  16x16:8:1:2/32  16x16:8:1:2/32  16x16:4:1:2  16x16:8:1:2/32
"""  # noqa: E501


def cells() -> list[tuple[str, str, str]]:
    """The shape, the target and what is chosen, for each cell of the table."""
    head, *lines = CHOSEN.strip("\n").splitlines()
    targets, width = head.split(), len(head) - len(head.lstrip())
    chosen = []
    for line in lines:
        chosen += [(line[:width].strip(), *pair) for pair in zip(targets, line[width:].split(), strict=True)]
    return chosen


def short(config: Config) -> str:
    """A configuration as the table has it."""
    text = f"{config.block_m}x{config.block_n}:{config.num_warps}:{config.num_stages}:{config.programs_per_sm}"
    return text + (f"/{config.block_k}" if config.block_k else "") + ("+" if config.peel else "")


def test_every_target_gets_its_tiles() -> None:
    chosen = [
        (shape, target, short(choose_config(target_for(*TARGETS[target]), BASE._replace(**SHAPES[shape]))))
        for shape, target, _ in cells()
    ]
    assert len(chosen) == len(SHAPES) * len(TARGETS)
    assert chosen == cells()


# latents of 512 with rotary parts of 64: in 16 bits, in 8 with one scale, and with a scale for each tile
LATENTS = [
    {"latent": True, "rows": rows, "short": True, "group": 128, "block_d": 64, "block_dv": 512, "paged": True, **stored}
    for rows in (16, 64)
    for stored in (
        {}, {"cache_itemsize": 1}, {"cache_itemsize": 1, "tile_scales": True},
        {"cache_itemsize": 1, "tile_scales": True, "group": 16}, {"itemsize": 4},
    )
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_tiles_of_latents_fit(target: Any) -> None:
    for changes in LATENTS:
        config = choose_config(target_for(*target), BASE._replace(**changes))
        assert config.block_m <= 64
        assert config.block_n <= 64


def test_every_row_of_the_table_is_somebodys() -> None:
    reached = {
        id(matching_row(target_for(*target), BASE._replace(**changes)))
        for target in TARGETS.values()
        for changes in (*SHAPES.values(), *LATENTS, *PACKED)
    }
    assert [row.when.describe() for row in TABLE if id(row) not in reached] == []


@pytest.mark.parametrize("target", TARGETS)
def test_packed_caches_have_tiles_of_their_own(target: str) -> None:
    for changes in PACKED:
        assert "packed yes" in matching_row(target_for(*TARGETS[target]), BASE._replace(**changes)).when.describe()


def test_the_last_row_is_everybodys() -> None:
    assert TABLE[-1].when.describe() == "always"


def test_tiles_fit_the_shared_memory() -> None:
    small = target_for("cuda", 90, 132)._replace(shared_memory=65536)
    assert short(choose_config(small, BASE._replace(**SHAPES["128 rows"]))) == "64x32:8:2:1"


@pytest.mark.parametrize(("rows", "tile"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128), (2048, 128)])
def test_a_tile_has_rows_by_powers_of_2(rows: int, tile: int) -> None:
    assert tile_rows(rows) == tile


def test_a_row_may_name_facts_alone() -> None:
    with pytest.raises(ValueError, match="no launch has the fact heads; there are gpu, sm, "):
        _row({"gpu": "cdna", "heads": 4}, Config(16, 16, 4, 2))
    with pytest.raises(TypeError, match="maximum"):
        _row({"width": {"maximum": 4}}, Config(16, 16, 4, 2))


def test_facts_are_those_that_are_explained() -> None:
    assert facts(target_for("cuda", 90, 132), BASE).keys() == FACTS.keys()


def test_what_the_benchmark_records_is_measured(benchmark_cases: list[Any]) -> None:
    machine = json.loads((ROOT / "benchmarks/results/attention.json").read_text(encoding="utf-8"))["machine"]
    h200 = target_for("cuda", 90, 132)
    for case in benchmark_cases:
        group = case.heads[0] // case.heads[1]
        shape = BASE._replace(
            rows=tile_rows(case.queries * group),
            short=case.queries <= 16,
            group=group,
            block_d=case.head_size,
            block_dv=case.head_size,
            cache_itemsize=2 if case.kv_dtype == "auto" else 1,
            paged=case.block_size is not None,
            window=case.window or 0,
        )
        measured = matching_row(h200, shape).measured
        assert measured is not None, case.name
        device, _, date = measured.rpartition(", ")
        # the benchmark may have run again since
        assert (device, date <= machine["date"]) == (machine["device"], True), case.name


@pytest.fixture
def benchmark_cases(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The cases of benchmarks/attention.py, which is a program."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("benchmark_attention", ROOT / "benchmarks/attention.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look for their module
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return [*module.CASES, *module.ROCM_CASES]


@pytest.mark.parametrize(
    ("sizes", "columns"),
    [((1, 1), 16), ((20, 20), 32), ((72, 72), 80), ((96, 64), 96), ((100, 100), 128), ((128, 64), 128),
     ((192, 128), 192), ((192, 192), 256), ((256, 256), 256), ((576, 512), 576)],
)  # fmt: skip
def test_columns_of_a_product(sizes: tuple[int, int], columns: int) -> None:
    assert columns_of(*sizes, quantised=False) == columns
    assert columns_of(*sizes, quantised=True) in (columns, 16, 32, 64, 128, 256, 512, 1024)


@pytest.mark.parametrize(
    ("arch", "keys", "size", "itemsize", "columns"),
    [
        # two swizzles of one address, of which ptxas loses one
        (90, 64, 32, 2, 64), (90, 576, 32, 2, 64), (100, 128, 32, 2, 64),
        # one swizzle
        (90, 32, 32, 2, 32), (90, 48, 32, 2, 32), (90, 32, 100, 2, 128), (90, 128, 64, 2, 64),
        # no warpgroups
        (90, 128, 32, 4, 32), (80, 128, 32, 2, 32), (120, 128, 32, 2, 32),
    ],
)  # fmt: skip
def test_columns_of_values(arch: int, keys: int, size: int, itemsize: int, columns: int) -> None:
    assert value_columns(target_for("cuda", arch, 132), keys, size, itemsize) == columns
