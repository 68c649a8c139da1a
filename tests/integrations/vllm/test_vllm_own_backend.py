"""attnreg's backend as vLLM 0.33.0 finds it: registered, chosen by the registry, asked what it serves, left out."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import logging
import pickle
import pickletools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import Engine

import attnreg
from attnreg.integrations.vllm import claims, decider, kernels
from attnreg.integrations.vllm.plugin import register

# torch and vLLM warn of their own future
pytestmark = pytest.mark.filterwarnings("default")

Switch = Callable[..., None]


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has Triton, and kernels that can be imported."""
    for module in (claims, decider):
        monkeypatch.setattr(module, "installed_packages", lambda known: {"torch": "2.11", "triton": "3.6.0"})
    cpu = next(p for p in attnreg.detect_all() if p.platform == "cpu")
    monkeypatch.setattr(kernels, "here", lambda: cpu)


@pytest.fixture
def switch_to(with_triton: None, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Switch:
    """Switch the plugin on: by the variable's own word, or by an overlay of this text over the bundled one."""

    def to(overlay: str = "") -> None:
        file = tmp_path / "mine.yaml"
        file.write_text(f"extends: vllm-0.33.0+attnreg\n{overlay}")
        monkeypatch.setenv("ATTNREG_VLLM", str(file) if overlay else "attnreg")
        register()

    return to


@pytest.fixture
def on(switch_to: Switch, engine: Engine) -> Iterator[Engine]:
    """vLLM with attnreg's backend in its order."""
    switch_to()
    return engine  # type: ignore[return-value]


# chosen ------------------------------------------------------------------------------------------------------------


def test_it_takes_what_vllm_leaves_to_its_own_triton_kernel(on: Engine) -> None:
    assert on.backend() == "FLASH_ATTN"
    on.use("sm80")
    assert on.backend(has_sink=True) == "ATTNREG"
    (announced, hopper, ampere) = on.messages(logging.INFO)
    assert announced.startswith("attnreg: vllm-0.33.0+attnreg@")
    assert "FLASH_ATTN/FA3-4 for target layers" in hopper
    assert "ATTNREG for target layers (head size 128, bfloat16, KV cache auto, sinks): 4th choice of 7" in ampere
    assert on.messages(logging.WARNING) == []


def test_what_it_does_not_serve_goes_to_vllms_own_with_the_reason(on: Engine) -> None:
    on.use("sm80")
    assert on.backend(kv_dtype="int8_per_token_head") == "TRITON_ATTN"
    said = on.messages(logging.INFO)[-1]
    assert said.startswith(
        "attnreg: its own ATTNREG does not serve these: kv_dtype is int8_per_token_head; supported: "
    )


def test_an_overlay_may_require_it(switch_to: Switch, engine: Engine) -> None:
    switch_to("choices: [{when: {attention: mha}, require: ATTNREG}]")
    assert engine.backend() == engine.backend(64, has_sink=True, has_sliding_window=True) == "ATTNREG"
    with pytest.raises(ValueError, match=r"ATTNREG .*kv_dtype is int8_per_token_head; supported") as caught:
        engine.backend(kv_dtype="int8_per_token_head")
    assert "attnreg (vllm-0.33.0+attnreg+mine@" in str(caught.value)


def test_named_by_the_user_it_serves_every_layer_and_refuses_by_the_registrys_reasons(on: Engine) -> None:
    from vllm.config import AttentionConfig

    on.config.attention_config = AttentionConfig(backend="ATTNREG")
    assert on.backend() == on.backend(64, has_sink=True, has_sliding_window=True) == "ATTNREG"
    with pytest.raises(ValueError, match=r"head_size is 24; supported: 32 to 512"):
        on.backend(24)
    on.config.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(ValueError, match=r"pcp is not supported"):
        on.backend(80)
    on.config.parallel_config.prefill_context_parallel_size = 1
    on.config.parallel_config.decode_context_parallel_size = 2
    assert on.backend(80) == "ATTNREG"
    with pytest.raises(ValueError, match=r"ranges of multimodal tokens compare positions in the whole context"):
        on.backend(80, use_mm_prefix=True)


@pytest.mark.parametrize(
    ("model", "asked", "reason"),
    [
        ("rnj1", {"has_sliding_window": True}, "Rnj-1's windows begin at multiples"),
        ("step1", {}, "Step-1 takes the root"),
    ],
)
def test_what_only_the_model_says_is_known_too(model: str, asked: dict[str, Any], reason: str, on: Engine) -> None:
    config = SimpleNamespace(
        get_num_attention_heads=lambda ranks: 8, get_num_kv_heads=lambda ranks: 2, get_head_size=lambda: 128,
        hf_text_config=SimpleNamespace(model_type=model), attn_type="decoder", is_diffusion=False,
        is_mm_prefix_lm=False, rswa_window=None,
    )  # fmt: skip
    on.config.model_config = config  # type: ignore[assignment]
    on.use("sm80")
    layer = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, **asked}
    assert reason in " ".join(_reasons(on, layer))


def _reasons(engine: Engine, layer: dict[str, Any]) -> list[str]:
    from vllm.config import set_current_vllm_config

    from attnreg.integrations.vllm.backend import AttnregBackend

    with set_current_vllm_config(engine.config):
        return AttnregBackend.validate_configuration(device_capability=engine.platform.capability, **layer)


# what vLLM asks of the class --------------------------------------------------------------------------------------


def test_every_answer_is_that_of_the_row(on: Engine) -> None:
    from vllm.v1.attention.backend import MultipleOf

    from attnreg.integrations.vllm.backend import AttnregBackend as Backend

    assert Backend.get_supported_kernel_block_sizes() == [MultipleOf(16)]
    assert [size for size in range(1, 70) if Backend.supports_block_size(size)] == [16, 32, 48, 64]
    assert [size for size in range(0, 600, 8) if size and Backend.supports_head_size(size)] == list(range(32, 513, 8))
    assert Backend.supports_dtype(torch.float32)
    assert not Backend.supports_dtype(torch.float64)
    assert Backend.supports_kv_cache_dtype("fp8_e5m2")
    assert not Backend.supports_kv_cache_dtype("turboquant_k8v4")
    served = {method for method in claims.FEATURES if getattr(Backend, method)()}
    assert served == {
        "supports_batch_invariance", "supports_dcp", "supports_kv_connector", "supports_mm_prefix",
        "supports_non_causal", "supports_per_head_quant_scales", "supports_sink", "supports_sliding_window",
    }  # fmt: skip
    assert all(Backend.supports_attn_type(t) for t in ("decoder", "encoder", "encoder_only", "encoder_decoder"))


def test_the_answers_follow_an_overlay(switch_to: Switch, engine: Engine) -> None:
    from attnreg.integrations.vllm.backend import AttnregBackend as Backend

    switch_to("""\
backends:
  ATTNREG: {capabilities: {head_sizes: [64], block_sizes: {multiple_of: 32}, remove: {features: [sinks]}}}
""")
    assert [size for size in (64, 128) if Backend.supports_head_size(size)] == [64]
    assert not Backend.supports_sink()
    assert Backend.get_preferred_block_size(16) == 32


def test_the_row_claims_what_the_kernels_row_does() -> None:
    ours = attnreg.load_registry("vllm-0.33.0+attnreg").backends["ATTNREG"]
    kernels_row = attnreg.load_registry("default").backends["TRITON_ATTN"]
    for left, right in zip(ours.variants, kernels_row.variants, strict=True):
        # but for the blocks, of which the row leaves some out
        texts = {c.facet: c.matcher.text for c in left.claims if c.facet != "block_size"}
        assert texts == {c.facet: c.matcher.text for c in right.claims}
        # and for what no layer of vLLM asks for; that ranks share a cache is no kernel's, but the runtime's
        asked = {*claims.FEATURES.values(), "alibi", "causal_by_request", "lse", "mm_prefix_in_window", "softcap"}
        assert left.features.keys() == right.features.keys() & asked | {"dcp"}
        assert left.open.keys() | {"block_sizes"} == right.open.keys()
        # the same holds of rules: vLLM's layers have no window of two sides
        rejects = {rule.reject for rule in right.rules if not rule.reject.startswith("a layer has one window")}
        assert rejects <= {rule.reject for rule in left.rules}
    assert ours.platforms == kernels_row.platforms


@pytest.mark.parametrize(
    ("ranges", "ranks", "support"), [(False, 1, "ALWAYS"), (True, 1, "UNIFORM_BATCH"), (False, 2, "UNIFORM_BATCH")]
)
def test_graphs_hold_whatever_the_lengths_are_but_not_ranges(
    ranges: bool, ranks: int, support: str, engine: Engine
) -> None:
    from attnreg.integrations.vllm.metadata import AttnregMetadataBuilder

    parallel = SimpleNamespace(decode_context_parallel_size=ranks)
    config = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=ranges), parallel_config=parallel)
    assert AttnregMetadataBuilder.get_cudagraph_support(config, None).name == support
    config.model_config = None
    assert AttnregMetadataBuilder.get_cudagraph_support(config, None).name == ("ALWAYS" if ranks == 1 else support)


# in other processes --------------------------------------------------------------------------------------------------


def test_it_reaches_processes_that_have_not_loaded_their_plugins(on: Engine) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    member = AttentionBackendEnum["ATTNREG"]
    sent = pickle.dumps(member)
    assert pickle.loads(sent) is member
    names = [argument for _, argument, _ in pickletools.genops(sent) if isinstance(argument, str)]
    assert names == ["attnreg.integrations.vllm.plugin", "own_backend"]


# where it cannot be used ------------------------------------------------------------------------------------------


def test_kernels_that_cannot_be_imported_leave_vllms_own(
    switch_to: Switch, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise ImportError("libtriton.so is gone")

    monkeypatch.setattr("attnreg.integrations.vllm.kernels.load_kernel", load)
    switch_to()
    engine.use("sm80")
    assert engine.backend(has_sink=True) == "TRITON_ATTN"
    said = engine.messages(logging.INFO)[-1]
    assert said.endswith("denied: its kernels cannot run here: libtriton.so is gone")


MOVES = {
    "a new field of a batch": "CommonAttentionMetadata now has tree_mask",
    "a new question of the selector": "AttentionSelectorConfig now has use_trees",
    "an argument of a layer is gone": "AttentionImpl.__init__ has no kv_sharing_target_layer_name",
    "a word for quantised outputs is gone": "kFp8StaticTensorSym is gone",
    "the registry of backends is gone": "register_backend is gone",
    "the selector has no cache": "_cached_get_attn_backend is no cached function",
    "a platform is asked otherwise": "Platform.get_attn_backend_cls has no attn_selector_config, num_heads and now has",
    "a platform is not asked": "Platform.get_attn_backend_cls is gone",
    "the axes of a cache are others": "KVCacheLayout has no LBHNC",
    "a setting is gone": "AttentionConfig has no use_trtllm_attention",
    "a module is gone": "vllm.utils.import_utils is gone",
}


@pytest.fixture(params=MOVES)
def moved(request: pytest.FixtureRequest, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> str:
    """A vLLM in which one interface is another; what is said of it."""
    from vllm import config
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.platforms.interface import Platform
    from vllm.v1 import kv_cache_layout
    from vllm.v1.attention import backend, selector
    from vllm.v1.attention.backends import registry

    what = request.param
    if what == "a new field of a batch":
        extra = dataclasses.make_dataclass(
            "CommonAttentionMetadata", [("tree_mask", Any, None)], bases=(backend.CommonAttentionMetadata,)
        )
        monkeypatch.setattr(backend, "CommonAttentionMetadata", extra)
    elif what == "a new question of the selector":
        fields = (*selector.AttentionSelectorConfig._fields, "use_trees")
        monkeypatch.setattr(selector, "AttentionSelectorConfig", SimpleNamespace(_fields=fields))
    elif what == "a word for quantised outputs is gone":
        monkeypatch.delattr(quant_utils, "kFp8StaticTensorSym")
    elif what == "an argument of a layer is gone":
        parameters = list(inspect.signature(backend.AttentionImpl.__init__).parameters.values())
        changed = inspect.Signature(parameters[:-1])
        monkeypatch.setattr(backend.AttentionImpl.__init__, "__signature__", changed, raising=False)
    elif what == "the registry of backends is gone":
        monkeypatch.delattr(registry, "register_backend")
    elif what == "a platform is asked otherwise":
        monkeypatch.setattr(Platform, "get_attn_backend_cls", classmethod(lambda cls, selected_backend, layer: ""))
    elif what == "a platform is not asked":
        for base in engine.platform.__mro__:
            if "get_attn_backend_cls" in vars(base):
                monkeypatch.delattr(base, "get_attn_backend_cls")
    elif what == "the axes of a cache are others":
        others = enum.Enum("KVCacheLayout", "LBNHC LHBNC BLHNC BLNHC BHLNC")
        monkeypatch.setattr(kv_cache_layout, "KVCacheLayout", others)
    elif what == "a setting is gone":
        fewer = dataclasses.make_dataclass("AttentionConfig", [("flash_attn_version", Any)])
        monkeypatch.setattr(config, "AttentionConfig", fewer)
    elif what == "a module is gone":
        monkeypatch.setitem(sys.modules, "vllm.utils.import_utils", None)
    else:
        monkeypatch.setattr(selector, "_cached_get_attn_backend", selector._cached_get_attn_backend.__wrapped__)
    return MOVES[what]


def test_in_a_vllm_whose_interfaces_moved_it_steps_aside(
    moved: str, with_triton: None, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import envs
    from vllm.v1.attention import selector

    before = selector._cached_get_attn_backend
    monkeypatch.setenv("ATTNREG_VLLM", "attnreg")
    register()
    (said,) = engine.messages(logging.WARNING)
    assert said.startswith("attnreg: steps aside, and vLLM 0.33.0 runs as without it: it was written for vLLM 0.33.0")
    assert moved in said
    assert "get_attn_backend_cls" not in vars(engine.platform)
    assert selector._cached_get_attn_backend is before
    assert "ATTNREG_VLLM" not in envs.environment_variables


@pytest.mark.parametrize("moved", ["a new question of the selector"], indirect=True)
@pytest.mark.parametrize("value", ["1", "attnreg"])
def test_a_later_release_whose_interfaces_moved_runs_as_without_it(
    moved: str, value: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.35.0")
    monkeypatch.setenv("ATTNREG_VLLM", value)
    register()
    (said,) = engine.messages(logging.WARNING)
    assert said.startswith("attnreg: steps aside, and vLLM 0.35.0 runs as without it: it was written for vLLM 0.33.0")
    assert "get_attn_backend_cls" not in vars(engine.platform)


def test_required_in_such_a_vllm_it_is_an_error(moved: str, switch_to: Switch, engine: Engine) -> None:
    with pytest.raises(attnreg.RegistryError, match=r"mine\.yaml:2:\d+: ATTNREG is required, and this vLLM is not the"):
        switch_to("choices: [{require: ATTNREG}]")
    assert "get_attn_backend_cls" not in vars(engine.platform)
