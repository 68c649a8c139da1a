#!/usr/bin/env bash
# In transformers 5.24.0, flex_attention over a StaticCache lets queries see keys of the future and of nothing.
#
# A mask for flex_attention is a function that the kernel asks. It holds the cache's own counter of tokens, and the
# cache adds the new tokens to that counter before the kernel asks. So each query counts as later by as many tokens as
# came with it: it sees tokens that come after it, and slots without a token, which are keys of zeros. A prompt in one
# call is right, since the cache has no counter yet. Second chunks of a prompt and generated tokens are wrong. Layers
# with windows are right: their counter is a number. sdpa and eager are right, since they ask when the mask is made.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install rest transformers==5.24.0 torch==2.13.0

cat >"$work/probe.py" <<'PY'
import functools
import warnings

import torch
import torch._dynamo

# so that no C++ compiler is needed: the kernel is PyTorch's definition of it
torch.compile = functools.partial(torch.compile, backend="eager")
torch._dynamo.config.recompile_limit = 64

import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, StaticCache
from transformers.masking_utils import create_causal_mask

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}
IDS = torch.arange(12)[None]
torch.manual_seed(0)
llama = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
mistral = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)).eval()
for model in (llama, mistral):
    for weight in model.parameters():
        weight.data.normal_(0, 0.5) if weight.ndim > 1 else None


def off(model, name, cache, chunks):
    """How far the logits of a prompt in chunks are from those of the prompt in one call without a cache."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = model(IDS, use_cache=False).logits
        model.set_attn_implementation(name)
        parts = [model(part, past_key_values=cache).logits for part in IDS.split(chunks, dim=1)]
    return float((torch.cat(parts, 1) - whole).abs().max())


def static(model):
    return StaticCache(config=model.config, max_cache_len=16)


for chunks in ([12], [5, 7], [9, 1, 1, 1]):
    seen = {
        "eager static": off(llama, "eager", static(llama), chunks),
        "sdpa static": off(llama, "sdpa", static(llama), chunks),
        "flex dynamic": off(llama, "flex_attention", DynamicCache(config=llama.config), chunks),
        "flex static with windows": off(mistral, "flex_attention", static(mistral), chunks),
        "flex static": off(llama, "flex_attention", static(llama), chunks),
    }
    print(f"in chunks of {chunks}, from the prompt in one call:", ", ".join(f"{n} {o:.0e}" for n, o in seen.items()))
    wrong = seen.pop("flex static")
    assert max(seen.values()) < 1e-4
    assert wrong > 0.01 if len(chunks) > 1 else wrong < 1e-4

cache = static(llama)
llama.set_attn_implementation("flex_attention")
with torch.no_grad():
    llama(IDS[:, :5], past_key_values=cache)
mask = create_causal_mask(config=llama.config, inputs_embeds=torch.zeros(1, 7, 32), attention_mask=None, cache=cache)


def keys():
    return [sum(bool(mask.mask_mod(0, 0, query, key)) for key in range(16)) for query in range(7)]


before = keys()
cache.update(torch.zeros(1, 2, 7, 8), torch.zeros(1, 2, 7, 8), 0)
after = keys()
print(f"7 tokens after 5: by the mask they see {before} keys, and once the cache has their keys {after}")
assert before == [6, 7, 8, 9, 10, 11, 12] and after == [13, 14, 15, 16, 16, 16, 16]
PY

PYTHONPATH="$work/rest" python3 "$work/probe.py"
