"""Measure decode over a KV cache that GPUs of one host share, beside one GPU with the whole cache.

python benchmarks/parallel.py --gpus 2             print the figures
python benchmarks/parallel.py --gpus 2 --record    write benchmarks/results/parallel.json too

A figure is the median of batches of replays of a CUDA graph that holds one layer's call, write included; the caches are
larger than the L2. The output of the ranks is compared with that of one GPU over the same keys.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import Figures, machine, parser_of, require_gpus
from torch.multiprocessing.spawn import spawn

import attnreg
from attnreg import Attention, AttentionRequest, BatchMetadata, KVCache
from attnreg.runtime.parallel.attention import ContextParallel

BLOCK = 16


@dataclass(frozen=True)
class Case:
    """Requests of one query each, after ``keys - 1`` earlier ones. mark: times as fast as one GPU."""

    name: str
    requests: int
    keys: int
    mark: float | None = None
    heads: tuple[int, int] = (32, 8)
    head_size: int = 128


CASES = tuple(
    Case(f"decode b{requests} {keys // 1024}k", requests, keys, 1.7 if keys == 524288 else None)
    for keys in (131072, 524288)
    for requests in (1, 8)
)


def layer_of(case: Case) -> Attention:
    request = AttentionRequest(
        head_size=case.head_size, num_heads=case.heads[0], num_kv_heads=case.heads[1], dtype="bfloat16",
        block_size=BLOCK, features=frozenset({"lse"}),
    )  # fmt: skip
    return Attention.from_selection(attnreg.select(request, attnreg.detect(), backend="TRITON_ATTN", to_run=True))


def measure(rank: int, world: int, case: Case) -> dict[str, Any]:
    """The figures of a case on this rank."""
    torch.manual_seed(0)
    layer = layer_of(case)
    parallel = ContextParallel(layer, interleave=BLOCK)
    blocks = case.keys // BLOCK
    whole = KVCache(*(x.normal_() for x in layer.new_kv_cache(case.requests * blocks, "cuda")))
    # blocks are dealt out in turn, so a rank has each world-th
    shares = [x.view(case.requests, blocks, *x.shape[1:])[:, rank::world].flatten(0, 1).clone() for x in whole]
    query = torch.randn(case.requests, case.heads[0], case.head_size, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, case.requests, case.heads[1], case.head_size, device="cuda", dtype=torch.bfloat16)
    ones, lens = [1] * case.requests, [case.keys] * case.requests
    table = torch.arange(case.requests * blocks, device="cuda", dtype=torch.int32).view(case.requests, blocks)
    slots = table[:, -1].long() * BLOCK + BLOCK - 1
    alone = BatchMetadata.build(ones, lens, device="cuda", block_table=table, slot_mapping=slots)
    shared = table.flatten()[: table.numel() // world].view(case.requests, -1)
    batch = parallel.shard(BatchMetadata.build(ones, lens, device="cuda", block_table=shared))
    found, exact = torch.empty_like(query), torch.empty_like(query)
    one_us = time_us(lambda: layer(query, key, value, whole, alone, exact))
    us = time_us(lambda: parallel(query, key, value, KVCache(*shares), batch, found))
    error = float((found.double() - exact.double()).norm() / exact.double().norm())
    return {"case": case.name, "one GPU us": round(one_us, 1), "us": round(us, 1), "times": round(one_us / us, 2),
            "mark": case.mark, "met": case.mark is None or one_us / us >= case.mark,
            "difference": float(f"{error:.2g}"), "correct": error < 6e-3}  # fmt: skip


def time_us(call: Callable[[], Any], batches: int = 7, replays: int = 20) -> float:
    """The median time of a call, replayed as a CUDA graph; ranks replay it together."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times: list[float] = []
    for _ in range(batches):
        dist.barrier()
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / replays)
    return statistics.median(times)


def run(rank: int, world: int, place: str, record: Path | None) -> None:
    """A rank: measures every case."""
    # multicast would reach beyond the process's own GPUs
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{place}", rank=rank, world_size=world, timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    figures = Figures(record, machine(gpus=world, nccl=nccl)) if rank == 0 else None
    with torch.inference_mode():
        for case in CASES:
            torch.cuda.empty_cache()
            row = {**measure(rank, world, case), **asdict(case), "world": world}
            if figures is not None:
                figures.add(row)
    dist.destroy_process_group()


def main() -> None:
    parser = parser_of("parallel", __doc__)
    parser.add_argument("--gpus", type=int, default=2, help="how many share a cache")
    options = parser.parse_args()
    require_gpus("parallel", options.gpus)
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder, "meeting"))
        spawn(run, (options.gpus, place, options.record), nprocs=options.gpus)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
