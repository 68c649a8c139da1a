#!/usr/bin/env bash
# keras-hub 0.32.0 gives layers other windows than transformers 5.24.0 does, from the same config.json.
#
# Seen with Keras on PyTorch, a window of 4 and 12 tokens, as the number of keys that the last token sees in each layer:
# - gpt_oss: transformers 4 and 12. keras-hub 12 and 5: the other layer slides, and over one key more.
# - qwen2 with use_sliding_window: transformers 4 and 4. keras-hub 12 and 12, since its loader sets a name that the
#   backbone does not read.
# - qwen3: transformers 12 and 4 for max_window_layers 1. keras-hub 12 and 12: the layers get the window, and the
#   attention that runs does not ask for it.
# - gemma3: transformers 12 and 4 by the stated layer_types. keras-hub 4 and 4: only the layer's index counts.
# - mistral: 4 and 4 by both.
# Nothing is logged. Qwen's outputs are right until a prompt is longer than the window, so a short test does not tell.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install rest torch==2.13.0 transformers==5.24.0 keras==3.15.1 sentencepiece==0.2.1 kagglehub
# alone: the tokenizers need TensorFlow, and the backbones do not
install hub --no-deps keras-hub==0.32.0

cat >"$work/probe.py" <<'PY'
import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras
import keras_hub
import torch
import transformers
from keras_hub import models as hub

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
print(f"keras-hub {keras_hub.__version__}, transformers {transformers.__version__}")
TOKENS, WINDOW = 12, 4
SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": WINDOW,
}


def keys(run):
    """How many tokens change the last token's output of a layer."""
    hidden = torch.randn(1, TOKENS, 32)
    plain = run(hidden)[0, -1]
    seen = 0
    for token in range(TOKENS):
        changed = hidden.clone()
        changed[0, token] = torch.randn(32)
        seen += bool((run(changed)[0, -1] - plain).abs().max() > 1e-5)
    return seen


def by_transformers(model, layer):
    def run(hidden):
        output = []
        before = layer.register_forward_pre_hook(lambda _, given: (hidden, *given[1:]))
        after = layer.register_forward_hook(lambda _, given, value: output.append(value))
        model(torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
        before.remove(), after.remove()
        return output[0] if torch.is_tensor(output[0]) else output[0][0]

    return keys(run)


def by_keras(layer):
    def run(hidden):
        output = layer(hidden)
        return output[0] if isinstance(output, tuple) else output

    return keys(run)


def randomized(named):
    for name, weight in named:
        if weight.ndim > 1 or "sinks" in name:
            weight.data.normal_(0, 0.5)


def check(name, config, backbone, expected):
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomized(model.named_parameters())
    model.save_pretrained(f"{sys.argv[1]}/{name}")
    # not the weights: a loader of gpt_oss reads packed experts alone, and which keys a layer sees needs none
    theirs = backbone.from_preset(f"{sys.argv[1]}/{name}", load_weights=False, dtype="float32")
    randomized((weight.path, weight.value) for weight in theirs.weights)
    seen = (
        [by_transformers(model.model, layer) for layer in model.model.layers],
        [by_keras(layer) for layer in theirs.transformer_layers],
    )
    print(f"{name}: the last of {TOKENS} tokens sees {seen[0]} keys in transformers, {seen[1]} in keras-hub")
    assert seen == expected, f"expected {expected}"


torch.manual_seed(0)
Qwen2, Qwen3 = transformers.Qwen2Config, transformers.Qwen3Config
experts = {"num_local_experts": 2, "num_experts_per_tok": 2}
slides = {"use_sliding_window": True}
mixed = ["full_attention", "sliding_attention"]
with torch.no_grad():
    check("mistral", transformers.MistralConfig(**SIZES), hub.MistralBackbone, ([4, 4], [4, 4]))
    rope = {"rope_type": "default", "rope_theta": 1e4}
    gpt_oss = transformers.GptOssConfig(**SIZES, **experts, rope_parameters=rope)
    check("gpt_oss", gpt_oss, hub.GptOssBackbone, ([4, 12], [12, 5]))
    check("qwen2", Qwen2(**SIZES, **slides, max_window_layers=0), hub.QwenBackbone, ([4, 4], [12, 12]))
    check("qwen3", Qwen3(**SIZES, **slides, max_window_layers=1), hub.Qwen3Backbone, ([12, 4], [12, 12]))
    check("gemma3", transformers.Gemma3TextConfig(**SIZES, layer_types=mixed), hub.Gemma3Backbone, ([12, 4], [4, 4]))
PY

PYTHONPATH="$work/rest:$work/hub" python3 "$work/probe.py" "$work"
