"""attnreg in the process of an engine core, as `vllm serve` starts one: vLLM's own start, plug-ins and logging."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine import Engine

HERE = Path(__file__).resolve().parent


def core(config: Any, source: str, arch: str = "sm80") -> subprocess.CompletedProcess[str]:
    """What an engine core with this configuration does, and prints, where $ATTNREG_VLLM is this."""
    # from a process without attnreg, or from one whose plug-ins are loaded: it arrives in one where none is
    return subprocess.run(
        [sys.executable, str(HERE / "core_process.py"), arch], input=pickle.dumps(config), capture_output=True,
        env=os.environ | {"ATTNREG_VLLM": source}, check=False, timeout=600,
    )  # fmt: skip


def printed(done: Any) -> str:
    text: str = (done.stdout + done.stderr).decode()
    return text


def test_the_core_loads_the_plugin_and_says_so_once(engine: Engine) -> None:
    said = printed(core(engine.config, "attnreg"))
    assert "['has_sink'], named None: ATTNREG" in said
    assert "[], named None: FLASH_ATTN" in said
    assert said.count("decides which attention backends are chosen automatically (ATTNREG_VLLM=attnreg)") == 1
    assert "attnreg: ATTNREG for target layers (head size 128, bfloat16, KV cache auto, sinks)" in said
    assert "the executor is made" in said


def test_a_configuration_that_names_the_backend_arrives(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnreg.integrations.vllm.plugin import own_backend

    monkeypatch.setattr(engine.config.attention_config, "backend", own_backend())
    said = printed(core(engine.config, "attnreg"))
    assert "[], named ATTNREG: ATTNREG" in said
    assert "['has_sink'], named ATTNREG: ATTNREG" in said


def test_a_wrong_overlay_stops_the_core_before_anything_is_made(engine: Engine, tmp_path: Path) -> None:
    overlay = tmp_path / "wrong.yaml"
    overlay.write_text("extends: vllm-0.33.0+attnreg\nchoices: [{prefer: FLASH_ATN}]\n")
    done = core(engine.config, str(overlay))
    assert done.returncode != 0
    assert f"{overlay}:2:" in printed(done)
    assert "the executor is made" not in printed(done)
