# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Differences between the releases of Triton, 3.6 to 3.9, that compile these kernels.

Triton 3.8.0 renamed the copies. 3.9.0 keeps the old names, but they raise, so the new names are looked up first.
`reinterpret` was private before 3.8.0.
"""

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

copy_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# 3.8 turns LLVM's SLP vectorizer off for kernels of SM 9.0 with bfloat16 and a reduction (make_llir in its
# backends/nvidia/compiler.py). Then each 16-bit number that a loop carries takes a register of its own
SEPARATES = gl.constexpr(triton.__version__.startswith("3.8."))


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """Returns the same shared memory as another type, shape and layout. From 3.8.0 on it may not be a slice."""
    found = getattr(memory, "reinterpret", None) or memory._reinterpret
    return found(dtype, shape, layout, _semantic=_semantic)
