#!/usr/bin/env bash
# Triton's error for a failed static_assert contains no reason when the assertion is in a called function.
#
# In the kernel itself, the error's text ends with the assertion's message. In a function that the kernel calls, the
# text shows the call and nothing else; the message is in __cause__. Seen in 3.9.0 (3.6.0 to 3.8.0 do the same).
# A backend that logs str(error) to say why it refused a kernel logs a line of source and no reason.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install triton --no-deps triton==3.9.0

cat >"$work/probe.py" <<'PY'
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

REASON = "head size must be a multiple of 16"


@triton.jit
def check(N: tl.constexpr):
    tl.static_assert(N % 16 == 0, "head size must be a multiple of 16")


@triton.jit
def direct(out, N: tl.constexpr):
    tl.static_assert(N % 16 == 0, "head size must be a multiple of 16")
    tl.store(out, N)


@triton.jit
def called(out, N: tl.constexpr):
    check(N)
    tl.store(out, N)


print(f"triton {triton.__version__}")
for kernel, said in ((direct, True), (called, False)):
    source = ASTSource(kernel, {"out": "*i32", "N": "constexpr"}, {"N": 8})
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
        raise SystemExit("the assertion did not fail")
    except triton.CompilationError as error:
        print(f"{kernel.__name__}: {type(error).__name__}: {str(error)!r}")
        assert str(error).count(REASON) == (2 if said else 0), "the message is at another place"
        if not said:
            print(f"  its cause: {type(error.__cause__).__name__}: {str(error.__cause__)!r}")
            assert REASON in str(error.__cause__), "the cause has no reason"
PY

TRITON_CACHE_DIR="$work/cache" PYTHONPATH="$work/triton" python3 "$work/probe.py"
