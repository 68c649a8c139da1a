#!/usr/bin/env bash
# Up to Triton 3.8.0, two kernels made by one function can share a cache key, and the second runs the first one's code.
#
# A function makes a kernel that uses the function's own variable. If the module has a global of the same name, the
# cache key is made of the global's value, while the code is made of the variable's. So make(2) and make(3) have one
# key, and a kernel for heads of 64 can run as the one for heads of 128, without an error. 3.9.0 gives two keys.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install triton-3.8.0 --no-deps triton==3.8.0
install triton-3.9.0 --no-deps triton==3.9.0

cat >"$work/probe.py" <<'PY'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SIZE = tl.constexpr(1)


def make(size):
    SIZE = tl.constexpr(size)

    @triton.jit
    def kernel(out):
        tl.store(out, SIZE)

    return kernel


def stored(kernel):
    source = ASTSource(fn=kernel, signature={"out": "*i32"})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
    return int(re.search(r"arith.constant (\d+) : i32", compiled.asm["ttir"]).group(1))


two, three = make(2), make(3)
same = two.cache_key == three.cache_key
values = stored(two), stored(three)
print(f"triton {triton.__version__}: one cache key: {same}, make(2) stores {values[0]}, make(3) stores {values[1]}")
expected = {"3.8.0": (True, (2, 2)), "3.9.0": (False, (2, 3))}[triton.__version__]
assert (same, values) == expected, f"expected {expected}"
PY

for version in 3.8.0 3.9.0; do
    TRITON_CACHE_DIR="$work/cache-$version" PYTHONPATH="$work/triton-$version" python3 "$work/probe.py"
done
