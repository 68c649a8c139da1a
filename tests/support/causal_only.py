"""Prints what the attention kernel compiles to for causal batches, as it is and with its other path cut out.

A program of its own, as compiling.py is: python causal_only.py TARGET [cut]. One line for each launch: a digest of the
machine's instructions.
"""

from __future__ import annotations

import hashlib
import os
import sys

os.environ |= {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}

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


def main(target: str, *, cut: bool) -> None:
    """Compile every causal case of the suite for a target."""
    if cut:
        attention._visible_keys = _visible_keys
    compiled, compile_ = [], triton.compile

    def remember(*args, **kwargs):  # type: ignore[no-untyped-def]
        compiled.append(compile_(*args, **kwargs))
        return compiled[-1]

    triton.compile = remember
    for case in (case for case in DEFAULT if case.causal):
        compiled.clear()
        compiling.compile_case(case, target)
        for kernel in compiled:
            text = kernel.asm[INSTRUCTIONS[kernel.metadata.target.backend]]
            digest = hashlib.sha256(text.encode()).hexdigest()
            sys.stdout.write(f"{case.name} {kernel.metadata.name} {digest}\n")


if __name__ == "__main__":
    main(sys.argv[1], cut="cut" in sys.argv[2:])
