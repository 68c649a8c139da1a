#!/usr/bin/env bash
# PyTorch takes a mask beside is_causal or raises, by the kernel that it chooses. Its page says that it raises.
#
# Seen with torch 2.13.0 on a CPU. The page of scaled_dot_product_attention says that an error is thrown if both are
# set. The fused kernel applies both: a query sees the keys that the mask and the upper left triangle leave. The
# plain kernel raises. It is chosen, with the same arguments, where values and keys differ in size, as in MLA, or where
# dropout is on. So code that passes both runs for one model and raises for the next.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install torch torch==2.13.0

cat >"$work/probe.py" <<'PY'
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

print(f"torch {torch.__version__}")
assert "An error is thrown if both attn_mask and is_causal are set" in " ".join(sdpa.__doc__.split())
torch.manual_seed(0)


def exact(query, key, value, sees):
    scores = query.double() @ key.double().mT * query.shape[-1] ** -0.5
    return scores.masked_fill(~sees, float("-inf")).softmax(-1) @ value.double()


for queries, keys in ((6, 6), (3, 6), (6, 3)):
    query, key, value = torch.randn(1, 2, queries, 16), torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 16)
    mask = torch.rand(queries, keys) > 0.4
    mask[:, 0] = True
    triangle = torch.ones(queries, keys, dtype=torch.bool).tril()
    seen = sdpa(query, key, value, attn_mask=mask, is_causal=True)
    off = {
        name: float((seen - exact(query, key, value, sees)).abs().max())
        for name, sees in (("both", mask & triangle), ("the mask", mask), ("the triangle", triangle))
    }
    differs = ", ".join(f"{name} {amount:.0e}" for name, amount in off.items())
    print(f"{queries} queries, {keys} keys: the output differs from that of {differs}")
    assert off["both"] < 1e-5 and off["the mask"] > 0.1 and off["the triangle"] > 0.1

    def refused(how, value=value, **more):
        try:
            sdpa(query, key, value, attn_mask=mask, is_causal=True, **more)
        except RuntimeError as error:
            print(f"  {how}: {str(error).splitlines()[0]}")
            assert "Explicit attn_mask should not be set when is_causal=True" in str(error)
        else:
            raise SystemExit(f"{how}: runs")

    refused("values of 8", torch.randn(1, 2, keys, 8))
    refused("dropout", dropout_p=0.1)
    with sdpa_kernel(SDPBackend.MATH):
        refused("the plain kernel")
PY

PYTHONPATH="$work/torch" python3 "$work/probe.py"
