"""Measure attnreg's kernels on a GPU with the Triton that is installed, to compare releases of it.

python benchmarks/triton_releases.py             print the cases
python benchmarks/triton_releases.py --record    add them to benchmarks/results/triton_releases.json

The runs of a machine follow each other in the file: a run is compared with the one of triton 3.6 before it.

The cases are those of side_by_side.py, mla.py and turboquant.py, without peers. docs/speed.md compares them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mla
import side_by_side
import torch
import turboquant
from kernel_case import Place
from measuring import machine, parser_of, require_gpus, time_us

OWN = (side_by_side.OURS, side_by_side.TWIN)
WORDS = (
    "prefill 4k b4", "gpt-oss 4k b4", "prefill fp8 4k b4", "prefill 2k on 8k b4, heads of 256", "60 decodes at 8k",
    "decode b64 8k", "decode b1 8k", "decode fp8 b64", "decode b64 h128 at 8k", "decode fp8_ds_mla b64",
    "HOPPER_MLA decode", "decode turboquant",
)  # fmt: skip


def cases(words: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The microseconds of each case with one of the words in its name, and its error against float64."""
    for case in side_by_side.CASES:
        if any(word in case.name for word in words):
            row = side_by_side.measure(case, [*OWN])
            yield {"case": case.name, "us": {name: row["us"][name] for name in OWN}, "error": row["errors"]}
    for one in (*mla.cases(Place(), ""), *turboquant.cases(Place())):
        if any(word in one.name for word in words):
            torch.cuda.empty_cache()
            trial = one.prepare()
            us = min(time_us(trial.call, captured=trial.captured) for _ in range(2))
            yield {"case": one.name, "us": {"": round(us, 1)}, "error": {"": float(f"{trial.error():.2g}")}}


def main() -> None:
    parser = parser_of("triton_releases", __doc__)
    parser.add_argument("--case", action="append", default=[], help="only the cases with this word; repeatable")
    options = parser.parse_args()
    require_gpus("triton_releases")
    rows = []
    with torch.inference_mode():
        for row in cases(tuple(options.case) or WORDS):
            print(json.dumps(row), flush=True)
            rows.append(row)
    if options.record is not None:
        record(options.record, rows)


def record(file: Path, rows: list[dict[str, Any]]) -> None:
    """Add a run to the file."""
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.exists() else []
    runs.append({"machine": machine(), "figures": rows})
    file.write_text(json.dumps({"runs": runs}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
