#!/usr/bin/env bash
# On MI300, one plain attention kernel loses half its waves between Triton 3.7.1 and 3.8.0.
#
# A causal kernel with tiles of 64 x 64, heads of 128 and four warps takes 241 vector registers under 3.7.1, so that two
# waves fit on a SIMD. Under 3.8.0 it takes 258, more than half of the 512, and one wave fits. Tiles of 128 x 128
# with heads of 64: 249, then 314. Nothing spills and nothing warns: only the assembly's occupancy shows it.
# Tile sizes tuned under one release can be wrong under the next.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install triton-3.7.1 --no-deps triton==3.7.1
install triton-3.8.0 --no-deps triton==3.8.0

cat >"$work/probe.py" <<'PY'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
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


for tile in ((64, 64, 128), (128, 128, 64)):
    options = {"num_warps": 4, "enable_fp_fusion": True}
    compiled = triton.compile(source(*tile), target=GPUTarget("hip", "gfx942", 64), options=options)
    assembly = compiled.asm["amdgcn"]
    registers = int(re.search(r"\.vgpr_count:\s+(\d+)", assembly).group(1))
    spilled = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly).group(1))
    waves = int(re.search(r"Occupancy: (\d+)", assembly).group(1))
    print(f"triton {triton.__version__}, tile {tile}: {registers} registers, {spilled} spilled; waves a SIMD: {waves}")
    expected = {"3.7.1": 2, "3.8.0": 1}[triton.__version__]
    assert (waves, spilled) == (expected, 0), f"expected {expected} waves and no spills"
PY

for version in 3.7.1 3.8.0; do
    TRITON_CACHE_DIR="$work/cache-$version" PYTHONPATH="$work/triton-$version" python3 "$work/probe.py"
done
