#!/usr/bin/env bash
# torch gives a zero or negative scale an exponent in float8_e8m0fnu, and ml_dtypes makes it NaN.
#
# The type is an exponent alone, without a zero or a sign; it is the scale of a block in the MX formats. torch 2.13.0
# makes 2^-127 of 0, and 4 of -3, without a word. ml_dtypes 0.6.0 (which JAX and onnx use) makes NaN of both. So the
# scale of an all-zero block of a KV cache, computed as its largest absolute number, gives zeros in one and NaN in the
# other, and a scale's wrong sign is not seen in torch.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install torch torch==2.13.0 ml_dtypes==0.6.0 numpy==2.4.6

cat >"$work/probe.py" <<'PY'
import math

import ml_dtypes
import numpy as np
import torch

scales = torch.tensor([0.0, -3.0, 3.0])
by_torch = scales.to(torch.float8_e8m0fnu).float().tolist()
by_ml_dtypes = scales.numpy().astype(ml_dtypes.float8_e8m0fnu).astype(np.float32).tolist()
print(f"scales {scales.tolist()}")
print(f"torch {torch.__version__}: {by_torch}")
print(f"ml_dtypes {ml_dtypes.__version__}: {by_ml_dtypes}")
assert by_torch == [2.0**-127, 4.0, 4.0], "torch answers in another way"
assert str(by_ml_dtypes) == str([math.nan, math.nan, 4.0]), "ml_dtypes answers in another way"
PY

PYTHONPATH="$work/torch" python3 "$work/probe.py"
