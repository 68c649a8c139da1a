#!/usr/bin/env bash
# In continuous batching, transformers 5.24.0 calls a registered attention function with other tensors and no cache.
#
# Up to 5.23.0 the function gets the new tokens' keys and a `cache`, into which it stores them itself. In 5.24.0 the
# layer has stored them already: the function gets all the requests' keys, gathered, and no `cache`. Two requests of 3
# and 4 tokens are decoded here: in the first decode, keys has 2 rows in 5.23.0 and 9 in 5.24.0. The rest is alike
# (write_index, read_index, cu_seq_lens_q, cu_seq_lens_k). A function written for one release computes wrong tokens, or
# serves nothing, in the other.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install torch torch==2.13.0
install rest transformers==5.24.0
install transformers-5.23.0 --no-deps transformers==5.23.0

cat >"$work/probe.py" <<'PY'
import logging

import torch
import transformers
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.eager_paged import eager_paged_attention_forward

logging.disable()
calls = []


def watch(module, query, key, value, attention_mask, **kwargs):
    paged = {"write_index", "read_index", "cu_seq_lens_q", "cu_seq_lens_k"} <= kwargs.keys()
    calls.append((query.shape[2], key.shape[2], kwargs.get("cache") is not None, paged))
    return eager_paged_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("paged|eager", watch)
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
).eval()
model.set_attn_implementation("eager")
model.generate_batch(
    [[5, 6, 7], [8, 9, 10, 11]],
    generation_config=GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0),
    continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32),
    progress_bar=False,
)
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
for queries, keys, cache, paged in calls:
    print(f"  queries {queries}, keys {keys}, a cache: {cache}, the paged arguments: {paged}")
expected = {
    "5.23.0": [(7, 7, True, True), (2, 2, True, True), (2, 2, True, True)],
    "5.24.0": [(7, 7, False, True), (2, 9, False, True), (2, 11, False, True)],
}[transformers.__version__]
assert calls == expected, f"expected {expected}"
PY

PYTHONPATH="$work/transformers-5.23.0:$work/rest:$work/torch" python3 "$work/probe.py"
PYTHONPATH="$work/rest:$work/torch" python3 "$work/probe.py"
