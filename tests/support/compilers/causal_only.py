"""The attention kernel's instructions for causal batches, as it is and with the path for other batches cut out.

Imported only by the process of compiler.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from attnreg.kernels.triton import rows
from support.compilers.compiled import Kernel
from support.compilers.compiling import Case, Launched, cases_of, kernels_of


@triton.jit
def _visible_keys(position, kv_len, causal, MASK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    begin = position * 0
    end = tl.minimum(position * 0 + kv_len, position + 1)
    if MASK.left >= 0:
        begin = tl.maximum(begin, position - MASK.left)
    return begin, end


def cut() -> None:
    """Cut out the path for batches that are not causal. Call it before any kernel is compiled."""
    rows._visible_keys = _visible_keys


def digests(target: str) -> list[tuple[str, str, str]]:
    """(case, kernel, digest of its instructions) for each launch of every causal case of the suite."""
    return [
        (case.name, launched.variant.function.__name__, launched.kernel.facts.digest)
        for case, launched in _causal(target)
    ]


def causal_kernels(target: str) -> Iterator[Kernel]:
    """The kernel of each of those launches."""
    return (launched.kernel for _, launched in _causal(target))


def _causal(target: str) -> Iterator[tuple[Case, Launched]]:
    return ((case, launched) for case in cases_of(target) if case.causal for launched in kernels_of(case, target))
