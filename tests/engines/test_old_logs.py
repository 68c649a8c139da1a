"""Lines of vLLM 0.6 to 0.11 about backends, and lines of one run that contradict each other."""

from __future__ import annotations

import json

import pytest

from attnreg.cli import main

OLD = [
    ("0.6.6", "Using Flash Attention backend.", "FLASH_ATTN was chosen"),
    ("0.6.6", "Using Flashinfer backend.", "FLASHINFER was chosen"),
    ("0.6.6", "Using XFormers backend.", "the layers run on xFormers"),
    ("0.7.3", "Using ROCmFlashAttention backend.", "AMD GPUs"),
    ("0.7.3", "Using ROCm Attention backend on V1 engine.", "ROCM_ATTN was chosen"),
    ("0.8.5", "Using Triton MLA backend on V1 engine.", "TRITON_MLA was chosen"),
    ("0.8.5", "Using Triton Attention backend on V1 engine.", "TRITON_ATTN was chosen"),
    ("0.9.2", "Using Triton backend on V1 engine.", "TRITON_ATTN was chosen"),
    ("0.9.2", "Using AITER MLA backend on V1 engine.", "ROCM_AITER_MLA was chosen"),
    ("0.9.2", "Using AITER MLA backend", "ROCM_AITER_MLA was chosen"),
    (
        "0.9.2",
        "Using FlashInfer backend on V1 engine by default for Blackwell (SM 10.0) GPUs.",
        "FLASHINFER was chosen",
    ),
    ("0.9.2", "Using FlexAttention backend on V1 engine.", "FLEX_ATTENTION was chosen"),
    ("0.9.2", "Using DualChunkFlashAttention backend.", "chunks of its prompt"),
    ("0.9.2", "Using Pallas V1 backend.", "TPUs"),
    ("0.9.2", "Cannot use FlashAttention-2 backend for Volta and Turing GPUs.", "no kernels below SM 8.0"),
    ("0.9.2", "Cannot use FlashAttention-2 backend for head size 80.", "no kernel for heads of 80"),
    (
        "0.9.2",
        "Cannot use FlashAttention-2 backend because the vllm.vllm_flash_attn package is not found.",
        "not installed",
    ),
    ("0.9.2", "Forcing kv cache block size to 64 for FlashMLA backend.", "FlashMLA reads blocks of 64 tokens"),
    ("0.10.2", "Using Tree Attention backend on V1 engine.", "TREE_ATTN was chosen"),
    ("0.11.2", "Using Aiter Unified Attention backend.", "ROCM_AITER_UNIFIED_ATTN was chosen"),
    ("0.11.2", "Using Aiter Flash Attention backend.", "ROCM_AITER_FA was chosen"),
    ("0.11.2", "Using Triton backend.", "TRITON_ATTN was chosen"),
]


@pytest.mark.parametrize(("release", "line", "said"), OLD, ids=[line[:60] for _, line, _ in OLD])
def test_a_line_of_an_old_release_is_explained(release, line, said, capsys, tmp_path):
    file = tmp_path / "server.log"
    banner = f"INFO 05-01 10:00:00 [core.py:58] Initializing a V1 LLM engine (v{release}) with config: model='m'\n"
    file.write_text(f"{banner}INFO 05-01 10:00:01 [cuda.py:1] {line}\n")
    assert main(["why", str(file)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert said in told


def test_two_versions_of_a_library_in_one_run_are_noticed(capsys, tmp_path):
    file = tmp_path / "server.log"
    lines = [f"INFO [flash_attn.py:647] Using FlashAttention version {number}" for number in (3, 3, 2)]
    file.write_text("\n".join(lines) + "\n")
    assert main(["why", str(file), "--json"]) == 0
    [log] = json.loads(capsys.readouterr().out)["logs"]
    noticed = [[text for text in entry["says"] if "another version" in text] for entry in log["lines"]]
    assert [[text.partition(":")[0] for text in texts] for texts in noticed] == [
        ["line 3 has version 2"],
        ["line 1 has version 3"],
    ]


def test_a_default_is_not_explained_by_cases_of_other_models(capsys, tmp_path):
    file = tmp_path / "server.log"
    config = "server_args=ServerArgs(model_path='openai/gpt-oss-120b', tp_size=1, attention_backend=None)"
    line = "Attention backend not specified. Use fa3 backend by default."
    file.write_text(f"[2026-01-01 00:00:00] {config}\n[2026-01-01 00:00:01] {line}\n")
    assert main(["why", str(file), "--arch", "h100"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "_gpt_oss_overrides" in told
    assert "mla true" not in told
    # without the model each case of the GPU may be the one
    assert main(["why", line, "--arch", "h100"]) == 0
    assert "where mla true and arch sm90" in " ".join(capsys.readouterr().out.split())
