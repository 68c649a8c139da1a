"""Measure the host's cost of a step on a GPU: batch, plan and calls of TRITON_ATTN, each beside its mark.

python benchmarks/host.py             print a table
python benchmarks/host.py --record    write benchmarks/results/host.json too

A sample is a burst of calls between two synchronisations of the device, short enough that the device's queue does not
fill; a figure is the median of bursts, in microseconds a call. Each step has lengths of its own, as in an engine.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton  # type: ignore[import-untyped]

import attnreg
from attnreg import AttentionRequest, BatchMetadata, Platform, ops
from attnreg.loader import default_registry
from attnreg.runtime.interface import Call
from attnreg.runtime.layer import Attention

RESULTS = Path(__file__).resolve().parent / "results" / "host.json"
BURSTS, CALLS = 60, 12


class Step:
    """The inputs of a decoding step: ``requests`` of one query each, with so many keys."""

    def __init__(self, requests: int, keys: int) -> None:
        request = AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8, dtype="bfloat16", block_size=16)
        registry = default_registry()
        here = next(p for p in Platform.detect_all(registry.vocabulary) if p.platform in ("cuda", "rocm"))
        selection = attnreg.select(request, here, registry, "TRITON_ATTN")
        self.layer = Attention.from_selection(selection, name=f"host.{requests}.{keys}")
        self.requests, self.keys = requests, keys
        blocks = -(-keys // 16) + 64
        self.table = torch.arange(requests * blocks, device="cuda", dtype=torch.int32).view(requests, blocks)
        self.slots = self.table[:, 0].long() * 16
        self.cache = self.layer.new_kv_cache(requests * blocks, "cuda")
        for tensor in self.cache:
            tensor.zero_()
        self.query = torch.randn(requests, 32, 128, device="cuda", dtype=torch.bfloat16)
        self.key, self.value = torch.randn(2, requests, 8, 128, device="cuda", dtype=torch.bfloat16)
        self.output = torch.empty_like(self.query)
        self._more = itertools.cycle(range(512))
        self.batch = self.build()

    def build(self) -> BatchMetadata:
        """The batch of the next step, a token longer."""
        keys = self.keys + next(self._more)
        return BatchMetadata.build(
            [1] * self.requests, [keys] * self.requests, device="cuda", block_table=self.table,
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
        """Both through the custom ops, as a compiled model calls them."""
        cache, name = self.cache, self.layer.name
        ops.unified_kv_cache_update(self.key, self.value, cache.key, cache.value, name)
        ops.unified_attention_with_output(self.query, cache.key, cache.value, self.output, name)

    def attention_op(self) -> None:
        """`ops.attention`, as a model in eager mode calls it."""
        ops.attention(self.layer, self.query, self.key, self.value, self.cache)


def figures() -> Iterator[tuple[str, float | None, Callable[[], Any], Step]]:
    """The name of each figure, its mark on an H200, the call, and the step that it belongs to."""
    short, long, many, most = Step(1, 64), Step(1, 4096), Step(64, 8192), Step(256, 2048)
    for step in (short, many, most):
        yield f"a step's batch, b{step.requests}", None, step.build, step
        yield f"a step's plan, b{step.requests}", None, step.plan, step
        yield f"a step's batch and plan, b{step.requests}", 40, step.step, step
    yield "a batch and its first forward, b64", None, many.first_forward, many
    yield "one launch", 12, short.launch, short
    yield "attend, b1", None, short.attend, short
    yield "cache update, b1", None, short.write, short
    yield "forward with the cache's update, b1", 20, short.forward, short
    yield "the same, output allocated", None, short.forward_allocating, short
    yield "the same through the two ops", 30, short.two_ops, short
    yield "the same through ops.attention", 30, short.attention_op, short
    yield "a split decode", 20, long.launch, long
    yield "attend, split", None, long.attend, long


def host_us(call: Callable[[], Any]) -> float:
    """The host's time for one call: the median of bursts."""
    for _ in range(3 * CALLS):
        call()
    bursts = []
    gc.disable()
    for _ in range(BURSTS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        bursts.append((time.perf_counter() - begin) / CALLS * 1e6)
    gc.enable()
    return statistics.median(bursts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, nargs="?", const=RESULTS, help=f"write {RESULTS.name} (or another file)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/host.py measures beside a GPU, and torch sees none")
    machine = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": sys.version.split()[0], "date": date.today().isoformat(),
    }  # fmt: skip
    print(machine)
    rows = []
    for name, mark, call, step in figures():
        with ops.forward_context(step.batch):
            us = round(host_us(call), 1)
        rows.append({"case": name, "us": us, "mark": mark})
        verdict = "" if mark is None else f"of {mark}, " + ("met" if us <= mark else "missed")
        print(f"{name:40}{us:8.1f} µs  {verdict}", flush=True)
    if options.record:
        text = json.dumps({"machine": machine, "figures": rows}, indent=2, ensure_ascii=False)
        options.record.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
