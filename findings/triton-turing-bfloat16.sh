#!/usr/bin/env bash
# Triton 3.9.0 turns float32 into bfloat16 for Turing (sm75), but no longer float16 into bfloat16.
#
# The direct conversion raises PTXASError: the code contains an instruction that sm75 has not. Through float32 it
# compiles, and 3.8.0 compiles both. A kernel that
# reads a float16 cache and answers in bfloat16 meets it.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install triton-3.8.0 --no-deps triton==3.8.0
install triton-3.9.0 --no-deps triton==3.9.0

cat >"$work/probe.py" <<'PY'
import contextlib
import io

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def directly(x, out, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, tl.load(x + offsets).to(tl.bfloat16))


@triton.jit
def through_float32(x, out, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, tl.load(x + offsets).to(tl.float32).to(tl.bfloat16))


for kernel in (directly, through_float32):
    source = ASTSource(kernel, {"x": "*fp16", "out": "*bf16", "N": "constexpr"}, {"N": 128})
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Triton prints the whole code beside the error
            triton.compile(source, target=GPUTarget("cuda", 75, 32), options={"enable_fp_fusion": True})
        seen = "compiles"
    except triton.runtime.errors.PTXASError as error:
        seen = next(line for line in str(error).splitlines() if "requires" in line).split("error   : ")[1]
    print(f"triton {triton.__version__}, {kernel.__name__}: {seen}")
    refused = kernel is directly and triton.__version__ == "3.9.0"
    assert "requires .target sm_80" in seen if refused else seen == "compiles", "the behaviour changed"
PY

for version in 3.8.0 3.9.0; do
    TRITON_CACHE_DIR="$work/cache-$version" PYTHONPATH="$work/triton-$version" python3 "$work/probe.py"
done
