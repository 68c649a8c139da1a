#!/usr/bin/env bash
# In transformers 5.24.0, the sequences of a packed row see each other in GPT-OSS, though not in Llama.
#
# Positions that start at 0 again say that a row packs several sequences; transformers then makes a mask that keeps
# them apart. Llama, Mistral and Qwen3 give their positions to the functions that make the masks. GPT-OSS does not, so
# a changed token of the first sequence changes every output of the second, without a warning. A window of 4 tokens
# does not stop it. Seen with the implementation eager; GPT-OSS refuses sdpa.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install rest transformers==5.24.0 torch==2.13.0

cat >"$work/probe.py" <<'PY'
import torch
import transformers

transformers.logging.set_verbosity_error()
print(f"transformers {transformers.__version__}")
SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "rope_parameters": ROPE}
IDS = torch.arange(12)[None]
POSITIONS = torch.arange(6).repeat(2)[None]
CHANGED = IDS.clone()
CHANGED[0, 3] = 39

for config, apart in (
    (transformers.LlamaConfig(**SIZES), True),
    (transformers.MistralConfig(**SIZES, sliding_window=4), True),
    (transformers.Qwen3Config(**SIZES), True),
    (transformers.GptOssConfig(**SIZES, **EXPERTS, sliding_window=64), False),
    (transformers.GptOssConfig(**SIZES, **EXPERTS, sliding_window=4), False),
):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.5) if weight.ndim > 1 else None

    def second(ids, positions):
        with torch.no_grad():
            return model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, -6:]

    packed = second(IDS, POSITIONS)
    alone = float((packed - second(IDS[:, 6:], POSITIONS[:, :6])).abs().max())
    moved = int(((packed - second(CHANGED, POSITIONS)).abs().amax(-1) > 1e-4).sum())
    window = getattr(config, "sliding_window", None)
    print(f"{config.model_type}, window {window}: the second sequence differs from its run alone by {alone:.0e}")
    print(f"  a token of the first sequence changes {moved} of its 6 outputs")
    assert (alone < 1e-4 and moved == 0) if apart else (alone > 0.01 and moved > 0)
PY

PYTHONPATH="$work/rest" python3 "$work/probe.py"
