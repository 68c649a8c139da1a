#!/usr/bin/env bash
# Triton 3.9.0 does not assemble Hopper kernels with the ptxas that knobs.nvidia.ptxas names.
#
# The knob names ptxas 12.9. In 3.9.0, sm90 is assembled by ptxas-blackwell 13.4, and the PTX says version 9.4,
# which 12.9 refuses with a message. A tool that reports registers and spills of a Hopper kernel by running
# the knob's ptxas works up to 3.8.0 and fails in 3.9.0. get_ptxas(90) of Triton's NVIDIA compiler names the real one.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install triton-3.8.0 --no-deps triton==3.8.0
install triton-3.9.0 --no-deps triton==3.9.0

cat >"$work/probe.py" <<'PY'
import pathlib
import subprocess
import sys

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource


@triton.jit
def kernel(out):
    tl.store(out, 1)


compiled = triton.compile(
    ASTSource(kernel, {"out": "*i32"}), target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True}
)
ptx = pathlib.Path(sys.argv[1]) / "kernel.ptx"
ptx.write_text(compiled.asm["ptx"])
print(f"triton {triton.__version__}: the knob's ptxas is {knobs.nvidia.ptxas.version}, sm90's {get_ptxas(90).version}")
answers = {}
for name, path in (("the knob's", knobs.nvidia.ptxas.path), ("sm90's", get_ptxas(90).path)):
    command = [path, "--gpu-name=sm_90a", str(ptx), "-o", str(ptx.with_suffix(".o"))]
    done = subprocess.run(command, capture_output=True, text=True)
    answers[name] = done.returncode == 0
    print(f"  {name}: {'assembles' if done.returncode == 0 else done.stderr.splitlines()[0].split(', ', 1)[1]}")
assert answers == {"the knob's": triton.__version__ == "3.8.0", "sm90's": True}, "another ptxas assembles"
PY

for version in 3.8.0 3.9.0; do
    TRITON_CACHE_DIR="$work/cache-$version" PYTHONPATH="$work/triton-$version" python3 "$work/probe.py" "$work"
done
