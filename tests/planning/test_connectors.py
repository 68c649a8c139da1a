"""Runs with a KV connector: the layout that its class wishes, the caches that it changes, and what is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

import attnreg
from attnreg.cli.commands import main

CONFIGS = ROOT / "examples" / "configs"
V4 = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_hidden_layers": 4}


def plan(transfer: Any, model: str | Path = "gpt-oss-20b", engine: str = "vllm-0.33.0", **more: Any) -> attnreg.Plan:
    where = attnreg.Platform(platform="cuda", arch="sm90")
    return attnreg.plan(CONFIGS / model, where, engine, kv_transfer_config=transfer, **more)


@pytest.mark.parametrize(
    ("connector", "engine", "model", "layout"),
    [
        ("NixlConnector", "vllm-0.33.0", "gpt-oss-20b", "LBHNC"),
        ("NixlConnector", "vllm-0.28.0", "gpt-oss-20b", "HND"),
        ("NixlConnector", "vllm-0.21.0", "gpt-oss-20b", "HND"),
        # of a latent the layout does not matter to these two
        ("NixlConnector", "vllm-0.33.0", "DeepSeek-V3", "LBNHC"),
        ("MooncakeConnector", "vllm-0.26.0", "DeepSeek-V3", "NHD"),
        ("OffloadingConnector", "vllm-0.33.0", "DeepSeek-V3", "LBHNC"),
        ("ExampleHiddenStatesConnector", "vllm-0.30.0", "Llama-3.1-8B", "LBNHC"),
        ("HF3FSKVConnector", "vllm-0.33.0", "Llama-3.1-8B", "LBNHC"),
        # its parts decide, or another package, or the user's own class
        ("MultiConnector", "vllm-0.33.0", "Llama-3.1-8B", None),
        ("LMCacheMPConnector", "vllm-0.33.0", "Llama-3.1-8B", None),
        ({"kv_connector": "NixlConnector", "kv_connector_module_path": "mine"}, "vllm-0.33.0", "Llama-3.1-8B", None),
        # 0.23 has neither of the two
        ("NixlPushConnector", "vllm-0.24.0", "Llama-3.1-8B", "HND"),
        ("NixlPushConnector", "vllm-0.23.0", "Llama-3.1-8B", None),
        ("P2pNcclConnector", "vllm-0.24.0", "Llama-3.1-8B", None),
        ("OffloadingConnector", "vllm-0.21.0", "Llama-3.1-8B", None),
    ],
)
def test_the_class_of_a_connector_decides_the_layout(
    connector: Any, engine: str, model: str, layout: str | None
) -> None:
    found = plan(connector, model, engine, tp=8)
    assert found.layout is not None
    assert found.layout.value == layout
    assert found.starts is (None if layout is None else True)


def test_a_connector_without_a_name_leaves_the_layout_open() -> None:
    found = plan(None, features=["kv_connector"])
    assert (found.starts, found.layout and found.layout.value, found.graphs and found.graphs.value) == (None,) * 3
    asked = plan(None, features=["kv_connector"], connector="HND")
    assert asked.layout is not None
    assert asked.layout.value == "LBHNC"


def test_a_wish_that_no_backend_reads_is_dropped() -> None:
    found = plan("NixlConnector", backend="FLEX_ATTENTION", model="Llama-3.1-8B")
    assert found.layout is not None
    assert (found.layout.value, len(found.layout.dropped)) == ("LBNHC", 1)


@pytest.mark.parametrize(
    ("engine", "connector", "later"),
    [
        ("vllm-0.33.0", None, 24576),
        ("vllm-0.33.0", "NixlConnector", 24576),
        ("vllm-0.33.0", "LMCacheConnectorV1", None),
        ("vllm-0.30.0", "MoRIIOConnector", 24576),
        ("vllm-0.29.0", "MoRIIOConnector", None),
        ("vllm-0.28.0", "MoRIIOConnector", None),
        ("vllm-0.22.0", "NixlConnector", 24576),
        # any connector switched the manager of hybrid caches off
        ("vllm-0.21.0", "NixlConnector", None),
    ],
)
def test_windows_keep_every_token_where_the_manager_of_hybrid_caches_is_off(
    engine: str, connector: str | None, later: int | None
) -> None:
    [stage] = plan(connector, engine=engine).stages
    assert (stage.at_least, stage.later_bytes) == (49152, later)


def test_windows_alone_stay_windows(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "Mistral-7B-v0.1/config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    [stage] = plan("LMCacheConnectorV1", tmp_path).stages
    assert stage.keeps == config["sliding_window"]


@pytest.mark.parametrize("engine", ["vllm-0.22.0", "vllm-0.26.0", "vllm-0.33.0"])
def test_chunks_keep_every_token(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    [stage] = plan(None, "Llama-4-Scout-17B-16E-Instruct", engine, tp=8).stages
    assert (stage.at_least, stage.keeps) == (24576, None)
    words = ["--model", str(CONFIGS / "Llama-4-Scout-17B-16E-Instruct"), "--arch", "sm90", "--tp", "8", "--json"]
    assert main(["explain", "--engine", engine, *words]) == 0
    memory = json.loads(capsys.readouterr().out)["kv_cache"]
    assert {group["keeps_tokens"] for group in memory["groups"]} == {None}


@pytest.mark.parametrize(
    ("connector", "starts"), [("NixlConnector", True), ("FlexKVConnectorV1", False), ("MultiConnector", None)]
)
def test_a_hybrid_needs_a_connector_with_a_part_in_the_manager(connector: str, starts: bool | None) -> None:
    assert plan(connector, "Qwen3-Next-80B-A3B-Instruct", tp=4).starts is starts


def test_options_of_lmcache_may_take_graphs_back() -> None:
    config = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    assert plan(config).starts is True
    layers = plan(json.dumps({**config, "kv_connector_extra_config": {"use_layerwise": True}}))
    assert (layers.starts, layers.graphs and layers.graphs.value) == (None, None)


@pytest.mark.parametrize(
    ("engine", "connector", "ranks", "starts"),
    [
        ("vllm-0.29.0", "NixlConnector", {}, False),
        ("vllm-0.29.0", "NixlConnector", {"tp": 8}, None),
        ("vllm-0.29.0", "NixlConnector", {"pp": 2}, None),
        ("vllm-0.30.0", "NixlConnector", {}, None),
        ("vllm-0.33.0", "MooncakeConnector", {}, False),
        ("vllm-0.33.0", "MooncakeConnector", {"tp": 2}, None),
        ("vllm-0.33.0", "OffloadingConnector", {}, None),
    ],
)
def test_a_connector_finds_no_block_for_deepseek_v4_on_one_gpu(
    engine: str, connector: str, ranks: dict[str, int], starts: bool | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V4), encoding="utf-8")
    run = plan(connector, tmp_path, engine, **ranks)
    assert run.starts is starts
    # its formats are the engine's own
    assert {(stage.bytes_per_token, stage.at_least) for stage in run.stages} == {(None, 0)}


def test_check_reads_the_connector(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V4), encoding="utf-8")
    script, options = tmp_path / "serve.sh", '{"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}'
    for more, code, found in (("", 1, ["refused-run"]), ("-tp 4", 3, []), ("--pipeline-parallel-size 2", 3, [])):
        script.write_text(f"vllm serve {tmp_path} {more} --kv-transfer-config '{options}'\n", encoding="utf-8")
        assert main(["check", str(script), "--arch", "b300", "--registry", "vllm-0.33.0", "--json"]) == code
        told = json.loads(capsys.readouterr().out)
        assert [finding["code"] for finding in told["findings"]] == found, told


@pytest.mark.parametrize("given", ["{", "[]", "{}", '{"kv_connector": 3}', " "])
def test_what_names_no_connector_is_refused(given: str) -> None:
    with pytest.raises(attnreg.RequestError, match="kv-transfer-config"):
        plan(given)


def test_an_engine_without_rules_for_connectors_is_not_asked() -> None:
    with pytest.raises(attnreg.RequestError, match="no rules for KV connectors"):
        plan("NixlConnector", engine="sglang-0.5.23")
