"""A registry of vLLM against recorded choices of vLLM's classes for Intel GPUs and processors."""

from __future__ import annotations

import dataclasses
import gzip
import json
from typing import Any

from attnreg import Platform, Registry
from attnreg.engines.vllm_requests import request_from_selector_row
from attnreg.errors import RequestError
from attnreg.selection.selector import evaluate
from support import DATA

# vLLM has the names of backends for prompts in a list of their own
PREFILL = {name: f"{name}_PREFILL" for name in ("CPU", "FLASHINFER", "FLASH_ATTN", "ROCM_AITER_FA", "ZEN_CPU")}
PREFILL |= {"TOKENSPEED_MLA": "TOKENSPEED_PREFILL"}
# what a machine has that runs vLLM; AMD's package for processors is not among it
PACKAGES = ("torch", "triton", "vllm", "vllm-xpu-kernels")


def recorded(release: str) -> list[dict[str, Any]]:
    """The recorded rows of a release."""
    with gzip.open(DATA / f"vllm/platforms-{release}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def difference(recorded_row: dict[str, Any], registry: Registry) -> str:
    """How a registry decides a recorded row otherwise than vLLM; empty where it does not."""
    row = recorded_row["in"]
    platform = Platform(platform="xpu" if row["arch"].startswith("xe") else "cpu", arch=row["arch"], packages=PACKAGES)
    layer, _ = request_from_selector_row(row | {"platform": platform.platform, "num_heads": 16})
    name, vllms = row.get("name"), recorded_row["out"].get("chosen")
    if row["kind"] == "vision":
        layer = dataclasses.replace(layer, role="vision")
    elif row["kind"] == "prefill":
        nope, rope, value = row["dimensions"]
        sizes = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value}
        layer = dataclasses.replace(layer, attention="mla", phase="prefill", model="recorded", **sizes)
        name, vllms = PREFILL.get(name or "", name), PREFILL.get(vllms or "", vllms)
    if name is not None and name not in registry.backends:
        return f"the registry has no {name}"
    try:
        found = evaluate(layer, platform, registry if row["kind"] == "prefill" else registry.selector, name)
    except RequestError as error:
        return f"vLLM: {vllms}, here: {error}"
    here = None if found.backend is None else found.backend.name
    if found.unknown:
        return f"vLLM: {vllms}, not known here"
    return "" if here == vllms else f"vLLM: {vllms}, here: {here}"
