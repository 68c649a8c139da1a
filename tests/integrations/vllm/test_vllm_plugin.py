"""The plugin inside vLLM 0.33.0: who decides, what is obeyed, what is left alone, and what is said."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from engine import ROOT, Engine, SwitchOn

import attnreg
from attnreg.integrations.vllm.plugin import register

# torch and vLLM warn of their own future
pytestmark = pytest.mark.filterwarnings("default")


GUIDE = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
# the guide's own overlay: one answer for each KV group, and one for drafts
PER_GROUP = re.findall(r"```yaml\nextends: vllm-0\.33\.0\n(.*?)```", GUIDE, re.DOTALL)[0]


# off -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "", "0"])
def test_it_is_off_by_default(value: str | None, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.v1.attention import selector

    before = selector._cached_get_attn_backend
    if value is not None:
        monkeypatch.setenv("ATTNREG_VLLM", value)
    register()
    assert "get_attn_backend_cls" not in vars(engine.platform)
    assert selector._cached_get_attn_backend is before
    assert "ATTNREG_VLLM" not in envs.compile_factors()
    assert engine.backend() == "FLASH_ATTN"
    assert engine.log == []


def test_vllm_finds_the_plugin(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.plugins

    (point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="attnreg")
    assert point.load() is register
    monkeypatch.setenv("ATTNREG_VLLM", "1")
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    vllm.plugins.load_general_plugins()
    assert "get_attn_backend_cls" in vars(engine.platform)


# an overlay is obeyed ------------------------------------------------------------------------------------------------


def test_each_kv_group_gets_its_own_backend(engine: Engine, switch_on: SwitchOn) -> None:
    from vllm.compilation.backends import set_model_tag

    switch_on(PER_GROUP)
    assert engine.backend() == "FLASH_ATTN"
    assert engine.backend(has_sliding_window=True) == "TRITON_ATTN"
    # the same layer in a draft; vLLM alone would repeat what it answered for the target
    for tag in ("eagle_head", "dflash_head", "draft_model"):
        with set_model_tag(tag):
            assert engine.backend() == "FLEX_ATTENTION"
    with set_model_tag("self_decoder"):
        assert engine.backend() == "FLASH_ATTN"
    assert engine.backend() == "FLASH_ATTN"


def test_what_is_preferred_gives_way_where_it_is_not_valid(engine: Engine, switch_on: SwitchOn) -> None:
    switch_on("choices:\n  - {prefer: FLEX_ATTENTION}\n")
    assert engine.backend() == "FLEX_ATTENTION"
    assert engine.backend(has_sink=True) == "FLASH_ATTN"
    assert "FLEX_ATTENTION is preferred (mine.yaml:3) but not chosen: sinks is not supported" in "\n".join(
        engine.messages(logging.WARNING)
    )


def test_denied_everywhere_is_an_error_with_the_trace(engine: Engine, switch_on: SwitchOn) -> None:
    switch_on("choices:\n  - {deny: [FLASH_ATTN, FLASHINFER, TRITON_ATTN, FLEX_ATTENTION], because: none is trusted}\n")
    with pytest.raises(ValueError, match="No backend accepts this request on cuda sm90") as caught:
        engine.backend()
    text = str(caught.value)
    assert text.startswith("attnreg (vllm-0.33.0+mine@")
    for backend in ("FLASH_ATTN/FA3-4", "FLASHINFER/XQA", "TRITON_ATTN", "FLEX_ATTENTION"):
        assert re.search(rf"^  {backend}\S* +denied: none is trusted  \[mine\.yaml:3\]$", text, re.MULTILINE)
    assert "TURBOQUANT" in text


def test_vllm_validates_what_the_registry_chooses(engine: Engine, switch_on: SwitchOn) -> None:
    switch_on("backends:\n  FLASH_ATTN: {variants: [{name: FA3-4, capabilities: {head_sizes: any}}]}\n")
    match = r"attnreg chose FLASH_ATTN/FA3-4 .*head size 100, .*, but vLLM refuses it: .*head_size not supported"
    with pytest.raises(ValueError, match=match):
        engine.backend(head_size=100)


def test_a_backend_from_elsewhere_can_be_chosen(engine: Engine, switch_on: SwitchOn) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    switch_on("""\
backends:
  CUSTOM:
    summary: Somebody's own kernels.
    platforms: [cuda]
    attention: mha
    capabilities:
      {dtypes: any, kv_dtypes: any, block_sizes: any, head_sizes: any, head_sizes_v: any, num_heads: any,
       num_kv_heads: any, cache_layouts: any, attn_types: any, features: []}
    source: "vllm:vllm/v1/attention/backends/triton_attn.py#TritonAttentionBackend"
place:
  - {backend: CUSTOM, before: FLASH_ATTN, orders: [cuda/mha]}
""")
    register_backend(AttentionBackendEnum.CUSTOM, AttentionBackendEnum.TRITON_ATTN.value)
    try:
        assert engine.backend() == "TRITON_ATTN"
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
    assert "CUSTOM for target layers" in engine.messages(logging.INFO)[-1]


# an explicit choice is left alone ------------------------------------------------------------------------------------


def test_a_backend_named_by_the_user_is_left_alone(engine: Engine, switch_on: SwitchOn) -> None:
    from vllm.config import AttentionConfig

    switch_on("choices:\n  - {require: TRITON_ATTN}\n")
    engine.config.attention_config = AttentionConfig(backend="FLEX_ATTENTION")
    assert engine.backend() == "FLEX_ATTENTION"
    engine.config.attention_config = AttentionConfig(backend_per_kind={"full_attention": "FLASHINFER"})
    assert engine.backend() == "FLASHINFER"
    assert engine.messages(logging.INFO)[1:] == []
    # a kind without an entry is chosen automatically
    assert engine.backend(has_sliding_window=True) == "TRITON_ATTN"


# a wrong registry stops vLLM -----------------------------------------------------------------------------------------


def test_a_wrong_overlay_is_an_error_at_its_line(engine: Engine, switch_on: SwitchOn) -> None:
    with pytest.raises(attnreg.RegistryError, match=r"mine\.yaml:3:\d+: .*FLASH_ATN(.|\n)*did you mean `FLASH_ATTN`"):
        switch_on("choices:\n  - {prefer: FLASH_ATN}\n")
    assert "get_attn_backend_cls" not in vars(engine.platform)


def test_a_choice_of_a_variant_is_an_error_because_vllm_chooses_variants_itself(
    engine: Engine, switch_on: SwitchOn
) -> None:
    said = r"mine.yaml:3:\d+: FLASH_ATTN/FA2 names a variant, and vLLM chooses the variant of a backend itself"
    with pytest.raises(attnreg.RegistryError, match=said):
        switch_on("choices:\n  - {prefer: FLASH_ATTN/FA2}\n")
    # an entry of an order is held to the same
    order = "orders:\n  cuda:\n    - name: mine\n      order: [FLASH_ATTN/FA2]\n      when: {arch: sm90}\n"
    with pytest.raises(attnreg.RegistryError, match=said.replace(":3:", ":5:")):
        switch_on(order)


def test_a_registry_for_something_else_is_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNREG_VLLM", "default")
    with pytest.raises(attnreg.RegistryError, match=r"default@\w+ does not describe vLLM(.|\n)*extends one of: vllm-"):
        register()
    monkeypatch.setenv("ATTNREG_VLLM", "vllm-0.34")
    with pytest.raises(attnreg.RegistryError, match=r"neither a bundled registry(.|\n)*the nearest is `vllm-0\.33\.0`"):
        register()


def test_a_release_without_its_last_number_names_its_last_registry(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNREG_VLLM", "vllm-0.33")
    register()
    assert engine.backend() == "FLASH_ATTN"
    assert engine.messages(logging.INFO)[0].startswith("attnreg: vllm-0.33.0@")


def test_another_version_of_vllm_has_to_be_asked_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.34.1+cu130")
    monkeypatch.setenv("ATTNREG_VLLM", "1")
    with pytest.raises(attnreg.RegistryError, match=r"no bundled registry for vLLM 0\.34\.1(.|\n)*vllm-0\.33\.0"):
        register()
    monkeypatch.setenv("ATTNREG_VLLM", "vllm-0.33.0")
    register()
    assert engine.backend() == "FLASH_ATTN"
    assert "describes vLLM 0.33.0; this is 0.34.1+cu130" in engine.messages(logging.WARNING)[0]


def test_a_backend_that_vllm_lacks_is_an_error_at_its_line(engine: Engine, switch_on: SwitchOn) -> None:
    switch_on("""\
backends:
  MY_ATTN:
    summary: Kernels that nobody registered.
    platforms: [cuda]
    attention: mha
    capabilities:
      {dtypes: any, kv_dtypes: any, block_sizes: any, head_sizes: any, head_sizes_v: any, num_heads: any,
       num_kv_heads: any, cache_layouts: any, attn_types: any, features: []}
    source: "vllm:vllm/v1/attention/backends/triton_attn.py#TritonAttentionBackend"
choices:
  - {require: MY_ATTN}
""")
    with pytest.raises(attnreg.RegistryError, match=r"mine\.yaml:3:\d+: MY_ATTN is no attention backend of this vLLM"):
        engine.backend()


# putting it in place -------------------------------------------------------------------------------------------------


def test_registering_twice_wraps_once(engine: Engine, switch_on: SwitchOn) -> None:
    from vllm.v1.attention import selector

    switch_on(PER_GROUP)
    first = vars(engine.platform)["get_attn_backend_cls"], selector._cached_get_attn_backend
    register()
    assert (vars(engine.platform)["get_attn_backend_cls"], selector._cached_get_attn_backend) == first
    # not before vLLM asks: plugins are loaded before vLLM sets its logging up
    assert engine.messages(logging.INFO) == []
    engine.backend()
    engine.backend(64)
    assert sum("decides which attention backends" in m for m in engine.messages(logging.INFO)) == 1


def test_a_subclass_keeps_its_own_method(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.platforms

    asked = []

    class Vendor(engine.platform):  # type: ignore[name-defined]
        @classmethod
        def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
            asked.append(selected_backend.name)
            path: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
            return path

    monkeypatch.setenv("ATTNREG_VLLM", "1")
    register()
    monkeypatch.setattr(vllm.platforms, "_current_platform", Vendor())
    register()
    assert engine.backend() == "FLASH_ATTN"
    assert asked == ["FLASH_ATTN"]
    # one that has none of its own is served by the class above it
    monkeypatch.setattr(vllm.platforms, "_current_platform", type("Plain", (engine.platform,), {})())
    register()
    assert engine.backend(has_sink=True) == "FLASH_ATTN"
    assert asked == ["FLASH_ATTN"]


def test_the_variable_names_the_registry(engine: Engine, switch_on: SwitchOn, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.ray.ray_env import get_env_vars_to_copy

    file = switch_on(PER_GROUP)
    title = attnreg.load_registry(file).title
    # what vLLM compiled for one registry is not used for another, and Ray's workers get the variables
    assert envs.compile_factors()["ATTNREG_VLLM"] == title
    assert {"ATTNREG_VLLM", "ATTNREG_REGISTRY"} <= get_env_vars_to_copy()


def test_one_stands_for_attnregs_own_variable(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"extends: vllm-0.33.0\n{PER_GROUP}")
    monkeypatch.setenv("ATTNREG_REGISTRY", str(tmp_path / "mine.yaml"))
    monkeypatch.setenv("ATTNREG_VLLM", "1")
    register()
    assert engine.backend(has_sliding_window=True) == "TRITON_ATTN"


# what is said --------------------------------------------------------------------------------------------------------


def test_the_log_has_a_line_for_each_distinct_layer(engine: Engine, switch_on: SwitchOn) -> None:
    file = switch_on(PER_GROUP)
    title = re.escape(attnreg.load_registry(file).title)
    for _ in range(3):
        engine.backend()
        engine.backend(head_size=64, has_sink=True, has_sliding_window=True)
    start, full, window = engine.messages(logging.INFO)
    assert re.fullmatch(rf"attnreg: {title} decides which attention backends .* \(ATTNREG_VLLM=.*mine\.yaml\)", start)
    assert re.fullmatch(
        r"attnreg: FLASH_ATTN/FA3-4 for target layers \(head size 128, bfloat16, KV cache auto\): "
        rf"2nd choice of 6 \(order cuda/mha, priorities\.yaml:\d+\); {title}",
        full,
    )
    assert re.fullmatch(
        r"attnreg: TRITON_ATTN\S* for target layers \(head size 64, bfloat16, KV cache auto, sliding window, "
        rf"sinks\): preferred by mine\.yaml:3 \(order cuda/mha, priorities\.yaml:\d+\); {title}",
        window,
    )
    assert engine.messages(logging.DEBUG) == []


def test_the_guide_quotes_the_log(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, switch_on: SwitchOn
) -> None:
    from vllm.compilation.backends import set_model_tag

    monkeypatch.chdir(tmp_path)
    switch_on(PER_GROUP, "attention.yaml")
    engine.backend(64, has_sink=True)
    engine.backend(64, has_sink=True, has_sliding_window=True)
    with set_model_tag("eagle_head"):
        engine.backend(64)
    quoted = re.findall(r"^attnreg: .*$", GUIDE.partition("## What is logged")[2], re.MULTILINE)
    assert quoted
    # fingerprints and lines of data come and go
    assert [_timeless(line) for line in engine.messages(logging.INFO)] == [_timeless(line) for line in quoted]


def _timeless(line: str) -> str:
    return re.sub(r"@[0-9a-f]{7}\b", "@", re.sub(r"(priorities\.yaml):\d+", r"\1", line))


def test_the_whole_trace_is_there_for_whoever_debugs(engine: Engine, switch_on: SwitchOn) -> None:
    logging.getLogger("vllm.attnreg").setLevel(logging.DEBUG)
    switch_on()
    engine.backend(has_sink=True)
    (trace,) = engine.messages(logging.DEBUG)
    assert "target layers (head size 128, bfloat16, KV cache auto, sinks)\n▸ FLASH_ATTN/FA3-4" in trace
    assert re.search(r"TRITON_ATTN\S* +valid too, ranked lower +priorities\.yaml:\d+", trace)
    assert re.search(r"FLEX_ATTENTION +sinks is not supported +backends\.yaml:\d+", trace)
    assert "would win without sinks" in trace
