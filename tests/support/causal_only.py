"""What the attention kernel compiles to for causal batches, as it is and with its other path cut out.

It is imported by a process that compiles alone (compiler.py).
"""

from __future__ import annotations

import hashlib

import triton
import triton.language as tl

from attnreg.kernels.triton import attention
from support import compiling
from support.compiling import DEFAULT

INSTRUCTIONS = {"cuda": "ptx", "hip": "amdgcn"}


@triton.jit
def _visible_keys(position, kv_len, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    begin = position * 0
    end = tl.minimum(position * 0 + kv_len, position + 1)
    if WINDOW > 0:
        begin = tl.maximum(begin, position - (WINDOW - 1))
        end = tl.minimum(end, position + WINDOW)
    return begin, end


def cut() -> None:
    """Cut the other path out, before any kernel is compiled."""
    attention._visible_keys = _visible_keys


def digests(target: str) -> list[tuple[str, str, str]]:
    """The case, the kernel, and a digest of its instructions for each launch of every causal case of the suite."""
    compiled, compile_, report, found = [], triton.compile, compiling._report, []

    def remember(*args, **kwargs):  # type: ignore[no-untyped-def]
        compiled.append(compile_(*args, **kwargs))
        return compiled[-1]

    # what a kernel uses is not asked here, and takes its time to find out
    triton.compile, compiling._report = remember, lambda compiled: (0, 0, False)
    try:
        for case in (case for case in DEFAULT if case.causal):
            compiled.clear()
            compiling.compile_case(case, target)
            for kernel in compiled:
                text = kernel.asm[INSTRUCTIONS[kernel.metadata.target.backend]]
                found.append((case.name, kernel.metadata.name, hashlib.sha256(text.encode()).hexdigest()))
    finally:
        triton.compile, compiling._report = compile_, report
    return found
