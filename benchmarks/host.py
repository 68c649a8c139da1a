"""Measure the host's cost of a step on a GPU: batch, plan and calls of TRITON_ATTN, each beside its mark.

python benchmarks/host.py                             print a table
python benchmarks/host.py --record                    write benchmarks/results/host.json too
python benchmarks/host.py --beside DIR [--stubbed]    compare with the checkout in DIR

A sample is a burst of calls between two synchronisations of the device, short enough that the device's queue does not
fill; a figure is the median of bursts, in microseconds a call. Each step has lengths of its own, as in an engine.

--stubbed needs no GPU: launches end before the driver's call (host_stub.py). What is left is the Python of a step, so
it is for comparing. --beside measures two processes in turns, and takes the least of bursts.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import host_tokens
import torch
import triton  # type: ignore[import-untyped]

import attnreg
import attnreg.integrations.transformers as transformers_attention
from attnreg import AttentionRequest, BatchMetadata, Platform, ops
from attnreg.loader import default_registry
from attnreg.machine.detect import detect_all
from attnreg.runtime.interface import Call, KVCache
from attnreg.runtime.layer import Attention

RESULTS = Path(__file__).resolve().parent / "results" / "host.json"
BURSTS, CALLS = 60, 12
# so many bursts of each figure, even if they take longer than so many seconds
FEWEST, SECONDS = 9, 2.0


class Place(NamedTuple):
    """Where steps run. wait: until the device has done all that was launched."""

    device: str
    platform: Platform
    wait: Callable[[], None]

    @classmethod
    def gpu(cls) -> Place:
        """This machine's GPU."""
        if not torch.cuda.is_available():
            sys.exit("benchmarks/host.py measures beside a GPU, and torch sees none; --stubbed needs none")
        vocabulary = default_registry().vocabulary
        platform = next(p for p in detect_all(vocabulary) if p.platform in ("cuda", "rocm"))
        transformers_attention.register()
        return cls("cuda", platform, torch.cuda.synchronize)

    @classmethod
    def stubbed(cls) -> Place:
        """No GPU: launches end before the driver's call."""
        import host_stub

        host_stub.install()
        return cls(host_stub.DEVICE, host_stub.PLATFORM, lambda: None)


class Step:
    """The inputs of a decoding step: ``requests`` of one query each, with so many keys."""

    def __init__(self, place: Place, requests: int, keys: int) -> None:
        request = AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8, dtype="bfloat16", block_size=16)
        selection = attnreg.select(request, place.platform, default_registry(), "TRITON_ATTN")
        self.device = device = place.device
        self.layer = Attention.from_selection(selection, name=f"host.{requests}.{keys}")
        self.requests, self.keys = requests, keys
        blocks = -(-keys // 16) + 64
        self.table = torch.arange(requests * blocks, device=device, dtype=torch.int32).view(requests, blocks)
        self.slots = self.table[:, 0].long() * 16
        # one tensor, as an engine has it
        shape = 2, *self.layer.kv_cache_shape(requests * blocks).key
        self.cache = KVCache(*torch.zeros(shape, device=device, dtype=torch.bfloat16))
        self.query = torch.randn(requests, 32, 128, device=device, dtype=torch.bfloat16)
        self.key, self.value = torch.randn(2, requests, 8, 128, device=device, dtype=torch.bfloat16)
        self.output = torch.empty_like(self.query)
        self._more = itertools.cycle(range(512))
        self.batch = self.build()

    def around(self, calls: int) -> AbstractContextManager[None]:
        """A block in which the ops find the batch."""
        return ops.forward_context(self.batch)

    def build(self) -> BatchMetadata:
        """The batch of the next step, a token longer."""
        keys = self.keys + next(self._more)
        return BatchMetadata.build(
            [1] * self.requests, [keys] * self.requests, device=self.device, block_table=self.table,
            slot_mapping=self.slots,
        )  # fmt: skip

    def plan(self) -> None:
        """The plan of a batch that has none."""
        self.batch.plans.clear()
        self.layer.plan(self.batch)

    def step(self) -> None:
        """A batch and its plan."""
        self.layer.plan(self.build())

    def first_forward(self) -> None:
        """A batch and the forward of its first layer, with the cache's update."""
        self.layer.forward(self.query, self.key, self.value, self.cache, self.build(), self.output)

    def launch(self) -> None:
        """The kernel module's own call."""
        call = Call(self.query, self.cache, self.output)
        self.layer.module.forward(self.layer.spec, self.layer.plan(self.batch), call)

    def attend(self) -> None:
        """Attention by the layer, without the cache's update."""
        self.layer.attend(self.query, self.cache, self.batch, self.output)

    def write(self) -> None:
        """The cache's update by the layer."""
        self.layer.write_kv(self.key, self.value, self.cache, self.batch)

    def forward(self) -> None:
        """Both, in one call."""
        self.layer.forward(self.query, self.key, self.value, self.cache, self.batch, self.output)

    def forward_allocating(self) -> None:
        """Both, with the output allocated by the layer."""
        self.layer.forward(self.query, self.key, self.value, self.cache, self.batch)

    def two_ops(self) -> None:
        """Both through an op for each, as an engine calls them."""
        cache, name = self.cache, self.layer.name
        ops.unified_kv_cache_update(self.key, self.value, cache.key, cache.value, name)
        ops.unified_attention_with_output(self.query, cache.key, cache.value, self.output, name)

    def one_op(self) -> None:
        """Both through the op for both, as a model that was compiled with `ops.attention` calls it."""
        cache, name = self.cache, self.layer.name
        ops.unified_kv_cache_update_and_attention(
            self.query, self.key, self.value, cache.key, cache.value, self.output, name
        )

    def attention_op(self) -> None:
        """`ops.attention`, as a model in eager mode calls it."""
        ops.attention(self.layer, self.query, self.key, self.value, self.cache)


class Figure(NamedTuple):
    """A figure's name, its mark on an H200, the call, and what a burst of so many calls runs in."""

    name: str
    mark: float | None
    call: Callable[[], Any]
    around: Callable[[int], AbstractContextManager[None]]

    def burst(self, place: Place) -> float:
        """The host's time for one call of a burst, in microseconds; of its own thread where no GPU is waited for."""
        clock = time.thread_time if place.device == "meta" else time.perf_counter
        with self.around(CALLS):
            place.wait()
            gc.disable()
            begin = clock()
            for _ in range(CALLS):
                self.call()
            us = (clock() - begin) / CALLS * 1e6
            gc.enable()
        return us


def figures(place: Place) -> Iterator[Figure]:
    short, long, many, most = (Step(place, *one) for one in ((1, 64), (1, 4096), (64, 8192), (256, 2048)))
    for step in (short, many, most):
        yield Figure(f"a step's batch, b{step.requests}", None, step.build, step.around)
        yield Figure(f"a step's plan, b{step.requests}", None, step.plan, step.around)
        yield Figure(f"a step's batch and plan, b{step.requests}", 40, step.step, step.around)
    yield Figure("a batch and its first forward, b64", None, many.first_forward, many.around)
    yield Figure("one launch", 12, many.launch, many.around)
    yield Figure("attend, b64", None, many.attend, many.around)
    yield Figure("cache update, b64", None, many.write, many.around)
    yield Figure("forward with the cache's update, b64", 20, many.forward, many.around)
    yield Figure("the same, output allocated", None, many.forward_allocating, many.around)
    yield Figure("the same through the op for both", 30, many.one_op, many.around)
    yield Figure("the same through the two ops", 30, many.two_ops, many.around)
    yield Figure("the same through ops.attention", 30, many.attention_op, many.around)
    yield Figure("a split decode", 20, long.launch, long.around)
    yield Figure("attend, split", None, long.attend, long.around)
    for case in host_tokens.CASES:
        for implementation in ("sdpa", "attnreg"):
            tokens = host_tokens.Tokens(case, implementation, place.device)
            yield Figure(f"a token of 8 layers, {case.name}, {implementation}", None, tokens.token, tokens.prepared)


def measure(place: Place, record: Path | None) -> None:
    """Prints the median of each figure, and writes them to a file."""
    machine = {
        "device": torch.cuda.get_device_name() if place.device == "cuda" else "none: launches are stubbed",
        "torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0],
        "date": date.today().isoformat(),
    }  # fmt: skip
    print(machine)
    rows = []
    for figure in figures(place):
        us = round(statistics.median(bursts(figure, place)), 1)
        rows.append({"case": figure.name, "us": us, "mark": figure.mark})
        verdict = "" if figure.mark is None else f"of {figure.mark}, " + ("met" if us <= figure.mark else "missed")
        print(f"{figure.name:40}{us:8.1f} µs  {verdict}", flush=True)
    if record:
        text = json.dumps({"machine": machine, "figures": rows}, indent=2, ensure_ascii=False)
        record.write_text(text + "\n", encoding="utf-8")


def bursts(figure: Figure, place: Place) -> Iterator[float]:
    """Times of bursts, fewer of a figure that takes long. The first three, left out, compile and fill caches."""
    for _ in range(3):
        figure.burst(place)
    begin = time.perf_counter()
    for done in range(BURSTS):
        if done >= FEWEST and time.perf_counter() - begin > SECONDS:
            return
        yield figure.burst(place)


def serve(place: Place) -> None:
    """Answers each line, the name of a figure, with the time of a burst; null where this checkout lacks the call."""
    made = {one.name: one for one in figures(place)}
    print(json.dumps([*made]), flush=True)
    for line in sys.stdin:
        try:
            print(made[line.strip()].burst(place), flush=True)
        except (AttributeError, KeyError):
            print("null", flush=True)


def compare(others: Path, arguments: list[str]) -> None:
    """Prints each figure of another checkout and of this one, the least of bursts that they measure in turns."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # each by its own script: what is left out has other places in another checkout
    processes = [
        subprocess.Popen(
            [sys.executable, str(tree / "benchmarks/host.py"), "--serve", *arguments],
            env=os.environ | {"PYTHONPATH": str(tree)}, **pipes,
        )
        for tree in (others, Path(__file__).resolve().parents[1])
    ]  # fmt: skip

    def answer(process: subprocess.Popen[str], line: str = "") -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line)
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    _, names = [answer(process) for process in processes]
    print(f"{'least of bursts, µs':40}{'there':>8}{'here':>8}")
    for name in names:
        turns = [[answer(process, f"{name}\n") for process in processes] for _ in range(3 * BURSTS)]
        there, here = ([us for us in times if us] for times in zip(*turns, strict=True))
        if there:
            print(f"{name:40}{min(there):8.1f}{min(here):8.1f}  {min(here) / min(there) - 1:+.0%}", flush=True)
        else:
            print(f"{name:40}{'':8}{min(here):8.1f}", flush=True)
    for process in processes:
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, nargs="?", const=RESULTS, help=f"write {RESULTS.name} (or another file)")
    parser.add_argument("--stubbed", action="store_true", help="without a GPU: leave out the driver's calls")
    parser.add_argument("--beside", type=Path, metavar="DIR", help="measure another checkout in turns with this one")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.beside:
        compare(options.beside.resolve(), ["--stubbed"] if options.stubbed else [])
        return
    place = Place.stubbed() if options.stubbed else Place.gpu()
    if options.serve:
        serve(place)
    else:
        measure(place, options.record)


if __name__ == "__main__":
    main()
