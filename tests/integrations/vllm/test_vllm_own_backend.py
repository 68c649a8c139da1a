"""attnreg's backend as vLLM 0.33.0 finds it: registered, chosen by the registry, asked what it serves, left out."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from engine import Engine

from attnreg.integrations.vllm import claims, decider
from attnreg.integrations.vllm.plugin import register

# torch and vLLM warn of their own future
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """vLLM with attnreg's backend in its order, on a machine that has Triton."""
    for module in (claims, decider):
        monkeypatch.setattr(module, "installed_packages", lambda known: {"torch": "2.11", "triton": "3.6.0"})
    monkeypatch.setenv("ATTNREG_VLLM", "attnreg")
    register()
    return engine


def test_it_takes_what_vllm_leaves_to_its_own_triton_kernel(on: Engine) -> None:
    assert on.backend() == "FLASH_ATTN"
    on.use("sm80")
    assert on.backend(has_sink=True) == "ATTNREG"
    (announced, hopper, ampere) = on.messages(logging.INFO)
    assert announced.startswith("attnreg: vllm-0.33.0+attnreg@")
    assert "FLASH_ATTN/FA3-4 for target layers" in hopper
    assert "ATTNREG for target layers (head size 128, bfloat16, KV cache auto, sinks): 4th choice of 7" in ampere
    assert on.messages(logging.WARNING) == []
