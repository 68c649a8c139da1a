"""Measure the MLA family on a GPU: merging of states, decode, prefill; each case beside its mark and its peers.

python benchmarks/mla.py                 print a table
python benchmarks/mla.py --case merge    only the cases with this word in their names
python benchmarks/mla.py --record        write benchmarks/results/mla.json too
python benchmarks/mla.py --dry-run       run every case at small sizes, on a processor with TRITON_INTERPRET=1

A sample is taken as in benchmarks/attention.py: a CUDA graph's replay of one call, with a cold L2 cache. Peers are
measured in the same run where they can be imported: vLLM's and FlashInfer's kernels, FlashMLA, and torch's attention.
Each kind of case is a module beside this, with a function `cases`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import mla_decode
import mla_merge
import mla_prefill
import torch
from measuring import Figures, ceilings, machine, measured, parser_of, require_gpus, time_us
from mla_case import Case, Place

KINDS = (mla_merge, mla_decode, mla_prefill)


def measure(case: Case, limits: dict[str, float], with_peers: bool) -> dict[str, Any]:
    """The figures of one case: time, error, floor, and the peers' times."""
    # no case gets fragments of the last one's memory
    torch.cuda.empty_cache()
    trial = case.prepare()
    us = time_us(trial.call, captured=trial.captured)
    bandwidth = limits["copy GB/s" if trial.copies else "read GB/s"]
    floor = max(trial.moved / bandwidth / 1e3, trial.operations / limits["bf16 matmul TFLOP/s"] / 1e6)
    peers = trial.peers() if with_peers else ()
    return measured(case.name, us, case.mark, floor, trial.error(), trial.max_error, peers)


def cases(place: Place, word: str) -> Iterator[Case]:
    """The cases of all kinds with a word in their names."""
    return (case for kind in KINDS for case in kind.cases(place) if word in case.name)


def dry_run(word: str) -> None:
    """Runs each case once at small sizes, and prints its error. Exit 1: one is wrong."""
    gpu = torch.cuda.is_available()
    place = Place("cuda", dry=True) if gpu else Place("cpu", torch.float16, dry=True)
    wrong = []
    with torch.inference_mode():
        for case in cases(place, word):
            trial = case.prepare()
            trial.call()
            error = trial.error()
            print(f"{case.name}: error {error:.1e}", flush=True)
            # a number that is none is no small one
            wrong += [] if error <= trial.max_error else [case.name]
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")


def main() -> None:
    parser = parser_of("mla", __doc__)
    parser.add_argument("--case", default="", help="only the cases with this word in their names")
    parser.add_argument("--no-peers", action="store_true", help="measure attnreg's kernels alone")
    parser.add_argument("--dry-run", action="store_true", help="hold every case against float64, and measure nothing")
    options = parser.parse_args()
    if options.dry_run:
        dry_run(options.case)
        return
    require_gpus("mla")
    limits = ceilings()
    figures = Figures(options.record, machine(), ceilings=limits)
    with torch.inference_mode():
        for case in cases(Place(), options.case):
            figures.add(measure(case, limits, not options.no_peers))
    figures.show()


if __name__ == "__main__":
    main()
