"""vLLM 0.33.0's own Python on a machine without a GPU: its compiled half is simulated where it would be imported.

Not part of `make test`: the wheel is large, and vLLM wants packages that nothing else here does. `make test-vllm` unpacks
the wheel's Python files and runs these tests. The directory is not called `vllm`, because it would be importable so.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import simulated

SOURCES = Path(__file__).resolve().parents[2] / ".cache" / "vllm-0.33.0"
CAPABILITIES = {"sm75": (7, 5), "sm80": (8, 0), "sm89": (8, 9), "sm90": (9, 0), "sm100": (10, 0), "sm103": (10, 3)}
CAPABILITIES |= {"sm110": (11, 0), "sm120": (12, 0), "sm121": (12, 1)}


class Engine:
    """vLLM with one simulated GPU, the configuration that it currently runs with, and what it logs for attnreg."""

    def __init__(self, platform: type) -> None:
        from vllm.config import VllmConfig

        self.platform = platform
        self.config = VllmConfig()
        self.log: list[logging.LogRecord] = []

    def use(self, arch: str) -> None:
        """Give it another GPU."""
        from vllm.platforms.interface import DeviceCapability
        from vllm.utils import flashinfer

        self.platform.capability = DeviceCapability(*CAPABILITIES[arch])
        # what it remembers of the GPU
        for value in vars(flashinfer).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()

    def backend(self, head_size: int = 128, dtype: str = "bfloat16", kv_dtype: str | None = "auto", **layer: Any) -> str:
        """The name of the backend that vLLM gives a layer, asked as vLLM's layers ask."""
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.selector import get_attn_backend

        with set_current_vllm_config(self.config):
            found = get_attn_backend(head_size, getattr(torch, dtype), kv_dtype, **layer)
        return self.name(f"{found.__module__}.{found.__qualname__}")

    def name(self, path: str) -> str:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        return next(member.name for member in AttentionBackendEnum if member.value == path)

    def messages(self, level: int) -> list[str]:
        return [record.getMessage() for record in self.log if record.levelno == level]

    @contextmanager
    def row(self, row: Mapping[str, Any]) -> Iterator[tuple[Any, int | None]]:
        """The configuration of a recorded row, and what the selector is asked there."""
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
        config.model_config = model_config(row) if row["model"] else None
        self.use(row["arch"])
        invariant = "1" if row["use_batch_invariant"] else "0"
        with set_current_vllm_config(config), mock.patch.dict("os.environ", VLLM_BATCH_INVARIANT=invariant):
            yield asked, row["num_heads"]


def model_config(row: Mapping[str, Any]) -> SimpleNamespace:
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


@pytest.fixture(scope="session")
def simulated_gpu() -> type:
    """A platform class whose GPU is simulated, made vLLM's current one."""
    if not (SOURCES / "vllm").is_dir() or importlib.util.find_spec("torch") is None:
        pytest.skip("needs vLLM 0.33.0's Python files in .cache/vllm-0.33.0 and what they import: run `make test-vllm`")
    simulated.install()
    sys.path.insert(0, str(SOURCES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import vllm.platforms
        from vllm.platforms.cuda import NonNvmlCudaPlatform

        class SimulatedGpu(NonNvmlCudaPlatform):
            capability: Any = None

            @classmethod
            def get_device_capability(cls, device_id: int = 0) -> Any:
                return cls.capability

            @classmethod
            def get_device_name(cls, device_id: int = 0) -> str:
                return "simulated"

            @classmethod
            def num_compute_units(cls, device_id: int = 0) -> int:
                return 132

        vllm.platforms._current_platform = SimulatedGpu()
        # importing it allocates 128 MB on the GPU
        with mock.patch.object(torch, "empty"):
            import vllm.v1.attention.backends.mla.cutlass_mla
    return SimulatedGpu


@pytest.fixture
def engine(simulated_gpu: type, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """vLLM on a simulated Hopper, with FlashAttention 2 to 4 and FlashInfer, and with attnreg switched off."""
    from vllm import envs
    from vllm.v1.attention import selector

    monkeypatch.delenv("ATTNREG_VLLM", raising=False)
    monkeypatch.delenv("ATTNREG_REGISTRY", raising=False)
    # FlashInfer is there with its kernels: without this vLLM looks for a compiler and for the network
    monkeypatch.setenv("VLLM_HAS_FLASHINFER_CUBIN", "1")
    # what the plugin changes is put back
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    monkeypatch.setattr(selector, "_cached_get_attn_backend", selector._cached_get_attn_backend)
    selector._cached_get_attn_backend.cache_clear()
    engine = Engine(simulated_gpu)
    engine.use("sm90")
    handler = logging.Handler()
    handler.emit = engine.log.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.attnreg")
    logger.addHandler(handler)
    # vLLM sets the level of its own when an engine starts
    logger.setLevel(logging.INFO)
    yield engine
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    if "get_attn_backend_cls" in vars(simulated_gpu):
        del simulated_gpu.get_attn_backend_cls
