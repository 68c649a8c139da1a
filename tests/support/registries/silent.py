"""A release whose table says nothing of some platforms; no bundled release of vLLM is one."""

from __future__ import annotations

from pathlib import Path


def silent_release(folder: Path, of: str = "vllm-0.32.0") -> str:
    """The directory of a release like a bundled one, whose table says nothing of Intel GPUs and processors."""
    directory = folder / of
    directory.mkdir()
    (directory / "release.yaml").write_text(f"extends: {of}\npriorities: {{xpu: null, cpu: null}}\n")
    return str(directory)
