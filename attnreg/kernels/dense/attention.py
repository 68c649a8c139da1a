"""Dense attention, piece by piece, by PyTorch's scaled_dot_product_attention or over whole score matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from attnreg.kernels.dense.cache import gather
from attnreg.kernels.dense.pieces import DensePiece, DensePlan
from attnreg.runtime.dense import attend_by_scores, attend_by_sdpa, keep_nan, scores_of
from attnreg.runtime.interface import AttentionSpec, Call


def by_sdpa(spec: AttentionSpec, plan: DensePlan, call: Call) -> None:
    """Attention by PyTorch's scaled_dot_product_attention, which has no softcap, sinks or LSE."""
    for piece in plan.pieces:
        query, (key, value) = call.query[piece.rows], gather(spec, piece.places, call)
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        mask = _sdpa_mask(piece, call.params.alibi_slopes)
        if q.is_cuda and call.params.alibi_slopes is not None:
            # CUDA's kernels refuse or misread a float32 bias beside 16-bit queries
            q, k, v = q.float(), k.float(), v.float()
        out = attend_by_sdpa(q, k, v, mask=mask, causal=piece.causal and mask is None, scale=spec.softmax_scale)
        out = keep_nan(out, q).transpose(1, 2).to(query.dtype)
        call.output[piece.rows] = _zero_where_keyless(piece, out)
    fill_empty(plan.empty, call)


def by_scores(spec: AttentionSpec, plan: DensePlan, call: Call) -> None:
    """Attention with every feature of the contract, in float32, with all scores of a piece in memory."""
    params = call.params
    for piece in plan.pieces:
        q, k, v = (x.transpose(1, 2) for x in (call.query[piece.rows], *gather(spec, piece.places, call)))
        scores = scores_of(q, k, scale=spec.softmax_scale, softcap=spec.softcap)
        if params.alibi_slopes is not None:
            scores -= _alibi(piece, params.alibi_slopes)
        if piece.visible is not None:
            scores.masked_fill_(~piece.visible[:, None], -torch.inf)
        elif piece.causal:
            scores.masked_fill_(_later(scores), -torch.inf)
        if piece.keyless is not None:
            # the LSE of padding is -inf too, because its state may be merged with others
            scores.masked_fill_(piece.keyless[:, None, :, None], -torch.inf)
        out, total = attend_by_scores(scores, v, None if params.sinks is None else params.sinks[:, None])
        call.output[piece.rows] = _zero_where_keyless(piece, out.transpose(1, 2).to(call.output.dtype))
        if call.lse is not None:
            call.lse[:, piece.rows] = total.transpose(0, 1)
    fill_empty(plan.empty, call)


def _zero_where_keyless(piece: DensePiece, out: Tensor) -> Tensor:
    """The output, with zero for queries that see no key: a kernel may multiply masked values, which may be NaN."""
    return out if piece.keyless is None else out.masked_fill(piece.keyless[:, :, None, None], 0)


def _sdpa_mask(piece: DensePiece, slopes: Tensor | None) -> Tensor | None:
    """The mask of a piece for PyTorch's function: bool, or with ALiBi a float32 bias for every head."""
    mask = None if piece.visible is None else piece.visible[:, None]
    if slopes is None:
        return mask
    bias = -_alibi(piece, slopes)
    if piece.causal:
        bias = bias.masked_fill(_later(bias), -torch.inf)
    return bias if mask is None else bias.masked_fill(~mask, -torch.inf)


def _alibi(piece: DensePiece, slopes: Tensor) -> Tensor:
    """The amounts that ALiBi subtracts from the scores, [requests, heads, queries, keys]."""
    assert piece.distance is not None
    # float32 whatever the layer's type: 8 bits of mantissa cannot hold a slope times a distance
    return slopes.float()[:, None, None] * piece.distance[:, None]


def _later(scores: Tensor) -> Tensor:
    """Whether a key comes after a query, [queries, keys] bool."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)


def fill_empty(empty: Tensor, call: Call) -> None:
    """Fills the rows of queries without a key: the output is zero, the LSE is the sink, or -inf without one."""
    if not empty.numel():
        return
    lse, sinks = call.lse, call.params.sinks
    # index_fill_, because indexing with a number copies it to the device while the host waits
    call.output.index_fill_(0, empty, 0)
    if lse is not None and sinks is None:
        lse.index_fill_(1, empty, -torch.inf)
    elif lse is not None and sinks is not None:
        lse.index_copy_(1, empty, sinks.float()[:, None].expand(-1, empty.numel()))
