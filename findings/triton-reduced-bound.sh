#!/usr/bin/env bash
# A scalar that Triton reduces is no longer uniform for the assembler from 3.8.0 on.
#
# A loop over matrix products runs as often as a sum over a tensor says, as in attention kernels that look up their
# request in query_start_loc. Up to 3.7.1 the sum ends in a load from one address of shared memory, and ptxas keeps
# the loop's counters and the operands' addresses in uniform registers. In 3.8.0 it ends in an exchange between
# threads, and each product's address is moved from registers of threads (R2UR). Seen: no such move in the loop with
# 3.7.1, 16 with 3.8.0 and the same ptxas. A shfl.sync.idx of the sum, by inline assembly, brings it back.
# Prompts of an attention kernel took 5 to 25 % more time on an H200; nothing here needs a GPU.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install triton-3.7.1 --no-deps triton==3.7.1
install triton-3.8.0 --no-deps triton==3.8.0

cat >"$work/probe.py" <<'PY'
import pathlib
import re
import subprocess
import sys

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def kernel(out, a, b, lengths, BROADCAST: tl.constexpr):
    count = tl.sum(tl.load(lengths + tl.arange(0, 128)))
    if BROADCAST:
        count = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [count], dtype=tl.int32, is_pure=True, pack=1
        )
    rows, columns = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    acc = tl.zeros([64, 64], tl.float32)
    for i in range(count):
        x = tl.load(a + i * 4096 + rows * 64 + columns)
        y = tl.load(b + i * 4096 + rows * 64 + columns)
        acc = tl.dot(x, y, acc)
    tl.store(out + rows * 64 + columns, acc)


def moves(broadcast):
    signature = {"out": "*fp32", "a": "*bf16", "b": "*bf16", "lengths": "*i32", "BROADCAST": "constexpr"}
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(kernel, signature, constexprs={(4,): broadcast}, attrs=attrs)
    options = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    cubin = pathlib.Path(sys.argv[1]) / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    lines = subprocess.run(
        [knobs.nvidia.nvdisasm.path, "-c", str(cubin)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := re.match(r"\s*(\.L\w+):", line))}
    loops = [
        lines[labels[back[1]] : i]
        for i, line in enumerate(lines)
        if (back := re.search(r"\bBRA\b.*`\((\.L\w+)\)", line)) and labels.get(back[1], i) < i
    ]
    (loop,) = [loop for loop in loops if any("HGMMA" in line for line in loop)]
    return sum("R2UR" in line for line in loop)


plain, broadcast = moves(False), moves(True)
print(f"triton {triton.__version__}: R2UR in the loop {plain}, with the sum broadcast {broadcast}")
assert (plain > broadcast) == (triton.__version__ == "3.8.0"), "the loop has other moves"
PY

for version in 3.7.1 3.8.0; do
    TRITON_CACHE_DIR="$work/cache-$version" PYTHONPATH="$work/triton-$version" python3 "$work/probe.py" "$work"
done
