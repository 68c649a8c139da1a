"""What a new user runs first."""

from __future__ import annotations

import runpy

import pytest
from support import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            [],
            [
                "LlamaForCausalLM · this machine, CPU ",
                "layers 0–1   4/2 heads of 64 · float32 · KV cache auto · 24 calls",
                "▸ CPU_ATTN   1st choice",
            ],
        ),
        (
            ["--embed"],
            ["It rained all day.", "layers 0–5   12 heads of 32 · float32 · attn_type encoder_only", "▸ CPU_ATTN"],
        ),
        (["--backend", "TORCH_SDPA", "--tokens", "2"], ["· 2 calls", "▸ TORCH_SDPA/gathered   requested"]),
    ],
    ids=["generate", "embed", "by name"],
)
def test_generate_says_what_ran_and_why(
    arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTNREG_REGISTRY", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    runpy.run_path(str(EXAMPLES / "generate.py"))["main"](arguments)
    out = capsys.readouterr().out
    for text in said:
        assert text in out
