"""Kernels with one fault each: what a sanitizer must find on this machine before its silence means anything.

python tests/gpu/planted.py memcheck    # likewise racecheck, initcheck
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def planted_store_kernel(out_ptr, offset):
    """Stores one number at an offset."""
    tl.store(out_ptr + offset, 1.0)


@triton.jit
def planted_load_kernel(out_ptr, in_ptr):
    """Copies 32 numbers."""
    at = tl.arange(0, 32)
    tl.store(out_ptr + at, tl.load(in_ptr + at))


@triton.jit
def planted_race_kernel(out_ptr):
    """Every thread stores to one word of shared memory and loads it, without a barrier."""
    at = tl.arange(0, 128)
    found = tl.inline_asm_elementwise(
        "{ .reg .u32 t; .shared .align 4 .u32 word[1]; mov.u32 t, %tid.x; st.shared.u32 [word], t;"
        " ld.shared.u32 $0, [word]; add.u32 $0, $0, $1; }",
        "=r,r", [at], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out_ptr + at, found)


def main(tool: str) -> None:
    """Launches the kernel whose fault a tool is for."""
    out = torch.zeros(128, device="cuda")
    if tool == "memcheck":
        planted_store_kernel[(1,)](out, 2**20)
    elif tool == "initcheck":
        planted_load_kernel[(1,)](out, torch.empty(128, device="cuda"))
    else:
        planted_race_kernel[(1,)](out.int())
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
