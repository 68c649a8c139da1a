#!/usr/bin/env bash
# In Triton, (n - 4) // 2 is rounded up for every n below 4 but 1, for which it is rounded down.
#
# Triton divides integers as C does, towards zero, and constants as Python does, downwards. A launch turns an argument
# whose value is 1 into a constant. So the one kernel that computes the first block of a sliding window as
# (length - window) // block gives 0 for a length of 3 and a window of 4 with blocks of 2, but -2 for a length of 1,
# where the other lengths' rule gives -1. The remainder changes its sign in the same way. Seen in 3.9.0 and 3.6.0;
# the interpreter always rounds towards zero, so a CPU test does not show it.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install torch torch==2.13.0
install triton --no-deps triton==3.9.0

cat >"$work/probe.py" <<'PY'
import os

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import native_specialize_impl


@triton.jit
def kernel(out, n):
    tl.store(out, (n - 4) // 2)
    tl.store(out + 1, (n - 4) % 2)


if os.environ.get("TRITON_INTERPRET") == "1":
    for n in (1, 3):
        out = torch.zeros(2, dtype=torch.int32)
        kernel[(1,)](out, n)
        print(f"triton {triton.__version__}, interpreter, n = {n}: quotient and remainder {out.tolist()}")
        assert out.tolist() == [int((n - 4) / 2), -1], "the interpreter rounds in another way"
else:
    for n in (1, 3):
        kind, _ = native_specialize_impl(CUDABackend, n, False, True, True)
        source = ASTSource(kernel, {"out": "*i32", "n": kind}, {"n": n} if kind == "constexpr" else {})
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
        ttir = compiled.asm["ttir"]
        print(f"triton {triton.__version__}, compiled, n = {n}, which the launcher calls {kind}:")
        for line in ttir.splitlines():
            if "arith." in line or "tt.store" in line:
                print("   ", line.split(" loc(")[0].strip())
        if n == 1:
            assert kind == "constexpr" and "constant -2 : i32" in ttir and "divsi" not in ttir
        else:
            assert kind == "i32" and "arith.divsi" in ttir and "arith.remsi" in ttir
PY

export PYTHONPATH="$work/triton:$work/torch" TRITON_CACHE_DIR="$work/cache"
python3 "$work/probe.py"
TRITON_INTERPRET=1 python3 "$work/probe.py"
