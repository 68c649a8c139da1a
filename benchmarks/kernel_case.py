"""A case of a kernel: its name, its mark, and how it is prepared, run and held against float64; a program of cases."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from measuring import Figures, Peers, ceilings, machine, measured, parser_of, require_gpus, samples_us


@dataclass(frozen=True)
class Place:
    """Where cases run: on a GPU at their sizes, or as a dry run at small ones, on a processor in Triton's interpreter.

    dtype: of queries; the interpreter multiplies no bfloat16.
    """

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    dry: bool = False

    def few(self, size: int, most: int) -> int:
        """A size, in a dry run no more than so much."""
        return min(size, most) if self.dry else size


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A case with its tensors.

    call: what is measured. error: of its last result, ||out - ref|| / ||ref||. moved, operations: the bytes and the
    floating-point operations of the work, at least; copies: as many bytes are written as read. captured: whether a
    CUDA graph can hold the call. peers: those that can be imported.
    """

    call: Callable[[], Any]
    error: Callable[[], float]
    peers: Callable[[], Peers]
    moved: float = 0.0
    operations: float = 0.0
    copies: bool = False
    captured: bool = True
    max_error: float = 1e-2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A name, microseconds on an H200 that are not to be exceeded, and what prepares the trial."""

    name: str
    mark: float
    prepare: Callable[[], Trial]


def function_of(module: str, name: str) -> Any:
    """A function of a peer, None where it cannot be imported."""
    try:
        return getattr(importlib.import_module(module), name)
    # a package that loads libraries can fail in any way
    except Exception:
        return None


# the cases of a place with a word in their names
Cases = Callable[[Place, str], Iterator[Case]]


def _measure(case: Case, limits: dict[str, float], with_peers: bool) -> dict[str, Any]:
    """The figures of one case: time and its spread, error, floor, and the peers' times."""
    # no case gets fragments of the last one's memory
    torch.cuda.empty_cache()
    trial = case.prepare()
    samples = samples_us(trial.call, captured=trial.captured)
    bandwidth = limits["copy GB/s" if trial.copies else "read GB/s"]
    floor = max(trial.moved / bandwidth / 1e3, trial.operations / limits["bf16 matmul TFLOP/s"] / 1e6)
    peers = trial.peers() if with_peers else ()
    return measured(case.name, samples, case.mark, floor, trial.error(), trial.max_error, peers)


def _dry_run(cases: Cases, word: str) -> None:
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


def run(program: str, doc: str | None, cases: Cases) -> None:
    """The command line of a program of cases. program: its name, and that of its file of figures."""
    parser = parser_of(program, doc)
    parser.add_argument("--case", default="", help="only the cases with this word in their names")
    parser.add_argument("--no-peers", action="store_true", help="measure attnreg's kernels alone")
    parser.add_argument("--dry-run", action="store_true", help="hold every case against float64, and measure nothing")
    options = parser.parse_args()
    if options.dry_run:
        _dry_run(cases, options.case)
        return
    require_gpus(program)
    limits = ceilings()
    figures = Figures(options.record, machine(), ceilings=limits)
    with torch.inference_mode():
        for case in cases(Place(), options.case):
            figures.add(_measure(case, limits, not options.no_peers))
    figures.show()
