"""vLLM 0.33.0's selector on a simulated GPU, and the recorded configurations to ask it about."""

from __future__ import annotations

import gzip
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools/record"))

import vllm_machine
from vllm_machine import CAPABILITIES

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / ".cache" / "vllm-0.33.0"
ROWS = ROOT / "tests" / "data" / "vllm" / "selector-0.33.0.jsonl.gz"
SwitchOn = Callable[..., Path]


def missing() -> str:
    """Why there is no vLLM to test with, or nothing."""
    if (SOURCES / "vllm").is_dir() and importlib.util.find_spec("torch") is not None:
        return ""
    return f"needs vLLM's Python files in {SOURCES.relative_to(ROOT)} and what they import: run `make test-vllm`"


class Engine:
    """vLLM with one simulated GPU, the configuration that it currently runs with, and what it logs for attnreg."""

    def __init__(self, platform: type) -> None:
        from vllm.config import VllmConfig

        self.platform: Any = platform
        self.config = VllmConfig()
        self.log: list[logging.LogRecord] = []

    def use(self, arch: str) -> None:
        """Give it another GPU of NVIDIA's."""
        vllm_machine.exchange(self.platform, arch)

    def messages(self, level: int) -> list[str]:
        """What was logged at this level."""
        return [record.getMessage() for record in self.log if record.levelno == level]

    def backend(self, head_size: int = 128, dtype: str = "bfloat16", kv_dtype: str | None = "auto", **more: Any) -> str:
        """The name of the backend that vLLM gives a layer, asked as vLLM's layers ask."""
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.selector import get_attn_backend

        with set_current_vllm_config(self.config):
            found = get_attn_backend(head_size, getattr(torch, dtype), kv_dtype, **more)
        return _name(f"{found.__module__}.{found.__qualname__}")

    def answers(self, rows: Iterable[Mapping[str, Any]]) -> list[str | None]:
        """The name of the backend that the platform chooses for each configuration, None where there is none."""
        out: list[str | None] = []
        for row in rows:
            with self.row(row) as (asked, num_heads):
                try:
                    path = self.platform.get_attn_backend_cls(None, attn_selector_config=asked, num_heads=num_heads)
                except ValueError:
                    path = None
            out.append(path and _name(path))
        return out

    @contextmanager
    def row(self, row: Mapping[str, Any]) -> Iterator[tuple[Any, int | None]]:
        """The situation of a recorded configuration, and what the platform is asked in it."""
        import torch
        from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
        from vllm.v1.attention.selector import AttentionSelectorConfig

        layer = {name: row.get(name) for name in AttentionSelectorConfig._fields}
        asked = AttentionSelectorConfig(**layer | {"dtype": getattr(torch, row["dtype"])})
        config = VllmConfig()
        config.cache_config.cache_dtype = row.get("run_kv_cache_dtype") or row["kv_cache_dtype"] or "auto"
        config.parallel_config.decode_context_parallel_size = 2 if row["use_dcp"] else 1
        named = ("flash_attn_version", "use_trtllm_attention")
        config.attention_config = AttentionConfig(**{name: row.get(name) for name in named})
        config.model_config = _model_config(row) if row["model"] else None
        if row["arch"] in CAPABILITIES:
            self.use(row["arch"])
        invariant = "1" if row["use_batch_invariant"] else "0"
        with set_current_vllm_config(config), mock.patch.dict(os.environ, VLLM_BATCH_INVARIANT=invariant):
            yield asked, row["num_heads"]


def _name(path: str) -> str:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return next(member.name for member in AttentionBackendEnum if member.value == path)


def _model_config(row: Mapping[str, Any]) -> SimpleNamespace:
    """As much of vLLM's ModelConfig as its attention backends look at."""
    model = row["model"]
    return SimpleNamespace(
        get_num_attention_heads=lambda ranks: model["num_heads"],
        get_num_kv_heads=lambda ranks: model["num_kv_heads"],
        get_head_size=lambda: row["head_size"],
        hf_text_config=SimpleNamespace(**model["hf"]),
        attn_type=model.get("attn_type", "decoder"),
        is_diffusion=False,
        is_mm_prefix_lm=row["use_mm_prefix"],
        rswa_window=128 if row["use_rswa"] else None,
    )


def recorded(platform: str) -> list[dict[str, Any]]:
    """The recorded decisions of a platform for which no backend was named."""
    with gzip.open(ROWS) as file:
        rows = [json.loads(line) for line in file]
    return [row for row in rows if row["in"]["platform"] == platform and row["in"]["requested_backend"] is None]


def boot(arch: str, aiter: str = "") -> type:  # noqa: A002
    """The platform class of a simulated GPU, made vLLM's current one for the rest of this process."""
    return vllm_machine.boot(SOURCES, arch, aiter)
