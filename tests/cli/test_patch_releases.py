"""Patch releases that the table of another release answers for: registry/engines/patches.yaml, and who reads it."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from attnreg import bundled_registries, load_registry
from attnreg.compile.inputs.bundled import patch_releases, release_name, spelled_release

PATCHES = patch_releases()
PATCH = "vllm-0.27.1"
POST = "sglang-0.5.15.post1"
ASK = ("--arch", "sm90", "--head-size", "128")


def test_each_has_a_bundled_table_of_its_minor_release_and_none_of_its_own() -> None:
    assert PATCHES
    for name, patch in PATCHES.items():
        assert name not in bundled_registries()
        assert patch["as"] in bundled_registries()
        assert name.rpartition(".")[0] in (patch["as"], patch["as"].rpartition(".")[0])
        assert patch.keys() == {"as", "because"}
        assert len(patch["because"].split()) > 5


@pytest.mark.parametrize(
    ("name", "table"),
    [
        *((name, "vllm-0.27.0") for name in (PATCH, "vLLM 0.27.1", "vllm==0.27.1")),
        *((name, "sglang-0.5.15") for name in (POST, "SGLang 0.5.15.post1", "sglang==0.5.15.POST1")),
    ],
)
def test_its_name_is_one_of_the_table(name: str, table: str) -> None:
    assert spelled_release(name) == table
    assert release_name("vllm-0.27.9") == "vllm-0.27.9"
    assert load_registry(PATCH).name == load_registry("vllm-0.27.0").name == "vllm-0.27.0"


def test_every_command_says_which_table_answers(run: Callable[..., Any]) -> None:
    said = "note: vLLM 0.27.1 has the table of vllm-0.27.0: "
    for engine in (PATCH, "vLLM 0.27.1"):
        assert said in run("explain", "--engine", engine, *ASK).out
    assert said not in run("explain", "--engine", "vllm-0.27", *ASK).out
    for named in (PATCH, "0.27.1"):
        assert said in run("upgrade", "--from", named, "--to", "vllm-0.28", *ASK).out
    assert "vllm-0.27.1  as vllm-0.27.0" in run("list", "--engines").out.splitlines()
    assert json.loads(run("list", "--engines", "--json").out)["alike"][PATCH] == "vllm-0.27.0"
    said = "note: SGLang 0.5.15.post1 has the table of sglang-0.5.15: "
    assert said in run("explain", "--engine", POST, *ASK).out
    assert said in run("upgrade", "--from", "0.5.15.post1", "--to", "sglang-0.5.16", *ASK).out


def test_a_log_of_one_is_explained_by_the_table(run: Callable[..., Any], tmp_path: Any) -> None:
    lines = (
        "INFO 11-30 [core.py:1] Initializing a V1 LLM engine (v0.27.1) with config: model='m/llama'",
        "INFO 11-30 [cuda.py:1] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
    )
    (tmp_path / "log").write_text("\n".join(lines))
    found = run("why", str(tmp_path / "log")).out
    assert "by vllm-0.27.0, which answers for vLLM 0.27.1, the release that line 1 names" in " ".join(found.split())
    (tmp_path / "log").write_text(
        "sglang: 0.5.15.post1\nAttention backend not specified. Use fa3 backend by default.\n"
    )
    found = run("why", str(tmp_path / "log")).out
    assert "by sglang-0.5.15, which answers for SGLang 0.5.15.post1" in " ".join(found.split())


def test_the_plugin_takes_the_table_inside_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnreg.integrations.vllm import registries

    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.27.1+cu130"))
    assert registries._bundled() == "vllm-0.27.0"
