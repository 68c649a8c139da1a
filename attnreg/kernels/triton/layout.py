# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803 (constexprs are written in capitals)
"""Where the elements of a cached key or value are, beside each other or not."""

import triton
import triton.language as tl


@triton.jit
def columns(offs_d, VECTOR: tl.constexpr, STRIDE_X: tl.constexpr):
    """The offsets of a row's elements: VECTOR of them lie together, the next ones STRIDE_X further; 0: all together."""
    return offs_d if VECTOR == 0 else offs_d // VECTOR * STRIDE_X + offs_d % VECTOR
