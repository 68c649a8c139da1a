# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803 (constexprs are written in capitals)
"""Numbers that are the same in all threads of a program, told to the compiler.

A reduction gives each thread the same number, but the assembler cannot see that: from Triton 3.8 on the last step of a
reduction is an exchange between threads. What depends on the number then stays in the registers of each thread: bounds
of loops, stages, and the addresses that matrix products read. On an H200 prompts took 5 to 25 % more time.

LLVM does not see it for AMD's GPUs either: on RDNA 3 prompts spilled up to 356 bytes. There an intrinsic tells it.
Inline assembly would not do: v_readfirstlane_b32 needs an idle cycle after the instruction that writes what it reads on
gfx942, and LLVM inserts none there. LLVM knows intrinsics by name, and declares this one convergent itself. It reads
the first thread that is active, and any would do, so that the result is right wherever the compiler moves it.
"""

import triton
import triton.language as tl


@tl.core.extern
def _intrinsic(x, name, _semantic=None):
    """Returns the result, an int32, of LLVM's intrinsic of this name for an int32.

    The caller names it: Triton's key of a compiled kernel has the text of `uniform`, and nothing of this function.
    """
    symbols = {(tl.int32,): (name.value, tl.int32)}
    return tl.core.extern_elementwise("", "", [x], symbols, is_pure=True, _semantic=_semantic)


@triton.jit
def uniform(x, GPU: tl.constexpr):
    """Returns an int32 that all threads have alike, from a register that they share. GPU: as in `Target.backend`."""
    if GPU == "cuda":
        x = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    elif GPU == "hip":
        x = _intrinsic(x, "llvm.amdgcn.readfirstlane.i32")
    return x
