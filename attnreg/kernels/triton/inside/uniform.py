# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803 (constexprs are written in capitals)
"""Tells the compiler that a number is the same in all threads of a program.

A reduction gives each thread the same number, but the assembler cannot see that: from Triton 3.8 on the last step of a
reduction is an exchange between threads. All that depends on the number then stays in each thread's own registers:
bounds of loops, stages, and the addresses that matrix products read. On an H200 prompts took 5 to 25 % more time.

LLVM does not see it for AMD's GPUs either: on RDNA 3 prompts spilled up to 356 bytes. There an intrinsic tells it.
Inline assembly would be wrong: on gfx942, v_readfirstlane_b32 needs an idle cycle after the instruction that writes its
operand, and LLVM inserts none into assembly. LLVM knows intrinsics by name, and declares this one convergent itself.
The intrinsic reads the first active thread. All threads have the same number, so the result is right wherever the
compiler moves it.
"""

import triton
import triton.language as tl


@tl.core.extern
def _intrinsic(x, name, _semantic=None):
    """Returns the int32 result of the LLVM intrinsic of this name for an int32.

    The caller passes the name, because Triton's key of a compiled kernel has the text of `uniform`, but not of this
    function.
    """
    symbols = {(tl.int32,): (name.value, tl.int32)}
    return tl.core.extern_elementwise("", "", [x], symbols, is_pure=True, _semantic=_semantic)


@triton.jit
def uniform(x, GPU: tl.constexpr):
    """Returns an int32 that is equal in all threads, from a register that they share. GPU: `Target.backend`."""
    if GPU == "cuda":
        x = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    elif GPU == "hip":
        x = _intrinsic(x, "llvm.amdgcn.readfirstlane.i32")
    return x
