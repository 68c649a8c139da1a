"""MLA in float64, one request at a time, to be read beside the contract in `attnreg.runtime.mla.interface`.

Keys and values of every head are expanded from the latents, as the contract defines them; no query is absorbed. A
kernel of one form, dense or sparse, is compared with `attnreg.kernels.reference` and that form's spec.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnreg.kernels import reference
from attnreg.kernels.reference import Reference
from attnreg.runtime.interface import BatchMetadata, LayerParams
from attnreg.runtime.mla.interface import MLASpec, as_kv_cache, projections


def attention(
    spec: MLASpec,
    batch: BatchMetadata,
    query: Tensor,
    cache: Tensor,
    kv_b_proj: Tensor,
    *,
    kv_scale: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
    decode_queries: int = 1,
) -> Reference:
    """The exact output of a layer for queries [tokens, num_heads, qk_head_dim], on their device.

    cache: [num_blocks, block_size, width]; it holds the batch's own tokens too. new: the unrounded latents [tokens,
    kv_lora_rank] and rotary parts of the batch's tokens. Prompts (more than ``decode_queries`` queries) see these of
    their own tokens. None: they see what the cache holds.
    """
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    w_uk, w_uv = (w.double() for w in projections(spec, kv_b_proj))
    params = LayerParams(k_scale=kv_scale, v_scale=kv_scale)
    keys, values = [], []
    for i, length in enumerate(lengths):
        stored, _ = reference.request_kv(spec.latent, batch, i, as_kv_cache(spec.latent, cache), None, None, params)
        tokens = stored[0]  # [keys, kv_lora_rank + rope]
        queries = starts[i + 1] - starts[i]
        if new is not None and queries > decode_queries:
            own = torch.cat([x[starts[i] : starts[i + 1]].double() for x in new], -1)
            tokens = torch.cat([tokens[: length - queries], own])
        c, r = torch.split(tokens, [spec.kv_lora_rank, spec.qk_rope_head_dim], -1)
        k_nope = torch.einsum("tc,hnc->thn", c, w_uk)
        keys.append(torch.cat([k_nope, r[:, None].expand(-1, spec.num_heads, -1)], -1))
        values.append(torch.einsum("tc,hvc->thv", c, w_uv))
    packed = replace(
        batch,
        block_table=None,
        slot_mapping=None,
        key_start_loc=torch.tensor([0, *lengths], device=query.device).cumsum(0).int(),
    )
    return reference.attention(spec.expanded, packed, query, key=torch.cat(keys), value=torch.cat(values))
