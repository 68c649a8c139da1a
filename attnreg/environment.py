"""Environment variables: the ones that attnreg reads, near misses of them, and those that engines have retired."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnreg.errors import did_you_mean

if TYPE_CHECKING:
    from attnreg.vocabulary import Vocabulary

PREFIX = "ATTNREG_"
REGISTRY_VARIABLE = "ATTNREG_REGISTRY"
FLAGS_VARIABLE = "ATTNREG_FLAGS"
VARIABLES = {
    REGISTRY_VARIABLE: "the registry to use: a bundled name, a directory, or an overlay file",
    FLAGS_VARIABLE: "flags that are on for this machine, separated by commas (Platform.detect)",
}


def environment_problems(environ: Mapping[str, str], vocabulary: Vocabulary) -> list[str]:
    """One sentence for each variable that its user surely meant for attnreg, but that attnreg does not read."""
    out = []
    for name in sorted(environ):
        retired = vocabulary.retired_environment.get(name)
        if retired is not None:
            engine = retired.facts.get("engine", "an engine")
            out.append(f"{name} is set; {engine} has retired it and attnreg does not read it. Use {retired.legend}.")
        elif name not in VARIABLES and not name.startswith("_") and name.upper().startswith((PREFIX, "ATTN_REG")):
            if name.startswith(f"{PREFIX}COMPLETE"):
                continue
            out.append(f"{name} is set, but attnreg reads no such variable; {did_you_mean(name, VARIABLES)}")
    return out
