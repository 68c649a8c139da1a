#!/usr/bin/env bash
# transformers drops settings of attention that a GGUF file states, without a word.
#
# Seen with transformers 5.24.0 and gguf 0.19.0, from files that state them by GGUF's own keys:
# - phi3: attention.sliding_window 2047 becomes no window; rope.dimension_count 96 of heads of 128 becomes all 128.
# - qwen3: attention.key_length 64 becomes head_dim 128, though qwen3_moe's is read.
# - llama: head_dim is rope.dimension_count, 64, though attention.key_length says 128.
# - gemma2: attn_logit_softcapping 30 becomes 50. Its key_length and window are read.
# An engine that reads the configuration plans its KV cache and its windows for another model.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install torch torch==2.13.0
install rest transformers==5.24.0 gguf==0.19.0

cat >"$work/probe.py" <<'PY'
import logging
import sys

import gguf
import numpy as np
import transformers

transformers.logging.set_verbosity(logging.ERROR)
COMMON = {
    "context_length": 4096,
    "embedding_length": 512,
    "block_count": 2,
    "feed_forward_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "vocab_size": 40000,
}


def read(model, **stated):
    path = f"{sys.argv[1]}/{model}.gguf"
    writer = gguf.GGUFWriter(path, model)
    for key, value in (COMMON | stated).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{model}.{key}", value)
    writer.add_tensor("output_norm.weight", np.ones(512, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return transformers.AutoConfig.from_pretrained(sys.argv[1], gguf_file=f"{model}.gguf")


def check(model, stated, became):
    config = read(model, **stated)
    seen = {name: getattr(config, name) for name in became}
    print(f"{model}: {stated} became {seen}")
    assert seen == became, f"expected {became}"
    return config


print(f"transformers {transformers.__version__}")
phi3 = check("phi3", {"attention.sliding_window": 2047, "rope.dimension_count": 96}, {"sliding_window": None})
print(f"  and partial_rotary_factor {phi3.rope_parameters['partial_rotary_factor']}")
assert phi3.rope_parameters["partial_rotary_factor"] == 1.0, "the rotated part is read"
check("qwen3", {"attention.key_length": 64, "attention.value_length": 64}, {"head_dim": 128})
lengths = {"attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 64}
check("llama", lengths, {"head_dim": 64})
stated = {"attention.key_length": 64, "attention.sliding_window": 1024, "attn_logit_softcapping": 30.0}
check("gemma2", stated, {"head_dim": 64, "sliding_window": 1024, "attn_logit_softcapping": 50.0})
PY

PYTHONPATH="$work/rest:$work/torch" python3 "$work/probe.py" "$work"
