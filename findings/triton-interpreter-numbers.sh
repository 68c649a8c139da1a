#!/usr/bin/env bash
# Triton's interpreter computes other numbers from release to release, for the same kernel and the same input.
#
# Seen for NaN, booleans and fma in 3.7.1, 3.8.0 and 3.9.0:
# - tl.maximum(NaN, 1.5) is NaN in 3.7.1, and 1.5 from 3.8.0 on.
# - tl.argmax of [NaN, 1, 2, 0] is 0 in 3.7.1, and 2 from 3.8.0 on; tl.max is 2 in all three.
# - True + True, as int1, is 1 up to 3.8.0, and 0 in 3.9.0.
# - tl.fma rounds twice up to 3.8.0, and once in 3.9.0.
# A CPU test of softmax with a NaN or of counted mask bits can therefore pass under one release alone.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install torch torch==2.13.0
for version in 3.7.1 3.8.0 3.9.0; do
    install "triton-$version" --no-deps "triton==$version"
done

cat >"$work/probe.py" <<'PY'
import math

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, c, out):
    offsets = tl.arange(0, 4)
    values = tl.load(x + offsets)
    tl.store(out, tl.maximum(tl.load(x), tl.load(y)))
    tl.store(out + 1, tl.argmax(values, 0).to(tl.float32))
    tl.store(out + 2, tl.max(values, 0))
    yes = tl.load(y) > 0
    tl.store(out + 3, (yes + yes).to(tl.float32))
    tl.store(out + 4, tl.fma(tl.load(c), tl.load(c), tl.load(c + 1)))


x = torch.tensor([math.nan, 1, 2, 0])
y = torch.tensor([1.5])
c = torch.tensor([1 + 2**-12, -(1 + 2**-11)])
out = torch.zeros(5)
kernel[(1,)](x, y, c, out)
seen = out.tolist()
print(
    f"triton {triton.__version__}: maximum {seen[0]}, argmax {seen[1]:.0f}, max {seen[2]}, "
    f"True + True {seen[3]:.0f}, fma {seen[4]}"
)
expected = {
    "3.7.1": [math.nan, 0, 2, 1, 0],
    "3.8.0": [1.5, 2, 2, 1, 0],
    "3.9.0": [1.5, 2, 2, 0, 2**-24],
}[triton.__version__]
assert str(seen) == str([float(value) for value in expected]), f"expected {expected}"
PY

for version in 3.7.1 3.8.0 3.9.0; do
    TRITON_INTERPRET=1 PYTHONPATH="$work/triton-$version:$work/torch" python3 "$work/probe.py"
done
