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


def test_named_by_the_user_it_serves_every_layer_and_refuses_by_the_registrys_reasons(on: Engine) -> None:
    from vllm.config import AttentionConfig

    on.config.attention_config = AttentionConfig(backend="ATTNREG")
    assert on.backend() == on.backend(64, has_sink=True, has_sliding_window=True) == "ATTNREG"
    with pytest.raises(ValueError, match=r"head_size is 24; supported: 32 to 512"):
        on.backend(24)
    on.config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ValueError, match=r"dcp is not supported"):
        on.backend(80)


def test_it_reaches_processes_that_have_not_loaded_their_plugins(on: Engine) -> None:
    import pickle
    import pickletools

    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    member = AttentionBackendEnum["ATTNREG"]
    sent = pickle.dumps(member)
    assert pickle.loads(sent) is member
    names = [argument for _, argument, _ in pickletools.genops(sent) if isinstance(argument, str)]
    assert names == ["attnreg.integrations.vllm.plugin", "own_backend"]
