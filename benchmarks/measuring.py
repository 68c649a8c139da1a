"""What the benchmarks of a GPU share: the command line, a machine's facts and ceilings, times, and the figures' file.

A figure is written to the file as soon as it is there, so that a run that is ended loses none. A file of the same
machine and versions keeps its figures of what is not measured anew.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from attnreg.loader import load_registry
from attnreg.packages.kernel_code import kernel_digest
from attnreg.tuning.stopwatch import Stopwatch
from attnreg.version import __version__

RESULTS = Path(__file__).resolve().parent / "results"


class Peer(NamedTuple):
    """A name, a call, and the error of what it returned or wrote, None where that is not held against float64."""

    name: str
    call: Callable[[], Any]
    error: Callable[[Any], float] | None = None


Peers = Iterator[Peer]


def parser_of(program: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with the option ``--record``. program: the benchmark's name, and that of its file of figures."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    file = RESULTS / f"{program}.json"
    parser.add_argument("--record", type=Path, nargs="?", const=file, help=f"write {file.name} (or another file)")
    return parser


def require_gpus(program: str, count: int = 1) -> None:
    """Ends the program where PyTorch sees fewer GPUs."""
    if (seen := torch.cuda.device_count() if torch.cuda.is_available() else 0) < count:
        sys.exit(f"benchmarks/{program}.py measures {count} GPU{'s' * (count > 1)}, and torch sees {seen or 'none'}")


def machine(**more: Any) -> dict[str, Any]:
    """The facts that figures hold for; more: others than those of every benchmark."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = {"attnreg": __version__, "torch": torch.__version__, "triton": triton.__version__}
    return {"device": device, **versions, **more, "date": date.today().isoformat()}


def kernels() -> dict[str, str]:
    """Row or variant of attnreg's registry -> the digest of its kernel's code, for those whose code is attnreg's."""
    registry = load_registry("default", plugins=())
    titles = [
        t for row in registry.backends.values() for t in (row.name, *(f"{row.name}/{v.name}" for v in row.variants))
    ]
    return {title: digest for title in titles if (digest := kernel_digest(registry, title)) is not None}


class Figures:
    """The rows of a run, each printed as it comes; with a record, its file has them all after each.

    The file also holds the digests of the kernels. Rows of another machine, version or kernel are dropped from it.

    key: the columns that tell rows apart. more: what the file says beside the machine.
    """

    def __init__(
        self, record: Path | None, facts: Mapping[str, Any], *, key: Sequence[str] = ("case",), **more: Any
    ) -> None:
        self.record, self.facts, self.key, self.more = record, dict(facts), key, {**more, "kernels": kernels()}
        self.rows: list[dict[str, Any]] = []
        self._all: dict[tuple[Any, ...], dict[str, Any]] = {}
        if record is not None and record.exists():
            before = json.loads(record.read_text(encoding="utf-8"))
            same = {**before["machine"], "date": ""} == {**self.facts, "date": ""}
            if same and before.get("kernels") == self.more["kernels"]:
                self._all = {self._key(row): row for row in before["figures"]}
        print(self.facts, *more.values(), flush=True)

    def add(self, row: dict[str, Any]) -> None:
        """Prints a row, and records it."""
        print(json.dumps(row, ensure_ascii=False), flush=True)
        self.rows.append(row)
        self._all[self._key(row)] = row
        if self.record is not None:
            content = {"machine": self.facts, **self.more, "figures": [*self._all.values()]}
            # replaced whole: a run that is ended while it writes leaves the file as it was
            new = self.record.with_suffix(".new")
            new.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            new.replace(self.record)

    def show(self) -> None:
        """Prints the run's rows, as `measured` makes them, as a table."""
        from rich.console import Console
        from rich.table import Table

        facts = self.facts
        table = Table(title=f"{facts['device']}, torch {facts['torch']}, triton {facts['triton']}, {facts['date']}")
        peers = [*dict.fromkeys(name for row in self.rows for name in row["peers"])]
        for column in ("case", "µs", "mark", "", "floor", "error", *peers):
            table.add_column(column, justify="left" if column == "case" else "right")
        for row in self.rows:
            verdict = "[green]met[/]" if row["met"] else "[red]missed[/]"
            others = [str(row["peers"].get(name, ""))[:9] for name in peers]
            table.add_row(row["case"], str(row["us"]), str(row["mark"]), verdict if row["correct"] else "[red]WRONG[/]",
                          str(row["floor"]), str(row["error"]), *others)  # fmt: skip
        Console(width=160).print(table)

    def _key(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.key)


def measured(
    name: str,
    samples: Sequence[float],
    mark: float,
    floor: float,
    error: float,
    max_error: float,
    peers: Iterable[Peer] = (),
) -> dict[str, Any]:
    """The row of a case in microseconds, with the times of its peers or why they refused, and their errors.

    samples: the times of the case, whose median is its figure.
    """
    us = statistics.median(samples)
    row: dict[str, Any] = {"case": name, "us": round(us, 1), "spread": spread(samples), "mark": mark, "met": us <= mark,
                           "floor": round(floor, 1), "error": float(f"{error:.2g}"), "correct": error <= max_error,
                           "peers": {}, "peer_spreads": {}, "peer_errors": {}}  # fmt: skip
    for peer in peers:
        try:
            found = samples_us(peer.call)
            row["peers"][peer.name] = round(statistics.median(found), 1)
            row["peer_spreads"][peer.name] = spread(found)
            if peer.error is not None:
                row["peer_errors"][peer.name] = float(f"{peer.error(peer.call()):.2g}")
        except (RuntimeError, ValueError, NotImplementedError) as problem:
            row["peers"][peer.name] = f"refused: {str(problem).splitlines()[0][:90]}"
    return row


@functools.cache
def _stopwatch() -> Stopwatch:
    return Stopwatch(torch.device("cuda"))


def spread(samples: Sequence[float]) -> list[float]:
    """The 10th and the 90th percentile of two or more times, between neighbours where they fall between; rounded."""
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return [round(tenths[0], 1), round(tenths[-1], 1)]


def time_us(call: Callable[[], Any], samples: int = 40, *, captured: bool = True) -> float:
    """The median of `samples_us`."""
    return statistics.median(samples_us(call, samples, captured=captured))


def samples_us(call: Callable[[], Any], samples: int = 40, *, captured: bool = True) -> list[float]:
    """The times of a call with a cold L2 cache, replayed as a CUDA graph if it may be captured.

    samples: the most times. After one second of measuring, ten are enough.
    """
    call()
    torch.cuda.synchronize()
    run = call
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        run = graph.replay
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < samples and (len(times) < 10 or time.perf_counter() - begun < 1.0):
        times.append(_stopwatch().us(run))
    return times


def ceilings() -> dict[str, float]:
    """The ceilings of this machine: GB/s of a copy (read and written) and of reading, TFLOP/s of a matrix product."""
    n = 2**30
    x, y = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
    copy = 2 * 4 * n / time_us(lambda: torch.neg(x, out=y), 10) / 1e3
    read = 4 * n / time_us(lambda: _read(x), 10) / 1e3
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = 2 * 8192**3 / time_us(lambda: a @ b, 10) / 1e6
    return {"copy GB/s": round(copy), "read GB/s": round(read), "bf16 matmul TFLOP/s": round(product)}


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(x_ptr, sink_ptr, TILES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    start = tl.program_id(0).to(tl.int64) * TILES * BLOCK
    bits = tl.zeros([BLOCK], dtype=tl.int32)
    for i in range(TILES):
        bits ^= tl.load(x_ptr + start + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(sink_ptr + tl.program_id(0), tl.sum(bits))


def _read(x: Tensor) -> None:
    """Read x once. Writes one integer for each program."""
    tiles, block = 16, 4096
    programs = x.numel() // (tiles * block)
    _read_kernel[(programs,)](
        x.view(torch.int32), torch.empty(programs, dtype=torch.int32, device="cuda"), tiles, block
    )
