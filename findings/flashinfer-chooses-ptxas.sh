#!/usr/bin/env bash
# Importing flashinfer.triton chooses the assembler of every Triton kernel of the process for Blackwell.
#
# On import it sets TRITON_PTXAS_BLACKWELL_PATH to the ptxas on PATH, if that is of CUDA 13 or later. Triton reads the
# variable for each kernel, whoever wrote it: from Triton 3.9 on for Hopper too. So another library's kernels get other
# machine code and other spills, and the order of imports decides. diffusers imports FlashInfer where it is installed.
# Child processes inherit the choice. Seen with 0.7.2.post1 and 0.7.4; a stand-in for ptxas answers here.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m pip install --quiet --root-user-action ignore --target "$work/site" --no-deps flashinfer-python==0.7.4
mkdir "$work/bin"
printf '#!/bin/sh\necho "Cuda compilation tools, release 13.0, V13.0.88"\n' >"$work/bin/ptxas"
chmod +x "$work/bin/ptxas"

cat >"$work/probe.py" <<'PY'
import os
import sys
import types

# the module alone: its siblings want a GPU's packages
name = "flashinfer.triton"
for sibling in ("cascade", "sm_constraint_gemm"):
    sys.modules[f"{name}.{sibling}"] = types.ModuleType(sibling)
package = types.ModuleType(name)
package.__path__ = []
for sibling in ("cascade", "sm_constraint_gemm"):
    setattr(package, sibling, sys.modules[f"{name}.{sibling}"])
sys.modules["flashinfer"], sys.modules[name] = types.ModuleType("flashinfer"), package
with open(sys.argv[1]) as file:
    code = compile(file.read(), sys.argv[1], "exec")
before = os.environ.get("TRITON_PTXAS_BLACKWELL_PATH")
exec(code, {"__name__": name, "__package__": name, "__path__": []})
after = os.environ.get("TRITON_PTXAS_BLACKWELL_PATH")
print(f"before the import: {before}; after it: {os.path.basename(after or '')} of PATH")
assert before is None
assert after == sys.argv[2], "the import chooses no assembler"
PY

env -u TRITON_PTXAS_BLACKWELL_PATH PATH="$work/bin:$PATH" \
  python3 "$work/probe.py" "$work/site/flashinfer/triton/__init__.py" "$work/bin/ptxas"
