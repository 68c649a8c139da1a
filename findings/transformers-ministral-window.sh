#!/usr/bin/env bash
# A Ministral without a sliding window is built, and its forward raises, in transformers 5.24.0.
#
# With sliding_window=None the configuration makes every layer full_attention, so no layer slides. The model is built
# without a warning. Its forward makes the mask of sliding layers all the same, and raises because no window is set.
# Code that reads layer_types to learn what attention the model runs sees a valid model.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install rest transformers==5.24.0 torch==2.13.0

cat >"$work/probe.py" <<'PY'
import torch
import transformers
from transformers import MinistralConfig, MinistralForCausalLM

print(f"transformers {transformers.__version__}")
sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
outcomes = {}
for window in (8, None):
    config = MinistralConfig(**sizes, **heads, sliding_window=window)
    model = MinistralForCausalLM(config).eval()
    try:
        with torch.no_grad():
            outcomes[window] = str(tuple(model(input_ids=torch.arange(12)[None]).logits.shape))
    except ValueError as error:
        outcomes[window] = f"ValueError: {error}"
    print(f"sliding_window={window}: layers {sorted(set(config.layer_types))}; forward: {outcomes[window]}")
assert outcomes[8] == "(1, 12, 99)"
assert set(config.layer_types) == {"full_attention"}
assert "sliding_window" in outcomes[None]
PY

PYTHONPATH="$work/rest" python3 "$work/probe.py"
