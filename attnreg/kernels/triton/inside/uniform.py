# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803 (constexprs are written in capitals)
"""Numbers that are the same in all threads of a program, told to the compiler.

A reduction gives each thread the same number, but the assembler cannot see that: from Triton 3.8 on the last step of a
reduction is an exchange between threads. What depends on the number then stays in the registers of each thread: bounds
of loops, stages, and the addresses that matrix products read. On an H200 prompts took 5 to 25 % more time.

Not on AMD's GPUs: LLVM does not see the hazards of inline assembly, and v_readfirstlane needs idle cycles around it.
"""

import triton
import triton.language as tl


@triton.jit
def uniform(x, GPU: tl.constexpr):
    """Returns an int32 that all threads have alike, from a register that they share. GPU: as in `Target.backend`."""
    if GPU == "cuda":
        x = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    return x
