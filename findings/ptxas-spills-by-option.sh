#!/usr/bin/env bash
# An option that Triton always gives to ptxas makes ptxas 13.4 spill several times as much.
#
# Triton 3.9.0 passes --regAllocOptLevel=2 to ptxas. A plain causal attention kernel for sm90, with heads of 512 and
# 255 registers, spills 328 bytes with it, and 52 without. The other values (0, 1, 3) spill 312 or 328. With heads of
# 256, it is 24 bytes instead of none. Up to 3.8.0, Triton passed it too, but assembled sm90 with ptxas 12.9, which took
# no notice. So an upgrade of Triton alone can slow a decode kernel of MLA, whose heads are that large.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install triton --no-deps triton==3.9.0

cat >"$work/probe.py" <<'PY'
import pathlib
import re
import subprocess
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource


@triton.jit
def attention(q, k, v, out, length, scale, q_stride, k_stride, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    head = tl.arange(0, D)
    inside = rows[:, None] < length
    query = tl.load(q + rows[:, None] * q_stride + head[None, :], mask=inside, other=0.0)
    best = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D], tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * M, N):
        keys = start + tl.arange(0, N)
        key = tl.load(k + keys[None, :] * k_stride + head[:, None], mask=keys[None, :] < length, other=0.0)
        seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] < length)
        scores = tl.where(seen, tl.dot(query, key) * scale, -1e30)
        now = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - now[:, None])
        shrink = tl.exp2(best - now)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(v + keys[:, None] * k_stride + head[None, :], mask=keys[:, None] < length, other=0.0)
        sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None])
        best = now
    tl.store(out + rows[:, None] * q_stride + head[None, :], (sums / total[:, None]).to(tl.bfloat16), mask=inside)


def source(m, n, d):
    types = {name: "*bf16" for name in ("q", "k", "v", "out")}
    types |= {"length": "i32", "scale": "fp32", "q_stride": "i32", "k_stride": "i32"}
    types |= {"M": "constexpr", "N": "constexpr", "D": "constexpr"}
    aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1, 2, 3, 6, 7)}
    return ASTSource(attention, types, {"M": m, "N": n, "D": d}, aligned)


def spilled(ptx, *options):
    path = pathlib.Path(sys.argv[1]) / "kernel.ptx"
    path.write_text(ptx)
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", *options, str(path), "-o", str(path.with_suffix(".o"))]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", said).group(1)
    return int(registers), int(re.search(r"(\d+) bytes spill stores", said).group(1))


print(f"triton {triton.__version__}, ptxas {get_ptxas(90).version} (registers, bytes spilled)")
for (m, n, d), warps, stages in (((64, 32, 512), 8, 1), ((64, 64, 256), 4, 2)):
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    compiled = triton.compile(source(m, n, d), target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    without = spilled(ptx)
    levels = {level: spilled(ptx, f"--regAllocOptLevel={level}") for level in range(4)}
    print(f"heads of {d}: without the option {without}, by its value {levels}")
    assert levels[2][1] >= 3 * without[1] + 8, "the option does no harm any more"
PY

TRITON_CACHE_DIR="$work/cache" PYTHONPATH="$work/triton" python3 "$work/probe.py" "$work"
