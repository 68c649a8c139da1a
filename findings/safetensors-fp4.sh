#!/usr/bin/env bash
# safetensors reads some of what it writes by one of its two readers alone.
#
# Seen with safetensors 0.8.0 and torch 2.13.0, for float8_e8m0fnu and float4_e2m1fn_x2, the types of MXFP4 and NVFP4
# data and scales: save() writes them, load_file() and safe_open read them, but load() of the very bytes raises KeyError.
# A tensor of two packed numbers an element, of shape (2, 8) in torch, is (2, 16) in the file, and get_slice cannot
# take even whole rows of it: RuntimeError. An engine that gives each GPU its share of rows must read the whole tensor.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install torch torch==2.13.0 safetensors==0.8.0 numpy==2.4.6 packaging

cat >"$work/probe.py" <<'PY'
import sys

import safetensors
import torch
from safetensors.torch import load, load_file, save

print(f"safetensors {safetensors.__version__}, torch {torch.__version__}")
for dtype, name, shape, sliced in (
    (torch.float8_e8m0fnu, "F8_E8M0", [2, 8], "torch.Size([1, 8])"),
    (torch.float4_e2m1fn_x2, "F4", [2, 16], "RuntimeError"),
):
    tensor = torch.arange(16, dtype=torch.uint8).reshape(2, 8).view(dtype)
    written = save({"scale": tensor})
    path = f"{sys.argv[1]}/scale.safetensors"
    with open(path, "wb") as file:
        file.write(written)

    read = load_file(path)["scale"]
    assert read.dtype == dtype and torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))
    try:
        load(written)
        raise SystemExit("load reads it")
    except KeyError as error:
        by_load = repr(error)
    with safetensors.safe_open(path, "pt") as file:
        rows = file.get_slice("scale")
        stated = rows.get_shape()
        try:
            by_slice = str(rows[0:1].shape)
        except RuntimeError as error:
            by_slice = repr(error)
    print(f"{dtype}, shape {tuple(tensor.shape)}: load_file reads it; load: {by_load}")
    print(f"  the file's shape {stated}; get_slice's first row: {by_slice}")
    assert by_load == f"KeyError('{name}')" and stated == shape and sliced in by_slice
PY

PYTHONPATH="$work/torch" python3 "$work/probe.py" "$work"
