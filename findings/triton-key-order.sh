#!/usr/bin/env bash
# The cache key of a Triton kernel depends on whether a function that it calls was keyed before the kernel was.
#
# Triton hashes a kernel's text, those of the functions that it calls, and the constexpr globals that were read. It looks
# at a callee's globals before it makes the callee's own key, and they are empty until then. So one process that launches
# a helper's own kernel first and one that does not give the same kernel two keys: both compile it, and a directory of
# compiled kernels that was made in one order misses in the other. Seen with 3.6.0 and 3.7.1; 3.8.0 and
# 3.9.0 give one key.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

for version in 3.6.0 3.8.0; do install "triton-$version" --no-deps "triton==$version"; done

cat >"$work/kernels.py" <<'PY'
import triton
import triton.language as tl

SIZE = tl.constexpr(64)


@triton.jit
def helper(x):
    return x * SIZE


@triton.jit
def kernel(p):
    tl.store(p, helper(tl.load(p)))
PY

cat >"$work/probe.py" <<'PY'
import sys

import kernels

if sys.argv[1] == "helper":
    kernels.helper.cache_key
print(kernels.kernel.cache_key)
PY

for version in 3.6.0 3.8.0; do
  keys=()
  for first in kernel helper; do
    keys+=("$(PYTHONPATH="$work/triton-$version:$work" python3 "$work/probe.py" "$first")")
  done
  same=$([ "${keys[0]}" = "${keys[1]}" ] && echo yes || echo no)
  echo "triton $version: the key is the same whichever function was keyed first: $same"
  case "$version $same" in "3.6.0 no" | "3.8.0 yes") ;; *) echo "the behaviour changed" && exit 1 ;; esac
done
