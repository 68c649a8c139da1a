#!/usr/bin/env bash
# SGLang 0.5.23's attention backend torch_native computes a layer with a softcap as if it had none, without a word.
#
# Gemma 2 caps its scores: cap * tanh(score / cap). A layer states the cap as logit_cap. The backend never reads it, so
# a layer with a cap of 2 has the output of a layer without one, though the cap changes the numbers a lot. The
# backend's own file runs here, on a layer, a cache and a batch that hold what it reads.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install torch torch==2.13.0
# the wheel is unpacked alone: what the package needs is not needed by the file that runs
python3 -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --dest "$work" sglang==0.5.23
mkdir "$work/sglang"
python3 -m zipfile -e "$work"/sglang-0.5.23*.whl "$work/sglang"

cat >"$work/probe.py" <<'PY'
import importlib.util
import sys
import types
from pathlib import Path

import torch

wheel = Path(sys.argv[1])
names = ("layers.attention.base_attn_backend", "layers.radix_attention", "mem_cache.memory_pool",
         "mem_cache.swa_memory_pool", "model_executor.forward_batch_info")
kept = ("AttentionBackend", "AttentionType", "KVWriteLoc", "SWAKVPool", "ForwardBatch")
for name, one in zip(names, kept):
    module = types.ModuleType(f"sglang.srt.{name}")
    setattr(module, one, type(one, (), {}))
    sys.modules[module.__name__] = module

file = wheel / "sglang/srt/layers/attention/torch_native_backend.py"
spec = importlib.util.spec_from_file_location("torch_native_backend", file)
backend = importlib.util.module_from_spec(spec)
spec.loader.exec_module(backend)

torch.manual_seed(0)
heads, size, keys = 2, 16, 20
key, value = torch.randn(2, keys, heads, size).unbind()
query = 4 * torch.randn(1, heads, size)
pool = types.SimpleNamespace(get_key_buffer=lambda layer: key, get_value_buffer=lambda layer: value)
table = types.SimpleNamespace(req_to_token=torch.arange(keys)[None])
runner = types.SimpleNamespace(device="cpu", token_to_kv_pool=pool, req_to_token_pool=table)
batch = types.SimpleNamespace(out_cache_loc=None, req_pool_indices=torch.tensor([0]), seq_lens=torch.tensor([keys]),
                              encoder_lens=None)


def decoded(cap):
    layer = types.SimpleNamespace(
        tp_q_head_num=heads, tp_k_head_num=heads, qk_head_dim=size, v_head_dim=size, is_cross_attention=False,
        layer_id=0, scaling=size**-0.5, sliding_window_size=-1, logit_cap=cap,
    )
    return backend.TorchNativeAttnBackend(runner).forward_decode(query, None, None, layer, batch).view(heads, size)


def exact(cap):
    scores = torch.einsum("hd,khd->hk", query[0], key) * size**-0.5
    scores = cap * torch.tanh(scores / cap) if cap else scores
    return torch.einsum("hk,khd->hd", scores.softmax(-1), value)


plain, capped = decoded(0.0), decoded(2.0)
print(f"without a cap it differs from the definition by {(plain - exact(0.0)).abs().max():.0e}")
print(f"with a cap of 2 it differs by {(capped - exact(2.0)).abs().max():.2f}")
print("the layer with the cap and the layer without have", "the same output" if capped.equal(plain) else "other outputs")
assert torch.allclose(plain, exact(0.0), atol=1e-5)
assert capped.equal(plain)
assert (capped - exact(2.0)).abs().max() > 0.1
PY
PYTHONPATH="$work/torch" python3 "$work/probe.py" "$work/sglang"
