"""What a compiler may fuse in kernels that are to give the same bits whatever they are compiled for beside.

It is imported by a process that compiles alone (compiler.py).
"""

from __future__ import annotations

import re

from support.compilers.compiling import Case, kernels_of

_INVARIANT = ("batch_invariant", "sinks")
CASES = (
    Case("several queries", queries=8, requests=4, features=_INVARIANT),
    Case("prompts, softcap, ranges", queries=300, features=(*_INVARIANT, "ranges"), softcap=30.0),
    Case("by request", queries=8, requests=4, features=(*_INVARIANT, "causal_by_request")),
    Case("latents", queries=2, requests=4, heads=(16, 1), head_size=576, head_size_v=512, latent="auto"),
)
# products and sums without a rounding of their own, which ptxas may fuse
_FREE = re.compile(r"\b(?:mul|add|sub)(?:\.ftz)?\.f32\b")


def free(merges: bool) -> dict[str, list[str]]:
    """The instructions that may be fused in the merges of all cases, or in the attention of batch-invariant layers."""
    found = {}
    for case in CASES:
        for launched in kernels_of(case, "sm90"):
            name = launched.variant.function.__name__
            if ("merge" in name) is merges and (merges or name == "_attention_kernel"):
                found[f"{case.name}: {name} {len(found)}"] = _FREE.findall(launched.kernel.text)
    return found
