#!/usr/bin/env bash
# Triton 3.9.0's interpreter refuses a mask that contains a comparison of two scalars.
#
# The kernel stores where `(n > 3) & (offsets < 4)`. The compiler takes it, and the interpreters of 3.6.0 to 3.8.0
# compute it. 3.9.0 raises InterpreterError: "mask has unsupported dtype". Such masks are usual in attention kernels
# ("this row is in the batch, and this key is in the window"), so their CPU tests fail after an upgrade.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install torch torch==2.13.0
install triton-3.8.0 --no-deps triton==3.8.0
install triton-3.9.0 --no-deps triton==3.9.0

cat >"$work/probe.py" <<'PY'
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(out, n, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, offsets + 1, mask=(n > 3) & (offsets < 4))


stored = torch.zeros(8, dtype=torch.int32)
try:
    kernel[(1,)](stored, 5, 8)
    seen = stored.tolist()
except triton.runtime.errors.InterpreterError as error:
    seen = str(error)
print(f"triton {triton.__version__}: {seen}")
expected = {"3.8.0": [1, 2, 3, 4, 0, 0, 0, 0], "3.9.0": "mask has unsupported dtype"}[triton.__version__]
assert expected == seen or str(expected) in str(seen), f"expected {expected}"
PY

for version in 3.8.0 3.9.0; do
    TRITON_INTERPRET=1 PYTHONPATH="$work/triton-$version:$work/torch" python3 "$work/probe.py"
done
