"""The largest errors that a correct kernel may have. They follow from formats and lengths, not from any kernel.

The error model fits every attention kernel of the field. In it u is the unit roundoff of the layer's dtype, and r
that of float32. D is the head size, and S the number of keys of a row.

- a score is a float32 sum of D products, scaled, capped and biased: it is off by at most
  ``E = (D + C) * r * abs_score + C * r * softcap``. C covers the elementary functions and the few operations around
  them: exp, tanh and log are accurate to 20 units in the last place or better in the libraries in use;
- a weight is the exp of a score, so it is off by the factor ``exp(2 * E)`` (for its own score and for the denominator).
  It is rounded to the dtype before the product with the values. The error is u, but at least half the smallest number
  of the dtype. It is also at least the smallest normal number of float32, because GPUs may flush smaller ones to zero.
  With a cache of 8-bit numbers or of codes, products may use float16. It holds the cached numbers exactly, but no
  weight below its own smallest number;
- the denominator and the output are float32 sums of S terms, rescaled as the maximum moves: ``(2 * S + C) * r``;
- if the cache has another dtype, a cached key or value is multiplied by a scale and rounded to the layer's dtype. The
  error is u for the keys, which is ``u * abs_score`` for a score, and u for the values;
- the levels of a packed cache, and queries that are rotated with its keys, are rounded to the dtype: u;
- the output is rounded to the dtype: u;
- an output that is merged from parts has the error of each part and of its weight, which the LSE gives. Every merge
  rounds it: ``M * (u + exp(2 * L) - 1)`` for M merges, with L the error of an LSE.

Errors are relative to sums of absolute values, which the reference returns. Kernels that round inputs further (TF32 for
float32, fp8 for queries) exceed these bounds, and should.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnreg.kernels.reference import Reference
from attnreg.runtime.interface import AttentionSpec, BatchMetadata

ROUNDOFF = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
    torch.float8_e4m3fnuz: 2.0**-4,
    torch.float8_e5m2fnuz: 2.0**-3,
}
# exp, tanh or log at 20 units in the last place each, twice, and the operations around them
OPERATIONS = 64


def bounds(
    spec: AttentionSpec,
    batch: BatchMetadata,
    exact: Reference,
    largest_value: float,
    out_scale: float = 1.0,
    merges: int = 0,
) -> tuple[Tensor, Tensor]:
    """The largest errors of output and LSE that rounding explains, in the reference's shapes, float64.

    largest_value: the largest absolute element of the values, dequantised. out_scale: the scale of an output in 8 bits.
    merges: the number of times that a row is merged with the state of further keys.
    """
    u, r = ROUNDOFF[spec.dtype], ROUNDOFF[torch.float32]
    # a key or value in another format is rounded again before the product
    converted = u if spec.block_size is not None and spec.cache_dtype != spec.dtype else 0.0
    rotated = u if spec.packed is not None and spec.packed.keys.code == "levels" else 0.0
    queries = batch.query_start_loc.diff()
    keys = batch.seq_lens.double().repeat_interleave(queries)  # [num_tokens]

    score = ((spec.head_size + OPERATIONS) * r + converted + rotated) * exact.abs_score
    score = score + OPERATIONS * r * (spec.softcap or 0.0)
    # the sink is exact, and it is part of the sum
    summed = (2 * keys + OPERATIONS) * r
    lse = score + summed + 4 * r * exact.lse.abs().nan_to_num(posinf=0.0)

    weight = torch.expm1(2 * score) + u + summed + converted  # [num_heads, num_tokens]
    narrow = spec.block_size is not None and spec.cache_dtype.itemsize == 1 and spec.dtype != torch.float32
    product = torch.float16 if narrow else spec.dtype
    smallest = max(torch.finfo(product).smallest_normal * ROUNDOFF[product], torch.finfo(torch.float32).smallest_normal)
    floor = smallest * (keys * largest_value + 1)
    output = weight.mT[..., None] * exact.abs_output + u * exact.output.abs() + floor[:, None, None]
    if merges:
        lse = lse + merges * (lse + OPERATIONS * r)
        output = output + merges * (u + torch.expm1(2 * lse)).mT[..., None] * exact.abs_output
        output = output + merges * floor[:, None, None]
    if spec.output_dtype != spec.dtype:
        # the rounding of a result with this error
        u = ROUNDOFF[spec.output_dtype]
        smallest = torch.finfo(spec.output_dtype).smallest_normal * u * out_scale
        output = output + u * (exact.output.abs() + output) + smallest
    return output, lse
