"""How the keys of few queries are split: the time of a decode by the number of its splits.

python benchmarks/splits.py                   print it, and how far the number that is chosen is from the fastest
python benchmarks/splits.py --layer latents   only the layers with this word in their names
python benchmarks/splits.py --record          write benchmarks/results/splits.json too

A figure is the median of some calls, each a graph's replay over a cold L2 cache, as in attention.py. ``asked`` are the
first arguments of `attnreg.kernels.triton.schedule.choose_splits`, ``by`` the module that asks, and ``us`` the times,
each after its number of splits: tests hold what is chosen against them.
"""

from __future__ import annotations

import importlib
import math
import random
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from measuring import Figures, machine, parser_of, require_gpus, time_us
from torch import Tensor

from attnreg.kernels.hopper import decode_plans
from attnreg.kernels.hopper.latents import plans as hopper_latents
from attnreg.kernels.mla import plans as latents
from attnreg.kernels.triton import plans, schedule
from attnreg.kernels.triton.planned import batches
from attnreg.language.packed import packed_formats
from attnreg.loader import default_registry
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCache
from attnreg.runtime.mla.interface import as_kv_cache, latent_cache_shape

ATTN = "attnreg.kernels.hopper.attention"
LATENTS = "attnreg.kernels.hopper.latents.attention"
PACKED = "attnreg.kernels.hopper.packed.attention"


@dataclass(frozen=True)
class Layer:
    """A layer of the benchmark, and the kernel module that decodes it."""

    module: str
    queries: int = 1
    heads: tuple[int, int] = (32, 8)
    head_size: int = 128
    kv_dtype: str = "auto"


LAYERS = {
    "heads of 128": Layer(ATTN),
    "heads of 64": Layer(ATTN, head_size=64),
    "4 queries": Layer(ATTN, queries=4),
    "16 queries": Layer(ATTN, queries=16),
    "heads of 256": Layer(ATTN, heads=(16, 4), head_size=256),
    "fp8": Layer(ATTN, kv_dtype="fp8"),
    "fp8, 2 KV heads": Layer(ATTN, heads=(16, 2), kv_dtype="fp8"),
    "fp8, 64 over 8 heads of 64": Layer(ATTN, heads=(64, 8), head_size=64, kv_dtype="fp8"),
    "fp8 by TRITON_ATTN": Layer("attnreg.kernels.triton_attn", kv_dtype="fp8"),
    "TurboQuant of 4 bits": Layer(PACKED, kv_dtype="turboquant_4bit_nc"),
    "TurboQuant of 3 bits": Layer(PACKED, kv_dtype="turboquant_3bit_nc"),
    "latents, 128 heads": Layer(LATENTS, heads=(128, 1), head_size=576),
    "latents, 16 heads": Layer(LATENTS, heads=(16, 1), head_size=576),
    "latents by TRITON_MLA, 16 heads": Layer("attnreg.kernels.triton_mla", heads=(16, 1), head_size=576),
}
REQUESTS = (1, 4, 16, 64)
LONGEST = (3000, 8200, 65536)
# how long the other requests are, as a share of the longest; None: of all lengths
SPREADS = {"alike": 1.0, "of all lengths": None, "one long": 0.1, "one very long": 0.03}
# keys of all requests together
MOST = 1_200_000
SPLITS = (*range(1, 13), 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 33, 36, 40, 44, 48, 56, 64, 80, 96, 128, 160, 192, 256)


@contextmanager
def choosing(splits: int | None) -> Iterator[list[dict[str, Any]]]:
    """Plans whose keys are split so often, or as ever where that is None. Yields who asked for what, and got what."""
    asked: list[dict[str, Any]] = []
    choose = schedule.choose_splits

    def chosen(by: str, programs: int, groups: schedule.Groups, *others: Any, **least_keys: Any) -> tuple[int, int]:
        found, least = choose(programs, groups, *others, **least_keys)
        *facts, _ = others
        asked.append({"by": by, "asked": [programs, groups, *facts], "chosen": found})
        if splits is None:
            return found, least
        return splits, least if len(groups) == 1 else schedule.share_of(groups[0][1], splits, facts[1])

    for module in (plans, latents, hopper_latents):
        module._launches.cache_clear()
    with ExitStack() as patched:
        for module in (schedule, decode_plans):
            by = module.__name__.rpartition(".")[2]
            patched.enter_context(patch.object(module, "choose_splits", partial(chosen, by)))
        # a capture that nobody notices is of the launches for the lengths of the batch
        patched.enter_context(patch.object(batches, "is_captured", lambda query: False))
        yield asked


def lengths_of(requests: int, longest: int, spread: str) -> list[int]:
    """The keys of each request, the first of which has the most."""
    drawn, share = random.Random(requests * longest), SPREADS[spread]
    others = (
        drawn.randint(17, longest) if share is None else max(17, int(longest * share)) for _ in range(requests - 1)
    )
    return [longest, *others]


class Decode:
    """A decode of a layer: a cache of any content, in blocks of random order."""

    def __init__(self, layer: Layer, lengths: list[int]) -> None:
        self.module = importlib.import_module(layer.module)
        latent, block = layer.head_size == 576, 64 if layer.head_size == 576 else 16
        formats = packed_formats(default_registry().vocabulary.words["kv_dtypes"])
        heads, kv_heads = layer.heads
        width = 512 if latent else layer.head_size
        self.spec = AttentionSpec(
            num_heads=heads, num_kv_heads=kv_heads, head_size=layer.head_size, head_size_v=width,
            dtype=torch.bfloat16, softmax_scale=layer.head_size**-0.5, kv_dtype=layer.kv_dtype, block_size=block,
            latent=latent, packed=formats.get(layer.kv_dtype),
        )  # fmt: skip
        blocks = [-(-n // block) for n in lengths]
        order = torch.randperm(sum(blocks), device="cuda").int()
        self.batch = BatchMetadata.build(
            [layer.queries] * len(lengths), lengths, device="cuda",
            block_table=torch.nn.utils.rnn.pad_sequence(list(torch.split(order, blocks)), batch_first=True),
        )  # fmt: skip
        if latent:
            shape, dtype = latent_cache_shape(self.spec, sum(blocks))
            self.cache = as_kv_cache(self.spec, _filled(shape, dtype))
        else:
            made = self.module.kv_cache_shape(self.spec, sum(blocks))
            self.cache = KVCache(_filled(made.key, made.dtype), _filled(made.value, made.dtype))
        # of a key and its value, as kernels walk them, and of the value
        self.columns = layer.head_size if latent else 2 * layer.head_size, width
        rows = layer.queries * len(lengths)
        self.query = torch.randn(rows, heads, layer.head_size, device="cuda").bfloat16()
        self.output = self.query.new_empty(rows, heads, width)

    def time(self, splits: int | None, samples: int = 9) -> tuple[float, list[dict[str, Any]]]:
        """The time of a call whose keys are split so often, and what was asked for its splits."""
        with choosing(splits) as asked:
            plan = self.module.plan(self.spec, self.batch)
            call = Call(self.query, self.cache, self.output)
            return time_us(lambda: self.module.forward(self.spec, plan, call), samples), asked


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype.itemsize > 1:
        return torch.randn(shape, device="cuda").to(dtype)
    # codes, or 8-bit floats that are small
    return torch.randint(0, 64, shape, device="cuda", dtype=torch.uint8).view(dtype)


def measure(name: str, layer: Layer, lengths: list[int], spread: str) -> tuple[dict[str, Any], float]:
    """The row of a batch, and how long the number of splits that is chosen takes beside the best one."""
    decode = Decode(layer, lengths)
    # the last is asked for the kernel that runs
    facts = decode.time(None)[1][-1]
    programs, groups, rows, block_n, sms, per_sm = facts["asked"]
    (_, keys), total = groups[0], sum(count * length for count, length in groups)
    chosen = facts.pop("chosen")
    busy = 4 * sms * per_sm * keys * sum(count for count, _ in groups) // (programs * total)
    most = min(-(-keys // max(schedule.SMALLEST_SPLIT, block_n)), max(1, busy), schedule.PARTS * sms // rows)
    times = {n: decode.time(n)[0] for n in sorted({*(n for n in SPLITS if n <= most), chosen})}
    us = " ".join(f"{n}:{times[n]:.1f}" for n in times)
    row = {"case": f"{name}: {len(lengths)} of {lengths[0]}, {spread}", **facts, "columns": decode.columns, "us": us}
    return row, times[chosen] / min(times.values())


def main() -> None:
    parser = parser_of("splits", __doc__)
    parser.add_argument("--layer", default="", help="only the layers with this word in their names")
    options = parser.parse_args()
    require_gpus("splits")
    figures = Figures(options.record, machine())
    for name, layer in LAYERS.items():
        if options.layer not in name:
            continue
        losses = []
        for requests, longest, spread in product(REQUESTS, LONGEST, SPREADS):
            lengths = lengths_of(requests, longest, spread)
            if sum(lengths) > MOST or (requests == 1 and spread != "alike"):
                continue
            row, loss = measure(name, layer, lengths, spread)
            figures.add(row)
            losses.append(loss)
            torch.cuda.empty_cache()
        if losses:
            mean = math.exp(statistics.fmean(map(math.log, losses)))
            print(f"{name}: {len(losses)} batches, {mean:.3f} of the fastest, at worst {max(losses):.2f}", flush=True)


if __name__ == "__main__":
    main()
