"""How wide the parts of split keys are stored, and how often a merge's warps wait for each other.

It is imported by a process that compiles alone (compiler.py).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from support.compilers.compiling import Case, kernels_of

_LATENTS = Case("latents", heads=(16, 1), head_size=576, head_size_v=512, latent="auto")
CASES = (
    Case("split"),
    Case("split, heads of 80", head_size=80),
    _LATENTS,
    Case("in a graph", requests=16, in_graph=True),
    replace(_LATENTS, name="latents in a graph", requests=2, heads=(128, 1), in_graph=True),
)
_STORES, _WAITS = re.compile(r"\bst\.global\S*\.v4\.b32\b"), re.compile(r"\bbar\.sync\b")


def stored() -> dict[str, tuple[int, int]]:
    """By case: the attention kernel's instructions that store 16 bytes, and how many a tile of parts takes.

    A kernel that stores whole outputs too has more.
    """
    found = {}
    for case in CASES:
        for launched in kernels_of(case, "sm90"):
            constants: dict[str, Any] = launched.constants
            tile = constants.get("TILE")
            if tile and (constants["SPLIT"] or constants["SHARES"]):
                threads = 32 * launched.kernel.options["num_warps"]
                counted = len(_STORES.findall(launched.kernel.text))
                found[case.name] = counted, tile.block_m * tile.block_dv // (4 * threads)
    return found


def waits() -> dict[str, int]:
    """By case and constants: how often the threads of a merge of splits wait for each other."""
    return {
        f"{case.name} {launched.constants}": len(_WAITS.findall(launched.kernel.text))
        for case in CASES
        for launched in kernels_of(case, "sm90")
        if launched.variant.function.__name__ == "_merge_splits_kernel"
    }
