"""Builds of FlashAttention 3 that a test installs: stand-ins with the schemas that two packages register."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest
from support.stand_ins import fake_aiter, fake_varlen

from attnreg.kernels import upstream
from attnreg.kernels.triton import cache
from attnreg.kernels.upstream import UpstreamError

MODULES = tuple(f"attnreg.kernels.flash_attn.{name}" for name in ("fa3", "mla"))
BUILDS: dict[str, tuple[str, str, Any]] = {
    "vllm": ("_vllm_fa3_C", fake_varlen.FA3_VLLM, fake_varlen.fa3),
    "flash-attn-3": ("flash_attn_3", fake_varlen.FA3_OWN, fake_varlen.fa3_own),
}


def forget() -> None:
    for module in MODULES:
        sys.modules.pop(module, None)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Installs the builds that a test names, and imports an adapter anew."""
    forget()
    monkeypatch.setattr(cache, "_write", fake_aiter.write)
    with ExitStack() as stack:

        def load(*builds: str, module: str = MODULES[0], schema: Callable[[str], str] = str) -> ModuleType:
            loads = {package.replace("-", "_") for package in builds}

            def library(package: str, pattern: str) -> None:
                if package not in loads:
                    raise UpstreamError(f"package {package} is not installed")

            monkeypatch.setattr(upstream, "_load_library", library)
            for build in builds:
                namespace, words, function = BUILDS[build]
                stack.enter_context(fake_varlen.registered(namespace, schema(words), "fwd", function))
            return importlib.import_module(module)

        yield load
    forget()
