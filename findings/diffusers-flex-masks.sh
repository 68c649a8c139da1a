#!/usr/bin/env bash
# diffusers 0.42.1's attention backend flex leaves out the causal rule or misreads a mask, without a word.
#
# Seen with torch 2.13.0, keys all alike, so that each query's weights say which keys it saw. The backends native
# and flex get the same call:
# - is_causal without a mask: flex lets each query see all keys.
# - A padding mask [batch, keys]: flex hides queries in place of keys. It raises if queries and keys differ in number.
# - A mask and is_causal: native applies both, flex the causal rule alone.
# - A mask [batch, 1, 1, keys] alone: both are right.
# diffusers' own model of LongCat's audio hands over a mask [batch, keys]. Where tokens are padding, it computes other
# numbers after set_attention_backend("flex").
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install rest torch==2.13.0 diffusers==0.42.1

cat >"$work/probe.py" <<'PY'
import warnings

import diffusers
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

warnings.simplefilter("ignore")
print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
TOKENS = 4
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
PADDED = torch.tensor([[True, True, True, False]])


def weights(backend, queries=TOKENS, **call):
    query, key = torch.zeros(1, queries, 1, TOKENS), torch.zeros(1, TOKENS, 1, TOKENS)
    value = torch.eye(TOKENS)[None, :, None]
    return dispatch_attention_fn(query, key, value, backend=AttentionBackendName(backend), **call)[0, :, 0]


def exact(sees):
    sees = sees.double().expand(TOKENS, TOKENS)
    return (sees / sees.sum(-1, keepdim=True)).nan_to_num()


everything, keys, queries = torch.ones(TOKENS, TOKENS).bool(), PADDED, PADDED.T
for case, call, by_native, by_flex in (
    ("is_causal", {"is_causal": True}, CAUSAL, everything),
    ("a mask [batch, keys]", {"attn_mask": PADDED}, keys, queries),
    ("a mask [batch, 1, 1, keys]", {"attn_mask": PADDED[:, None, None]}, keys, keys),
    ("that mask and is_causal", {"attn_mask": PADDED[:, None, None], "is_causal": True}, CAUSAL & keys, CAUSAL),
):
    for backend, sees in (("native", by_native), ("flex", by_flex)):
        seen = weights(backend, **call)
        counts = (seen > 0).sum(-1).tolist()
        print(f"{case}, {backend}: the queries see {counts} keys, the last key {seen[:, -1].gt(0).sum()} queries")
        assert torch.allclose(seen.double(), exact(sees), atol=1e-6), f"expected {exact(sees)}"

right = weights("native", queries=2, attn_mask=PADDED)
assert torch.allclose(right.double(), exact(keys)[:2], atol=1e-6)
try:
    weights("flex", queries=2, attn_mask=PADDED)
    raise SystemExit("flex takes the mask of two queries")
except RuntimeError as error:
    print(f"a mask [batch, keys] and two queries, flex: {str(error).splitlines()[0]}")
PY

PYTHONPATH="$work/rest" python3 "$work/probe.py"
