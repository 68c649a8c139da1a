"""Measure the MLA family on a GPU: merging of states, decode, prefill; each case beside its mark and its peers.

python benchmarks/mla.py                 print a table
python benchmarks/mla.py --case merge    only the cases with this word in their names
python benchmarks/mla.py --record        write benchmarks/results/mla.json too

A sample is taken as in benchmarks/attention.py: a CUDA graph's replay of one call, with a cold L2 cache. Peers are
measured in the same run where they can be imported: vLLM's and FlashInfer's kernels, FlashMLA, and torch's attention.
Each kind of case is a module beside this, with a function `cases`.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import mla_merge
import mla_prefill
import torch
import triton  # type: ignore[import-untyped]
from attention import ceilings, time_us
from mla_case import Case

RESULTS = Path(__file__).resolve().parent / "results" / "mla.json"
KINDS = (mla_merge, mla_prefill)


def measure(case: Case, limits: dict[str, float], with_peers: bool) -> dict[str, Any]:
    """The figures of one case: time, error, floor, and the peers' times."""
    # no case gets fragments of the last one's memory
    torch.cuda.empty_cache()
    trial = case.prepare()
    us = time_us(trial.call)
    error = trial.error()
    bandwidth = limits["copy GB/s" if trial.copies else "read GB/s"]
    floor = max(trial.moved / bandwidth / 1e3, trial.operations / limits["bf16 matmul TFLOP/s"] / 1e6)
    row: dict[str, Any] = {"case": case.name, "us": round(us, 1), "mark": case.mark, "met": us <= case.mark,
                           "floor": round(floor, 1), "error": float(f"{error:.2g}"),
                           "correct": error <= trial.max_error, "peers": {}}  # fmt: skip
    for name, call in trial.peers() if with_peers else ():
        try:
            row["peers"][name] = round(time_us(call), 1)
        except (RuntimeError, ValueError, NotImplementedError) as problem:
            row["peers"][name] = f"refused: {str(problem).splitlines()[0][:90]}"
    return row


def show(rows: list[dict[str, Any]], machine: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, {machine['date']}")
    peers = [*dict.fromkeys(name for row in rows for name in row["peers"])]
    for column in ("case", "µs", "mark", "", "floor", "error", *peers):
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for row in rows:
        verdict = "[green]met[/]" if row["met"] else "[red]missed[/]"
        others = [str(row["peers"].get(name, ""))[:9] for name in peers]
        table.add_row(row["case"], str(row["us"]), str(row["mark"]), verdict if row["correct"] else "[red]WRONG[/]",
                      str(row["floor"]), str(row["error"]), *others)  # fmt: skip
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", help="only the cases with this word in their names")
    parser.add_argument("--no-peers", action="store_true", help="measure attnreg's kernels alone")
    parser.add_argument("--record", type=Path, nargs="?", const=RESULTS, help=f"write {RESULTS.name} (or another file)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/mla.py measures a GPU, and torch sees none")
    machine = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": date.today().isoformat(),
    }
    limits = ceilings()
    print(machine, limits, flush=True)
    rows = []
    with torch.inference_mode():
        for case in (case for kind in KINDS for case in kind.cases()):
            if options.case in case.name:
                rows.append(measure(case, limits, not options.no_peers))
                print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    show(rows, machine)
    if options.record:
        result = {"machine": machine, "ceilings": limits, "figures": rows}
        options.record.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
