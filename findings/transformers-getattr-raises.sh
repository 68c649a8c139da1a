#!/usr/bin/env bash
# getattr(config, "head_dim", None) raises for Gemma 4 in transformers 5.24.0.
#
# Its layers have two head sizes (256 and 512), so the configuration refuses one answer. But it raises a RuntimeError
# and no AttributeError: hasattr raises too, and a default value does not help. config.to_dict() still says 256, which is
# wrong for every sixth layer. Code that asks "does this configuration have a head_dim?" before it picks an attention
# backend stops there.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install rest transformers==5.24.0

cat >"$work/probe.py" <<'PY'
import logging

import transformers

transformers.logging.set_verbosity(logging.ERROR)
config = transformers.CONFIG_MAPPING["gemma4_text"]()
print(f"transformers {transformers.__version__}")
for name, ask in (
    ("getattr with a default", lambda: getattr(config, "head_dim", None)),
    ("hasattr", lambda: hasattr(config, "head_dim")),
):
    try:
        raise SystemExit(f"{name} answers {ask()}")
    except RuntimeError as error:
        print(f"{name}: {type(error).__name__}: {str(error).split('.')[0]}.")
        assert "per-layer" in str(error)
layers = [config.per_layer_config[layer].head_dim for layer in range(6)]
print(f"to_dict: {config.to_dict()['head_dim']}; layer by layer: {layers}")
assert config.to_dict()["head_dim"] == 256
assert layers == [256] * 5 + [512]
PY

PYTHONPATH="$work/rest" python3 "$work/probe.py"
