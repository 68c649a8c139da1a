#!/usr/bin/env bash
# In transformers' configurations of models with latents (MLA), head_dim is whatever each model's author meant.
#
# Seen in 5.24.0. A query's head is qk_nope_head_dim + qk_rope_head_dim wide. head_dim is:
# - deepseek_v3: 64, the rotated part of 192 alone;
# - mistral4: 128, the whole of 128; but mistral_large4: 64, the rotated part of its 128;
# - glm5_next: 0, the rotated part, for heads of 256;
# - deepseek_v4: 512, the latent itself.
# A kernel or a KV cache that is sized by head_dim, as for other models, is wrong by a factor of three or has no width.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install rest transformers==5.24.0

cat >"$work/probe.py" <<'PY'
import logging

import transformers

transformers.logging.set_verbosity(logging.ERROR)
print(f"transformers {transformers.__version__}")
for model, head_dim, width in (
    ("deepseek_v3", 64, 192),
    ("mistral4", 128, 128),
    ("mistral_large4", 64, 128),
    ("glm5_next", 0, 256),
    ("deepseek_v4", 512, None),
):
    config = transformers.CONFIG_MAPPING[model]().get_text_config()
    seen = getattr(config, "qk_nope_head_dim", None), config.qk_rope_head_dim
    print(f"{model}: head_dim {config.head_dim}, qk_nope_head_dim {seen[0]}, qk_rope_head_dim {seen[1]}")
    assert config.head_dim == head_dim, f"expected head_dim {head_dim}"
    assert width is None or sum(seen) == width, f"expected heads of {width}"
PY

PYTHONPATH="$work/rest" python3 "$work/probe.py"
