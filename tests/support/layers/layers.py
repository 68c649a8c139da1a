"""Fixtures of the tests that run layers: one thread, a CPU platform, and a function that makes layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import attnreg
from attnreg import AttentionRequest, Platform, Registry
from attnreg.runtime.interface import AttentionSpec
from attnreg.runtime.layer import Attention


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Run torch on one thread: the tensors are so small that threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def cpu() -> Platform:
    return Platform(platform="cpu", arch="x86_64")


@pytest.fixture
def make(default: Registry, cpu: Platform) -> Callable[..., Attention]:
    """A function that makes a layer of a backend, by default CPU_ATTN.

    It takes fields of the request, and arguments of `Attention.from_selection`.
    """
    names = set(AttentionRequest.__dataclass_fields__)

    def made(backend: str = "CPU_ATTN", **given: Any) -> Attention:
        fields = {"head_size": 16, "num_heads": 4, "num_kv_heads": 2, "dtype": "float32", "block_size": 4, **given}
        request = AttentionRequest(**{k: v for k, v in fields.items() if k in names})
        selection = attnreg.select(request, cpu, default, backend)
        return Attention.from_selection(selection, **{k: v for k, v in given.items() if k not in names})

    return made


def spec(**changes: Any) -> AttentionSpec:
    """The spec of a small layer in float32, with the features that its numbers need."""
    plain: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_size": 8, "head_size_v": 8, "softmax_scale": 1.0}
    features = {name for name in ("sliding_window", "softcap") if changes.get(name)} | changes.pop("features", set())
    return AttentionSpec(**{**plain, "dtype": torch.float32, "features": frozenset(features), **changes})
