"""Compares vLLM's selector before and after a change of its Python, and prints which layers change their backend.

    python tools/record/gate.py --before vllm-main --after vllm-pull > table.md

The configurations are the layers of the models that come with attnreg, the most common first, on NVIDIA and AMD GPUs.
Exit status: 0 if no layer changes its backend, else 1. action.yml runs it on a pull request.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnreg import AttentionRequest, load_registry
from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.models.questions import ModelOptions, model_questions

RECORDER = Path(__file__).with_name("vllm_selector.py")
MACHINES = (("cuda", "sm80", None), ("cuda", "sm90", None), ("cuda", "sm100", None), ("cuda", "sm120", None),
            ("rocm", "gfx942", "on"))  # fmt: skip
# the models that are served most come first; all others follow by name
COMMON = ("Llama-3.1-8B", "Llama-3.3-70B-Instruct", "Qwen3-8B", "gpt-oss-120b", "DeepSeek-V3", "gemma-3-27b-it")
_FEATURES = {"sinks": "has_sink", "sliding_window": "has_sliding_window", "mm_prefix": "use_mm_prefix",
             "non_causal": "use_non_causal"}  # fmt: skip
_DIMENSIONS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk")


def questions() -> Iterator[dict[str, Any]]:
    """A row of the recorder for each group of layers of each model on each machine."""
    registry, configs = load_registry("vllm-0.33").selector, bundled_configs()
    for model in sorted(configs, key=lambda name: (COMMON.index(name) if name in COMMON else len(COMMON), name)):
        for question in model_questions(str(configs[model]), ModelOptions(), registry).questions:
            request = question.request
            if request is not None and request.role == "target" and request.phase != "prefill":
                for platform, arch, with_aiter in MACHINES:
                    place = {"platform": platform, "arch": arch, "aiter": with_aiter}
                    yield {"id": f"{model} · {question.layers}", **place, **_recorder_row(request)}


def _recorder_row(request: AttentionRequest) -> dict[str, Any]:
    mla = request.attention.startswith("mla")
    hf = {name: value for name in _DIMENSIONS if (value := getattr(request, name)) is not None}
    return {
        "head_size": request.head_size,
        "dtype": request.dtype,
        "kv_cache_dtype": request.kv_dtype,
        "block_size": None,
        "use_mla": mla,
        "use_sparse": request.attention.endswith("sparse"),
        "attn_type": request.attn_type,
        **{field: feature in request.features for feature, field in _FEATURES.items()},
        "num_heads": request.num_heads if mla else None,
        "model": {"num_heads": request.num_heads, "num_kv_heads": request.num_kv_heads or request.num_heads, "hf": hf},
        "run_kv_cache_dtype": None,
        "requested_backend": None,
    }


def report(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a Markdown table of the layers that change their backend; an empty list if there is none."""
    old, new = ({(d["in"]["id"], d["in"]["arch"]): d["out"] for d in side} for side in (before, after))
    rows = []
    for (name, arch), was in old.items():
        now = new.get((name, arch))
        if now is None or was["chosen"] == now["chosen"]:
            continue
        reasons = {c["backend"]: c["reasons"] for c in now["candidates"]}.get(was["chosen"] or "", [])
        why = "; ".join(reasons) or "it is tried before"
        rows.append(f"| {name} | {arch} | {was['chosen'] or 'none'} | {now['chosen'] or 'none'} | {why} |")
    head = ["| layers | GPU | before | after | why |", "| --- | --- | --- | --- | --- |"]
    return [*head, *rows] if rows else []


def recorded(source: Path, rows: Path) -> list[dict[str, Any]]:
    """The decisions of a wheel or a working tree. Raises SystemExit if its selector cannot be recorded."""
    command = [sys.executable, str(RECORDER), "--source", str(source), "--rows", str(rows)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{source}: its selector could not be recorded; the reason stands above")
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> int:
    """Record both sides and print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="a wheel of vLLM, or a working tree")
    parser.add_argument("--after", type=Path, required=True, help="the same, with the change")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in questions()))
        lines = report(recorded(options.before, rows), recorded(options.after, rows))
    print("\n".join(lines) or "No layer of a known model gets another backend.")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
