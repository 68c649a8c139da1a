"""Environment variables: those that attnreg reads, and warnings about misspelt ones and those of older engines."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnreg.errors import did_you_mean, escaped

if TYPE_CHECKING:
    from attnreg.language.vocabulary import Vocabulary

PREFIXES = ("ATTNREG", "ATTN_REG")
REGISTRY_VARIABLE = "ATTNREG_REGISTRY"
FLAGS_VARIABLE = "ATTNREG_FLAGS"
VLLM_VARIABLE = "ATTNREG_VLLM"
SGLANG_VARIABLE = "ATTNREG_SGLANG"
PLUGINS_VARIABLE = "ATTNREG_PLUGINS"
DEBUG_VARIABLE = "ATTNREG_DEBUG"
VARIABLES = {
    REGISTRY_VARIABLE: "the registry to use: a bundled name, a directory, or an overlay file",
    PLUGINS_VARIABLE: "the plugins that take part: their names, separated by commas, or off",
    FLAGS_VARIABLE: "flags that are on for this machine, separated by commas (attnreg.detect)",
    DEBUG_VARIABLE: "1: layers also validate what only the device knows, at a cost; errors have a traceback",
    SGLANG_VARIABLE: "attnreg's backend inside SGLang: 1 (by its name), triton (in that one's place), or require",
    VLLM_VARIABLE: "who decides inside vLLM: 1, attnreg (with attnreg's own backend), or a registry to use",
}


def environment_problems(environ: Mapping[str, str], vocabulary: Vocabulary) -> list[str]:
    """One sentence for each variable that looks like attnreg's but that attnreg does not read."""
    out = []
    for name in map(escaped, sorted(environ)):
        retired = vocabulary.retired_environment.get(name)
        if retired is not None:
            engine = retired.facts.get("engine", "an engine")
            out.append(f"{name} is set; {engine} has retired it and attnreg does not read it. Use {retired.legend}.")
        elif name not in VARIABLES and _seems_ours(name.upper()):
            # a high cutoff, because all names share a prefix
            hint = did_you_mean(name.upper(), VARIABLES, cutoff=0.8)
            out.append(f"{name} is set, but attnreg reads no such variable; {hint}")
    return out


def _seems_ours(name: str) -> bool:
    # _ATTNREG_COMPLETE, which shell completion sets, is far enough from all of them
    return name.startswith(PREFIXES) or bool(difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.9))
