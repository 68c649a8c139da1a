"""The generated blocks of docs/plan.md, and its picture: the output of `attnreg plan` for examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from attnreg.models.questions import MTP, ModelOptions
from attnreg.planning.ask import planned, run_of
from attnreg.planning.plan import Plan
from attnreg.planning.render import render
from attnreg.platforms import Platform
from docs.explain import terminal, transcript
from docs.registries import bundled

PICTURE = "docs/images/plan.svg"
_CONFIGS = "examples/configs"
_GPT_OSS = f"--model {_CONFIGS}/gpt-oss-120b"


@dataclass(frozen=True)
class PlanExample:
    """A run of `attnreg plan`: the arguments that a page shows, and their values for the library."""

    arguments: str
    arch: str
    model: str
    draft: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    release: str = "vllm-0.33.0"

    def plan(self, root: Path) -> Plan:
        """The plan of this example. ``root`` is the checkout."""
        registry = bundled(self.release)
        platform = Platform(platform=registry.vocabulary.architectures[self.arch].platform, arch=self.arch)
        draft = self.draft if self.draft in (None, MTP) else str(root / _CONFIGS / str(self.draft))
        options = ModelOptions(draft=draft, **self.options)
        return planned(run_of(str(root / _CONFIGS / self.model), options, registry, platform, **self.more))


# block of docs/plan.md -> its example
EXAMPLES = {
    "starts": PlanExample(
        f"--engine vllm-0.33 --arch sm90 {_GPT_OSS} --tp 2 --gpu-memory 80GiB --weights 35GiB",
        "sm90",
        "gpt-oss-120b",
        options={"ranks": 2},
        more={"gpu_memory": 80 * 2**30, "weights": 35 * 2**30},
    ),
    "conflict": PlanExample(
        f"--engine vllm-0.30 --arch gfx942 --model {_CONFIGS}/Llama-3.3-70B-Instruct --draft {_CONFIGS}/Llama-3.1-8B "
        "--tp 8 --backend FLEX_ATTENTION --draft-backend ROCM_ATTN --speculative-tokens 3",
        "gfx942",
        "Llama-3.3-70B-Instruct",
        "Llama-3.1-8B",
        options={"ranks": 8},
        more={
            "backend": "FLEX_ATTENTION",
            "draft_backend": "ROCM_ATTN",
            "speculative_tokens": 3,
            "named": ("backend FLEX_ATTENTION", "draft backend ROCM_ATTN"),
        },
        release="vllm-0.30.0",
    ),
    "stages": PlanExample(
        f"--engine vllm-0.33 --arch sm100 --model {_CONFIGS}/DeepSeek-V3 --draft mtp --speculative-tokens 1 "
        "--tp 8 --pp 3",
        "sm100",
        "DeepSeek-V3",
        MTP,
        options={"ranks": 8},
        more={"stages": 3, "speculative_tokens": 1},
    ),
}


def plan_blocks(root: Path) -> dict[str, str]:
    """Name of each generated block -> a command and its output, as Markdown."""
    return {
        name: transcript(f"attnreg plan {example.arguments}", partial(render, example.plan(root)))
        for name, example in EXAMPLES.items()
    }


def plan_picture(root: Path) -> str:
    """The output of `attnreg plan` for a run that does not start, as an SVG."""
    example = EXAMPLES["conflict"]
    return terminal(f"attnreg plan {example.arguments}", partial(render, example.plan(root)), "plan")
