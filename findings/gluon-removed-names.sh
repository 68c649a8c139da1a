#!/usr/bin/env bash
# Gluon's removed functions are still there in Triton 3.9.0, so asking for the old name answers wrongly.
#
# tma.async_copy_global_to_shared became async_load in 3.8.0. In 3.9.0 hasattr finds the old name, and the compiler
# refuses it with "has been removed". 3.8.0 compiles either. A Hopper kernel that serves two releases of Triton
# therefore has to look for the new name first; "use the old name while it exists" breaks.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install triton-3.8.0 --no-deps triton==3.8.0
install triton-3.9.0 --no-deps triton==3.9.0

cat >"$work/probe.py" <<'PY'
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


def make(load):
    @gluon.jit
    def kernel(box):
        tile = gl.allocate_shared_memory(box.dtype, box.block_type.shape, box.layout)
        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(bar, count=1)
        mbarrier.expect(bar, box.block_type.nbytes)
        load(box, [0, 0], bar, tile)
        mbarrier.wait(bar, 0)
        mbarrier.invalidate(bar)

    return kernel


def outcome(name):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    box = f"tensordesc<fp16[64, 64],{layout!r}>"
    try:
        source = GluonASTSource(make(getattr(tma, name)), {"box": box}, {})
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
        return "compiles"
    except triton.CompilationError as error:
        reason = error
        while reason.__cause__:
            reason = reason.__cause__
        return str(reason)


for name in ("async_copy_global_to_shared", "async_load"):
    seen = outcome(name)
    print(f"triton {triton.__version__}: hasattr(tma, {name!r}) {hasattr(tma, name)}: {seen!r}")
    removed = name != "async_load" and triton.__version__ == "3.9.0"
    assert hasattr(tma, name) and ("has been removed" in seen if removed else seen == "compiles")
PY

for version in 3.8.0 3.9.0; do
    TRITON_CACHE_DIR="$work/cache-$version" PYTHONPATH="$work/triton-$version" python3 "$work/probe.py"
done
