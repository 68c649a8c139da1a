#!/usr/bin/env bash
# A number too large for fp8 becomes its largest number, NaN, infinity or a wrong number, by who converts it.
#
# Seen with torch 2.13.0 (CPU), ml_dtypes 0.6.0 and Triton 3.9.0, for 500, 10,000 and NaN as float8_e4m3fn
# (its largest number is 448):
# - torch: 448, 448, NaN. But its float8_e4m3fnuz, the format of MI300, is NaN, and 100,000 as float8_e5m2 is infinite.
# - ml_dtypes: NaN, NaN, NaN.
# - Triton compiled for sm90: the instruction saturates (cvt.rn.satfinite), for e5m2 too.
# - Triton's interpreter: 256, 320, 384. Even NaN becomes a plausible number. triton-lang/triton#11667 is about it.
# A KV cache quantised on a CPU to check a kernel therefore differs from the kernel's wherever a scale is too small.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install torch torch==2.13.0 ml_dtypes==0.6.0 numpy==2.4.6
install triton --no-deps triton==3.9.0

cat >"$work/probe.py" <<'PY'
import math
import os
import re

import ml_dtypes
import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def kernel(x, out, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, tl.load(x + offsets).to(out.dtype.element_ty))


def check(name, seen, expected):
    print(f"{name}: {seen}")
    assert str(seen) == str(expected), f"expected {expected}"


x = torch.tensor([500.0, 1e4, math.nan, 1e5])
if os.environ.get("TRITON_INTERPRET") == "1":
    for dtype, expected in (
        (torch.float8_e4m3fn, [448.0, 448.0, math.nan, 448.0]),
        (torch.float8_e4m3fnuz, [math.nan] * 4),
        (torch.float8_e5m2, [512.0, 10240.0, math.nan, math.inf]),
    ):
        check(f"torch {torch.__version__} {dtype}", x.to(dtype).float().tolist(), expected)
    cast = x.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist()
    check(f"ml_dtypes {ml_dtypes.__version__} float8_e4m3fn", cast, [math.nan] * 4)
    out = torch.zeros(4, dtype=torch.float8_e4m3fn)
    kernel[(1,)](x, out, 4)
    seen = out.float().tolist()
    check(f"triton {triton.__version__} interpreter, float8_e4m3fn", seen, [256.0, 320.0, 384.0, 384.0])
else:
    for name in ("fp8e4nv", "fp8e5"):
        source = ASTSource(kernel, {"x": "*fp32", "out": f"*{name}", "N": "constexpr"}, {"N": 128})
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
        seen = re.findall(r"cvt\.\S+x2\.f32", compiled.asm["ptx"])
        expected = {"fp8e4nv": ["cvt.rn.satfinite.e4m3x2.f32"], "fp8e5": ["cvt.rn.satfinite.e5m2x2.f32"]}[name]
        check(f"triton {triton.__version__} compiled, {name}", seen, expected)
PY

export PYTHONPATH="$work/triton:$work/torch" TRITON_CACHE_DIR="$work/cache"
TRITON_INTERPRET=1 python3 "$work/probe.py"
python3 "$work/probe.py"
