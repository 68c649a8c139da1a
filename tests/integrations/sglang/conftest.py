"""Fixtures: attnreg's backend for SGLang over stand-ins for SGLang's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.layers.sglang_world import Facts, World
from support.stand_ins import sglang_modules
from support.stand_ins.sglang_modules import Context


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Context:
    """SGLang's modules, as far as the backend touches them."""
    monkeypatch.delenv("ATTNREG_SGLANG", raising=False)
    return sglang_modules.install(monkeypatch)


@pytest.fixture
def serve(sglang: Context) -> Callable[..., tuple[World, Any]]:
    """A runner with these facts, and attnreg's backend for it."""

    def made(**facts: Any) -> tuple[World, Any]:
        from attnreg.integrations.sglang.backend import SglangBackend

        world = World(Facts(**facts))
        return world, SglangBackend(world.runner)

    return made
