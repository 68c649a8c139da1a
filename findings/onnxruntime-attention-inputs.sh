#!/usr/bin/env bash
# onnxruntime 1.32.0 refuses masks that ONNX's Attention allows, and drops is_causal for one query over a cache.
#
# Seen on the CPU, beside the reference evaluator of onnx 1.23.2, with nodes of opset 24:
# - The definition asks for a mask that can be broadcast to [batch, heads, queries, keys], or is shorter in keys.
#   onnxruntime wants the counts of queries and keys themselves: a padding mask [batch, 1, 1, keys] raises for three
#   queries when the node runs, as do [1, keys] and a shorter mask. The reference computes each.
# - A causal query of three new keys after a cache of two sees the first three of the five, as the definition says. In
#   onnxruntime it sees all five. Without a cache, or with two queries, both agree.
# A model that onnx checks and computes raises in service, or reads the keys of later tokens.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --root-user-action ignore --target "$work/$1" "${@:2}"; }

install runtime --no-deps onnxruntime==1.32.0 onnx==1.23.2
install rest numpy==2.4.6 ml_dtypes==0.7.0 protobuf==7.36.2 flatbuffers==25.12.19

cat >"$work/probe.py" <<'PY'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

onnxruntime.set_default_logger_severity(4)
print(f"onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}")


def both(inputs, shape, outputs=("Y",), **attributes):
    """The outputs of both, or the message of an error. Absent inputs are None."""
    node = helper.make_node("Attention", [n if v is not None else "" for n, v in inputs.items()], outputs, **attributes)
    fed = {name: value for name, value in inputs.items() if value is not None}
    types = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in fed.items()
    ]
    shapes = dict(zip(outputs, (shape, ["b", "h", "k", "d"], ["b", "h", "k", "v"])))
    answers = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name]) for name in outputs]
    graph = helper.make_graph([node], "attention", types, answers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    try:
        seen = session.run(None, fed)[0]
    except Exception as error:
        seen = str(error).strip().rsplit("was false. ")[-1]
    return seen, ReferenceEvaluator(model).run(None, fed)[0]


numbers = np.random.default_rng(0)
BATCH, QUERIES, KEYS, SIZE = 2, 3, 5, 4
query, key, value = (numbers.standard_normal((BATCH, 1, n, SIZE)).astype("f") for n in (QUERIES, KEYS, KEYS))


def exact(mask):
    whole = np.ones((*mask.shape[:-1], KEYS), bool)
    whole[..., : mask.shape[-1]] = mask
    whole[..., mask.shape[-1] :] = False
    scores = query.astype("d") @ key.astype("d").swapaxes(-1, -2) * SIZE**-0.5
    weights = np.exp(np.where(whole, scores, -np.inf))
    return weights / weights.sum(-1, keepdims=True) @ value.astype("d")


for shape, taken in (
    ((BATCH, 1, QUERIES, KEYS), True),
    ((QUERIES, KEYS), True),
    ((BATCH, 1, 1, KEYS), False),
    ((1, KEYS), False),
    ((QUERIES, KEYS - 1), False),
):
    mask = numbers.random(shape) > 0.4
    mask[..., 0] = True
    seen, reference = both({"Q": query, "K": key, "V": value, "M": mask}, query.shape)
    right = np.allclose(reference, exact(mask), atol=1e-5)
    assert right
    print(f"a mask {shape}: the reference is right; onnxruntime:", "the same" if taken else seen)
    assert np.allclose(seen, reference, atol=1e-5) if taken else "inconsistent" in seen

CASES = ((1, 3, 2, True), (1, 2, 4, True), (2, 3, 2, False), (1, 1, 4, False), (1, 3, 0, False))
for queries, new, past, apart in CASES:
    keys = new + past
    values = np.eye(keys, dtype="f")[None, None]
    query, key, cache = (np.zeros((1, 1, n, keys), "f") for n in (queries, new, past))
    inputs, outputs = {"Q": query, "K": key, "V": values[:, :, past:]}, ("Y",)
    if past:
        inputs |= {"M": None, "PK": cache, "PV": values[:, :, :past]}
        outputs = ("Y", "NK", "NV")
    seen, reference = both(inputs, [1, 1, queries, keys], outputs, is_causal=1)
    counts = [(answer[0, 0] > 0).sum(-1).tolist() for answer in (reference, seen)]
    print(f"causal, queries {queries}, new keys {new}, cached {past}: seen {counts[0]}, in onnxruntime {counts[1]}")
    assert counts[0] == [past + number + 1 for number in range(queries)]
    assert counts[1] == ([keys] if apart else counts[0])
PY

PYTHONPATH="$work/runtime:$work/rest" python3 "$work/probe.py"
