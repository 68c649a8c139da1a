"""The kinds of file that people hand to attnreg: a valid one of each, and the commands that read it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hostile.commands import PICKER
from support import ROOT

from attnreg.cli import main as attnreg
from attnreg.compile.inputs.bundled import registry_root

# in the environment, in files that no data may name, and where a recipe sets a variable: no message may hold it
SECRET = "ghp_PLANTED5ECRET"
FILE, PLACE = "{file}", "{place}"
_CHECKED = (("check", "--registry", f"{PLACE}/registry"),)
_LAYER = ("--arch", "sm90", "--head-size", "128")

OVERLAY = """extends: default
choices:
- deny: FLASHINFER
  when: {platform: cuda}
  because: it compiles for minutes
- prefer: TRITON_ATTN
  when: {features: [sinks]}
  because: measured
backends:
  TRITON_ATTN:
    capabilities:
      add: {features: [dcp]}
"""
RECIPE = f"""engine: vllm
version: 0.33.0
arch: sm90
model: {ROOT / "examples/configs/gpt-oss-120b"}
env:
  VLLM_ATTENTION_BACKEND: FLASHINFER
  OPENAI_API_KEY: {SECRET}
args: [--kv-cache-dtype, fp8, --attention-backend, FLASH_ATTN, --block-size, "16"]
"""
SCRIPT = f"""#!/bin/bash
export HF_TOKEN={SECRET}
OPENAI_API_KEY={SECRET} VLLM_ATTENTION_BACKEND=FLASHINFER vllm serve Qwen/Qwen3-8B \\
  --kv-cache-dtype fp8 --block-size 16
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --attention-backend fa3
"""
DEPLOYMENT = f"""apiVersion: v1
kind: ConfigMap
metadata: {{name: tokens}}
data: {{HF_TOKEN: {SECRET}, KV: fp8}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: serve}}
spec:
  template:
    spec:
      nodeSelector: {{nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}}
      containers:
      - name: vllm
        image: vllm/vllm-openai:v0.33.0
        env:
        - {{name: OPENAI_API_KEY, value: {SECRET}}}
        - {{name: KV, valueFrom: {{configMapKeyRef: {{name: tokens, key: KV}}}}}}
        args: [--model, Qwen/Qwen3-8B, --kv-cache-dtype, $(KV), --api-key, {SECRET}]
"""
COMPOSE = f"""services:
  serve:
    image: vllm/vllm-openai:v0.33.0
    environment: [HF_TOKEN={SECRET}, VLLM_ATTENTION_BACKEND=FLASHINFER]
    command: --model Qwen/Qwen3-8B --block-size 16 --api-key {SECRET}
"""
DOCKERFILE = f"""FROM vllm/vllm-openai:v0.33.0
ENV HF_TOKEN={SECRET} VLLM_ATTENTION_BACKEND=FLASHINFER
CMD ["--model", "Qwen/Qwen3-8B", "--kv-cache-dtype", "fp8", "--api-key", "{SECRET}"]
"""
LOG = """INFO 11-28 10:00:00 [core.py:93] Initializing a V1 LLM engine (v0.33.0) with config: model='Qwen/Qwen3-8B'
INFO 11-28 10:00:02 [cuda.py:367] Using FLASH_ATTN attention backend out of potential backends: [FLASH_ATTN].
[2026-11-28 10:00:00] Attention backend not specified. Use fa3 backend by default.
"""


def _lock(place: Path) -> bytes:
    file = place / "made.lock"
    if attnreg(["lock", "--registry", "vllm-0.33.0", *_LAYER, "-o", str(file)]):
        raise RuntimeError("no lock could be made")
    return file.read_bytes()


def _config(_place: Path) -> bytes:
    return (ROOT / "examples/configs/gpt-oss-120b/config.json").read_bytes()


def _evidence(_place: Path) -> bytes:
    records = json.loads((registry_root() / "evidence/cpu.json").read_bytes())
    return json.dumps(records, indent=1).encode()


def _backends(_place: Path) -> bytes:
    return (registry_root() / "backends.yaml").read_bytes()


def _vocabulary(_place: Path) -> bytes:
    return (registry_root() / "vocabulary.yaml").read_bytes()


@dataclass(frozen=True)
class Kind:
    """A kind of file: its name below a directory, what makes the bytes of a valid one, and the commands that read it.

    whole: whether it is a part of a registry, which then lies around it. largest: the most that a file is blown up to.
    """

    name: str
    file: str
    valid: Callable[[Path], bytes]
    commands: tuple[tuple[str, ...], ...]
    whole: bool = False
    largest: int = 3 << 20

    def lay(self, place: Path) -> Path:
        """The path of the file in a directory, with what must lie around it; the file itself is left to the caller."""
        if self.whole:
            leave = shutil.ignore_patterns("engines", "measurements", "models")
            shutil.copytree(registry_root(), place / "registry", ignore=leave)
        file = place / self.file
        file.parent.mkdir(parents=True, exist_ok=True)
        return file


def _of(text: str) -> Callable[[Path], bytes]:
    return lambda _place: text.encode()


KINDS = (
    Kind(
        "overlay",
        "overlay.yaml",
        _of(OVERLAY),
        (
            ("check", "--overlay", FILE),
            ("explain", "--registry", FILE, *_LAYER, "--brief"),
            ("explain", "--overlay", FILE, *_LAYER),
            (PICKER, "overlay", FILE),
        ),
    ),
    Kind("lock", "attnreg.lock", _lock, (("check", "--lock", FILE), ("check", "--lock", FILE, "--json"))),
    Kind("recipe", "recipes/recipe.yaml", _of(RECIPE), (("check", FILE), ("check", FILE, "--json"))),
    Kind("script", "serve.sh", _of(SCRIPT), (("check", FILE),)),
    Kind("deployment", "deployment.yaml", _of(DEPLOYMENT), (("check", FILE), ("check", FILE, "--json"))),
    Kind("compose", "compose.yaml", _of(COMPOSE), (("check", FILE), ("check", FILE, "--output-format", "sarif"))),
    Kind("dockerfile", "Dockerfile", _of(DOCKERFILE), (("check", FILE), ("check", FILE, "--output-format", "github"))),
    Kind("log", "server.log", _of(LOG), (("why", FILE),)),
    Kind(
        "config",
        "model/config.json",
        _config,
        (
            ("explain", "--arch", "sm90", "--model", FILE, "--brief"),
            ("lock", "--arch", "sm90", "--model", FILE, "-o", f"{PLACE}/out.lock"),
            (PICKER, "config", FILE),
        ),
    ),
    Kind("evidence", "registry/evidence/cpu.json", _evidence, _CHECKED, whole=True),
    Kind("backends", "registry/backends.yaml", _backends, _CHECKED, whole=True),
    Kind(
        "vocabulary",
        "registry/vocabulary.yaml",
        _vocabulary,
        (("explain", "--registry", f"{PLACE}/registry", *_LAYER),),
        whole=True,
    ),
)
