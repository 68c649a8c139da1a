"""How wide the parts of split keys are stored and read.

It is imported by a process that compiles alone (compiler.py).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from support.compiling import Case, kernels_of

_LATENTS = Case("latents", heads=(16, 1), head_size=576, head_size_v=512, latent="auto")
CASES = (
    Case("split"),
    Case("split, heads of 80", head_size=80),
    _LATENTS,
    Case("in a graph", requests=16, in_graph=True),
    replace(_LATENTS, name="latents in a graph", requests=2, heads=(128, 1), in_graph=True),
)
_ACCESS = {"merge": re.compile(r"\bld\.global\S*\.v4\.b32\b"), "attention": re.compile(r"\bst\.global\S*\.v4\.b32\b")}


def wide() -> dict[str, tuple[int, int]]:
    """By case and kernel: its instructions that read or store 16 bytes of parts, and how many a tile of parts takes.

    A kernel that stores whole outputs too has more.
    """
    found = {}
    for case in CASES:
        for launched in kernels_of(case, "sm90"):
            name = launched.variant.function.__name__
            kind = next((word for word in _ACCESS if word in name), "")
            constants: dict[str, Any] = launched.constants
            if not kind or not (kind == "merge" or constants["SPLIT"] or constants["SHARES"]):
                continue
            tile = constants.get("TILE")
            sides = (tile.block_m, tile.block_dv) if tile else (constants["BLOCK_S"], constants["BLOCK_DV"])
            threads = 32 * launched.kernel.options["num_warps"]
            counted = len(_ACCESS[kind].findall(launched.kernel.text))
            found[f"{case.name}: {name}"] = counted, math.prod(sides) // (4 * threads)
    return found
