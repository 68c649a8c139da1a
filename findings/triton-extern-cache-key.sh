#!/usr/bin/env bash
# Two Triton kernels that call different external functions share a cache key, and the second runs the first one's code.
#
# An extern function names a symbol of a library, as libdevice's do: here sqrt and fabs of LLVM. The key of a kernel in
# Triton's cache has the text of the functions that it calls, but nothing of an extern one. So two modules whose kernels
# read alike and whose helpers name other symbols get one key. Seen with 3.6.0, 3.8.0 and 3.9.0: the kernel of fabs
# holds v_sqrt, from the cache. Whoever edits the symbol in such a helper keeps running the old one, without a word.
# A symbol that the kernel hands over as an argument is in the key.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

for version in 3.6.0 3.8.0 3.9.0; do install "triton-$version" --no-deps "triton==$version"; done

cat >"$work/probe.py" <<'PY'
import importlib.util
import pathlib
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

MODULE = """
import triton
import triton.language as tl


@tl.core.extern
def helper(x, _semantic=None):
    symbols = {(tl.float32,): ("SYMBOL", tl.float32)}
    return tl.core.extern_elementwise("", "", [x], symbols, is_pure=True, _semantic=_semantic)


@triton.jit
def kernel(p):
    tl.store(p, helper(tl.load(p)))
"""


def compiled(symbol):
    path = pathlib.Path(sys.argv[1]) / f"module_{symbol.replace('.', '_')}.py"
    path.write_text(MODULE.replace("SYMBOL", symbol))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options = {"enable_fp_fusion": True}
    source = ASTSource(module.kernel, {"p": "*fp32"})
    return module.kernel.cache_key, triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options=options)


(first, root), (second, absolute) = compiled("llvm.sqrt.f32"), compiled("llvm.fabs.f32")
found = ["v_sqrt" in one.asm["amdgcn"] for one in (root, absolute)]
print(f"triton {triton.__version__}: keys are equal: {first == second}; sqrt in the code of sqrt, of fabs: {found}")
assert first == second, "the keys differ"
assert found == [True, True], "the second kernel has its own code"
PY

for version in 3.6.0 3.8.0 3.9.0; do
    TRITON_CACHE_DIR="$work/cache-$version" PYTHONPATH="$work/triton-$version" python3 "$work/probe.py" "$work"
done
