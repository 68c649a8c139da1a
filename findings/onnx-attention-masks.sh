#!/usr/bin/env bash
# One ONNX Attention node (opset 23) gives three answers, by the release of onnxruntime.
#
# Seen on the CPU, all keys alike:
# - Scores capped (softcap) in a causal node: the first query sees all four keys up to onnxruntime 1.26.0, since the cap
#   comes after the mask and makes -infinity a small number. From 1.28.0 on it sees one key. onnx's reference
#   evaluator changed in the same way between 1.20.0 and 1.23.2.
# - A row whose keys are all masked: NaN in 1.23.2. In 1.26.0, the mean of all values for a boolean mask, and NaN for
#   -infinity. 0 in 1.28.0, as in PyTorch.
# The operator's definition was corrected in place (onnx/onnx#7865, onnx/onnx#8068), so the opset's number stays.
# An exported model with capped scores computes other tokens after an upgrade of the runtime, from the same file.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

for version in 1.23.2 1.26.0 1.28.0; do
    install "onnxruntime-$version" --no-deps "onnxruntime==$version"
done
install onnx-1.20.0 --no-deps onnx==1.20.0
install onnx-1.23.2 --no-deps onnx==1.23.2
install rest numpy==2.4.6 ml_dtypes==0.6.0 protobuf==7.36.2 flatbuffers==25.12.19

cat >"$work/probe.py" <<'PY'
import math
import sys
import warnings

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

QUERY = np.ones((1, 1, 2, 2), np.float32)
KEY = np.zeros((1, 1, 4, 2), np.float32)
VALUE = np.eye(4, dtype=np.float32)[None, None]
BOOLEAN = np.array([[[[True, True, False, False], [False] * 4]]])
ADDED = np.where(BOOLEAN, np.float32(0), np.float32(-math.inf))


def weights(run, mask=None, **attributes):
    """The weights of the four keys, as one query of the two has them: the first where there is no mask."""
    inputs = {"Q": QUERY, "K": KEY, "V": VALUE} | ({} if mask is None else {"M": mask})
    node = helper.make_node("Attention", list(inputs), ["Y"], **attributes)
    types = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in inputs.items()
    ]
    answer = helper.make_tensor_value_info("Y", TensorProto.FLOAT, [1, 1, 2, 4])
    graph = helper.make_graph([node], "attention", types, [answer])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.checker.check_model(model)
    return [round(float(weight), 3) for weight in run(model, inputs)[0, 0, 0 if mask is None else 1]]


def by_runtime(model, inputs):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


def by_reference(model, inputs):
    return ReferenceEvaluator(model).run(None, inputs)[0]


warnings.simplefilter("ignore", RuntimeWarning)
name, run = {
    "onnxruntime": (f"onnxruntime {onnxruntime.__version__}", by_runtime),
    "reference": (f"onnx {onnx.__version__}'s reference", by_reference),
}[sys.argv[1]]
seen = {
    "capped and causal, first query": weights(run, softcap=2.0, is_causal=1),
    "all masked, boolean": weights(run, BOOLEAN),
    "all masked, -infinity": weights(run, ADDED),
}
for case, answer in seen.items():
    print(f"{name}, {case}: {answer}")
leak, first, nan = [0.711, 0.096, 0.096, 0.096], [1.0, 0.0, 0.0, 0.0], [math.nan] * 4
expected = {
    "onnxruntime 1.23.2": [leak, nan, nan],
    "onnxruntime 1.26.0": [leak, [0.25] * 4, nan],
    "onnxruntime 1.28.0": [first, [0.0] * 4, [0.0] * 4],
    "onnx 1.20.0's reference": [leak, nan, nan],
    "onnx 1.23.2's reference": [first, [0.0] * 4, [0.0] * 4],
}[name]
assert str(list(seen.values())) == str(expected), f"expected {expected}"
PY

for version in 1.23.2 1.26.0 1.28.0; do
    PYTHONPATH="$work/onnxruntime-$version:$work/onnx-1.23.2:$work/rest" python3 "$work/probe.py" onnxruntime
done
for version in 1.20.0 1.23.2; do
    PYTHONPATH="$work/onnx-$version:$work/onnxruntime-1.28.0:$work/rest" python3 "$work/probe.py" reference
done
