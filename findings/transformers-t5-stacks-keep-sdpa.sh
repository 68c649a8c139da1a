#!/usr/bin/env bash
# transformers 5.18.0: set_attn_implementation on a T5 model changes the model's own config alone, without a word.
#
# The encoder and the decoder of T5 have copies of the config, and every attention layer reads its stack's copy. After
# set_attn_implementation("eager") the model says `eager`, and all of its layers still run `sdpa`. transformers 5.23.0
# changes the stacks too. A Llama model of the same release has one config, so its layers follow.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install torch torch==2.13.0
install old --no-deps transformers==5.18.0
install new --no-deps transformers==5.23.0
install rest huggingface-hub==1.33.0 tokenizers==0.23.3 safetensors==0.8.0 regex==2026.11.19 typer==0.29.2 \
  pyyaml==6.0.3 packaging==26.3 tqdm==4.70.1 numpy==2.4.6

cat >"$work/probe.py" <<'PY'
import sys
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

transformers.logging.set_verbosity_error()
small = {"vocab_size": 32, "num_heads": 2, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1}
t5 = T5ForConditionalGeneration(T5Config(**small))
llama = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2))
for model in (t5, llama):
    model.set_attn_implementation("eager")


def of(module):
    return module.config._attn_implementation


stacks = of(t5.encoder), of(t5.decoder)
layer = of(llama.model.layers[0].self_attn)
print(f"transformers {transformers.__version__}: T5 says {of(t5)}, its stacks run {', '.join(stacks)};",
      f"Llama says {of(llama)}, its layer runs {layer}")
assert of(t5) == of(llama) == layer == "eager"
assert stacks == (("sdpa", "sdpa") if sys.argv[1] == "old" else ("eager", "eager")), stacks
PY
for release in old new; do
  PYTHONPATH="$work/$release:$work/torch:$work/rest" python3 "$work/probe.py" "$release"
done
