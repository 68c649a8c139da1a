"""Records what vLLM's own classes choose on Intel GPUs and on processors, where no list of candidates is tried.

    python tools/record/vllm_platforms.py --tree vllm-0.32.0/ --rows 1200 --seed 7 --out rows.jsonl

The `in` of a row is about a layer, a vision tower or the prompts of MLA (`kind`). It has the fields of vLLM's selector
that are not at their defaults, and the backend that is asked for by `name`. `out` has the backend that is `chosen`, or
`refused`, the type of the error. The rows are drawn anew for each release by the seed. vLLM's code is not
edited; `vllm_machine.STUBBED` is simulated. One process has one platform.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parent))

import vllm_machine

# the symbols that the recorder uses of each platform
_ALL = (
    "vllm.config:VllmConfig", "vllm.config:set_current_vllm_config", "vllm.config.cache:CacheDType",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum", "vllm.v1.attention.selector:AttentionSelectorConfig",
)  # fmt: skip
SYMBOLS = {
    "cpu": (*_ALL, "vllm.platforms.cpu:CpuPlatform", "vllm.platforms.interface:CpuArchEnum"),
    "xpu": (*_ALL, "vllm.platforms.xpu:XPUPlatform"),
}
MACHINES = {"cpu": ("x86_64", "x86_64_avx512", "x86_64_amx", "aarch64"), "xpu": ("xe2", "xe_hpc")}
DTYPES = ("bfloat16", "float16", "float32")
HEADS = (1, 32, 64, 65, 72, 80, 128, 192, 256, 264, 320, 512, 576)
BLOCKS = (None, 16, 32, 48, 64, 128, 256)
# fields of the selector that are drawn seldom; a release that lacks one is not asked about it
FLAGS = ("has_sink", "has_sliding_window", "use_non_causal", "use_batch_invariant", "use_mm_prefix", "use_kv_connector",
         "use_per_head_quant_scales", "use_rswa", "use_pcp", "use_dcp", "use_adaptive_verification")  # fmt: skip
ATTN_TYPES = ("decoder", "encoder", "encoder_only", "encoder_decoder")
DIMENSIONS = ((128, 64, 128), (192, 64, 256), (64, 64, 128), (256, 0, 256), (100, 28, 100))


class Platform:
    """The platform of some simulated machines, and what a release has words for."""

    def __init__(self, tree: Path, name: str) -> None:
        self.machines = MACHINES[name]
        self.platform = vllm_machine.boot(tree, self.machines[0])
        self.backends = importlib.import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum
        self.asked = importlib.import_module("vllm.v1.attention.selector").AttentionSelectorConfig
        self.kv_dtypes = get_args(importlib.import_module("vllm.config.cache").CacheDType)
        try:
            prefill = importlib.import_module("vllm.v1.attention.backends.mla.prefill.registry").MLAPrefillBackendEnum
        except ModuleNotFoundError:
            prefill = None
        # without a backend for them on processors, MLA runs its prompts itself there, or does not run
        self.prefill: Any = prefill if name == "xpu" or hasattr(prefill, "CPU") else None

    def drawn(self, dice: random.Random) -> dict[str, Any]:
        """A row without its answer."""
        kind = dice.choices(("layer", "vision", "prefill"), (10, 2, 2 if self.prefill else 0))[0]
        row: dict[str, Any] = {"kind": kind, "arch": dice.choice(self.machines), "dtype": dice.choice(DTYPES)}
        row["head_size"] = dice.choice(HEADS)
        if dice.random() < 0.4:
            names = self.prefill if kind == "prefill" else self.backends
            row["name"] = dice.choice([n for n in names.__members__ if n not in ("CUSTOM", "NO_ATTENTION")])
        if kind == "prefill":
            row["dimensions"] = dice.choice(DIMENSIONS)
        if kind == "layer":
            plain = {
                "block_size": dice.choice(BLOCKS),
                "attn_type": dice.choice((*ATTN_TYPES[:1] * 6, *ATTN_TYPES[1:])),
            }
            row |= {n: v for n, v in plain.items() if v not in (None, "decoder")}
            row["kv_cache_dtype"] = dice.choice((None, "auto", "auto", "auto", *self.kv_dtypes))
            row |= {n: True for n in ("use_mla", "use_sparse") if dice.random() < 0.25}
            if "use_mla" in row and dice.random() < 0.7:
                row |= {"head_size": 576, "block_size": dice.choice((64, 128))}
            row |= {n: True for n in FLAGS if n in self.asked._fields and dice.random() < 0.08}
        return row

    def answer(self, row: dict[str, Any]) -> dict[str, str]:
        """What the release chooses, or the type of the error by which it refuses."""
        arch = row["arch"]
        self.platform = vllm_machine.processor(arch) if arch in MACHINES["cpu"] else vllm_machine.current()
        try:
            return {"chosen": getattr(self, f"_{row['kind']}")(row)}
        except (AssertionError, ImportError, NotImplementedError, ValueError) as error:
            return {"refused": type(error).__name__}

    def _layer(self, row: dict[str, Any]) -> str:
        fields = {n: row.get(n) for n in ("head_size", "kv_cache_dtype", "block_size")}
        fields |= {n: row[n] for n in self.asked._fields if n in row}
        asked = self.asked(**fields | {"dtype": _dtype(row)})
        with _configured(self.platform):
            path = self.platform.get_attn_backend_cls(self._named(row), attn_selector_config=asked, num_heads=16)
        by_path = {member.value: str(member.name) for member in self.backends}
        # the class for Intel GPUs has no name of its own
        return by_path.get(path) or by_path[path.replace(".XPUFlash", ".Flash")]

    def _vision(self, row: dict[str, Any]) -> str:
        return str(self.platform.get_vit_attn_backend(row["head_size"], _dtype(row), backend=self._named(row)).name)

    def _prefill(self, row: dict[str, Any]) -> str:
        selector = importlib.import_module("vllm.v1.attention.backends.mla.prefill.selector")
        names = self.prefill
        fields = dict(zip(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), row["dimensions"], strict=True))
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=_dtype(row), hf_text_config=SimpleNamespace(**fields)),
            attention_config=SimpleNamespace(mla_prefill_backend=names[row["name"]] if "name" in row else None),
        )
        found = selector.get_mla_prefill_backend(config)
        return next(str(n) for n, m in names.__members__.items() if m.value and m.value.endswith(f".{found.__name__}"))

    def _named(self, row: dict[str, Any]) -> Any:
        return self.backends[row["name"]] if "name" in row else None


def _configured(platform: Any) -> Any:
    config = importlib.import_module("vllm.config")
    return config.set_current_vllm_config(config.VllmConfig())


def _dtype(row: dict[str, Any]) -> Any:
    return getattr(importlib.import_module("torch"), row["dtype"])


def record_here(tree: Path, name: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """The rows of one platform, which this process simulates from now on."""
    logging.disable(logging.CRITICAL)
    platform, dice = Platform(tree, name), random.Random(f"{seed} {name}")
    for _ in range(count):
        row = platform.drawn(dice)
        yield {"in": row, "out": platform.answer(row)}


def main() -> int:
    """Record a release, one process for each platform. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True, help="the Python of its wheel, unpacked")
    parser.add_argument("--rows", type=int, default=1200, help="how many configurations are drawn")
    parser.add_argument("--seed", type=int, required=True, help="by which they are drawn")
    parser.add_argument("--out", type=Path, help="the file for the rows")
    parser.add_argument("--platform", choices=MACHINES, help="only this one, in this process, to standard output")
    given = parser.parse_args()
    if given.platform:
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        for row in record_here(given.tree, given.platform, given.seed, given.rows):
            print(json.dumps(row), file=out)
        return 0
    text = ""
    for name in MACHINES:
        words = [__file__, "--tree", given.tree, "--seed", given.seed, "--platform", name]
        command = [sys.executable, *map(str, words), "--rows", str(given.rows // len(MACHINES))]
        text += subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    given.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
