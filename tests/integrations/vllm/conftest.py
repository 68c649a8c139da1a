"""Fixtures for vLLM 0.33.0's own Python on a machine without a GPU.

Not part of `make test`: the wheel is large, and vLLM wants packages that nothing else here does. `make test-vllm`
unpacks the wheel's Python files and runs these tests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import engine as vllm_engine
import pytest
from engine import Engine, SwitchOn

import attnreg
from attnreg.integrations.vllm.plugin import register


@pytest.fixture(scope="session")
def gpu() -> type:
    """A simulated NVIDIA GPU, with FlashAttention 2 to 4 and FlashInfer."""
    if reason := vllm_engine.missing():
        pytest.skip(reason)
    return vllm_engine.boot("sm90")


@pytest.fixture
def engine(gpu: type, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """vLLM on Hopper, with attnreg switched off; whatever a test puts in place is taken out again."""
    from vllm import envs
    from vllm.v1.attention import selector

    for name in ("ATTNREG_VLLM", "ATTNREG_REGISTRY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    monkeypatch.setattr(selector, "_cached_get_attn_backend", selector._cached_get_attn_backend)
    selector._cached_get_attn_backend.cache_clear()
    engine = Engine(gpu)
    engine.use("sm90")
    handler, logger = logging.Handler(), logging.getLogger("vllm.attnreg")
    handler.emit = engine.log.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    # vLLM sets the level of its own when an engine starts
    logger.setLevel(logging.INFO)
    yield engine
    logger.removeHandler(handler)
    if "get_attn_backend_cls" in vars(gpu):
        del engine.platform.get_attn_backend_cls


@pytest.fixture
def switch_on(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SwitchOn:
    """Switch the plugin on: for the bundled registry, or for an overlay of this text over it."""

    def on(overlay: str = "", name: str = "") -> Path:
        file = tmp_path / (name or "mine.yaml")
        file.write_text(f"extends: vllm-0.33.0\n{overlay}")
        monkeypatch.setenv("ATTNREG_VLLM", (name or str(file)) if overlay else "1")
        register()
        return file

    return on


@pytest.fixture
def on_cpu(engine: Engine, switch_on: SwitchOn, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The engine's GPU is simulated, so attnreg's row for processors computes; the rest is as on a GPU."""
    from vllm.config import set_current_vllm_config
    from vllm.utils import torch_utils

    from attnreg.integrations.vllm import kernels

    cpu = next(p for p in attnreg.detect_all() if p.platform == "cpu")
    monkeypatch.setattr(kernels, "here", lambda: cpu)
    monkeypatch.setattr(torch_utils, "PIN_MEMORY", False)
    with set_current_vllm_config(engine.config):
        yield engine
