"""Which drafts by diffusion a release of vLLM computes causally."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import attnreg
from attnreg.cli import main

CONFIGS = Path(attnreg.__file__).parents[1] / "examples" / "configs"


@pytest.mark.parametrize(
    ("release", "changes", "causal"),
    [
        ("0.21.0", {"dflash_config": {"causal": True}}, False),
        ("0.22.0", {"dflash_config": {"causal": True}}, False),
        ("0.23.0", {"dflash_config": {"causal": True}}, True),
        ("0.24.0", {"is_causal": True}, False),
        ("0.25.0", {"is_causal": True}, False),
        ("0.25.0", {"dflash_config": {"causal": True}}, True),
        ("0.26.0", {"is_causal": True}, True),
        ("0.33.0", {"is_causal": True}, True),
        ("0.33.0", {}, False),
    ],
)
def test_a_release_reads_whether_a_draft_is_causal(
    release: str, changes: dict[str, Any], causal: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = tmp_path / "draft-DFlash"
    draft.mkdir()
    config = json.loads((CONFIGS / "Qwen3-8B-DFlash-b16" / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | changes))
    model = str(CONFIGS / "Qwen3-8B")
    main(["explain", "--engine", f"vllm-{release}", "--arch", "sm90", "--model", model, "--draft", str(draft)])
    assert ("features non_causal → none" in capsys.readouterr().out) == causal
