"""Small calls of MLA with every tensor that an engine can hand over, for the walk of `support.layers.walk`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnreg
from attnreg import AttentionRequest, BatchMetadata, MLAAttention, Platform, Registry, ops
from attnreg.kernels import reference
from attnreg.kernels.mla import reference as mla_reference
from attnreg.runtime.interface import KVCache, LayerParams
from attnreg.runtime.layer import Attention
from attnreg.runtime.mla.indexer import choose_tokens
from attnreg.runtime.mla.interface import as_kv_cache
from attnreg.runtime.mla.prompts import ExpandedPrompts
from support.layers.walk import REFUSALS, Made, bytes_of

HEADS, RANK, ROPE, NOPE, WIDTH, BLOCK, TOPK = 4, 64, 16, 32, 16, 16, 5
QUERIES, KEYS = (3, 1, 0, 5), (20, 17, 4, 37)
# rows on a processor, and those of a GPU in Triton's interpreter
CPU, HOPPER = Platform(platform="cpu", arch="x86_64"), Platform(platform="cuda", arch="sm90")
ROWS = {"torch": (CPU, "TORCH_MLA", "TORCH_PREFILL"), "triton": (HOPPER, "TRITON_MLA", "TRITON_PREFILL")}
SPARSE = {"torch": "TORCH_MLA_SPARSE", "triton": "TRITON_MLA_SPARSE"}
BATCH = ("query_start_loc", "seq_lens", "query_start_loc_cpu", "seq_lens_cpu", "block_table", "slot_mapping", "causal")
LAYER = ("query", "latent", "rope", "kv_cache", "output", "lse", "kv_b_proj", "kv_scale")
# the public calls, and the tensors of each beside those of its batch
CALLS = {
    "layer": LAYER, "op": LAYER, "prompts": LAYER, "attend": ("query", "kv_cache", "output", "lse", "kv_scale"),
    "sparse": ("query", "kv_cache", "output", "lse", "indices", "kv_scale"),
    "write": ("latent", "rope", "kv_cache", "kv_scale"), "indexer": ("index_query", "index_weights", "index_keys"),
}  # fmt: skip


def tensors(kind: str, *, quantised: bool) -> dict[str, Tensor]:
    """The tensors of a call, by name."""
    draw = torch.Generator().manual_seed(7)
    # TRITON_MLA computes no float32
    dtype = torch.float16

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    def integers(*values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    rows = sum(QUERIES)
    starts, lengths = integers(0, *torch.tensor(QUERIES).cumsum(0).tolist()), integers(*KEYS)
    table = integers([5, 2, 9], [1, 7, 9], [3, 9, 9], [0, 4, 6])
    slots = [int(table[i, t // BLOCK]) * BLOCK + t % BLOCK
             for i, (q, k) in enumerate(zip(QUERIES, KEYS, strict=True)) for t in range(k - q, k)]  # fmt: skip
    given = {
        "latent": normal(rows, RANK), "rope": normal(rows, ROPE), "kv_cache": normal(10, BLOCK, RANK + ROPE),
        "query_start_loc": starts, "seq_lens": lengths, "query_start_loc_cpu": starts.clone(),
        "seq_lens_cpu": lengths.clone(), "block_table": table, "slot_mapping": torch.tensor(slots),
        "causal": torch.tensor([True, False, True, True]),
        "lse": torch.full((HEADS, rows), 7.0),
    }  # fmt: skip
    latent = kind in ("attend", "sparse")
    given["query"] = normal(rows, HEADS, RANK + ROPE if latent else NOPE + ROPE)
    given["output"] = torch.full((rows, HEADS, RANK if latent else WIDTH), 7.0).to(dtype)
    given["kv_b_proj"] = normal(HEADS * (NOPE + WIDTH), RANK) * 0.1
    if quantised:
        given["kv_cache"] = given["kv_cache"].to(torch.float8_e4m3fn)
        given["kv_scale"] = torch.tensor([0.7])
    if kind == "sparse":
        given["indices"] = torch.full((rows, TOPK), -1, dtype=torch.int32)
        for row, (request, end) in enumerate(_ends(causal=[True, False, True, True])):
            some = torch.randperm(end, generator=draw)[: (row + request) % (TOPK + 1)]
            given["indices"][row, : len(some)] = some
    if kind == "indexer":
        given["index_query"], given["index_keys"] = normal(rows, 2, 32), normal(10, BLOCK, 32)
        given["index_weights"] = normal(rows, 2)
    if kind != "sparse":
        del given["causal"]
    return {name: x for name, x in given.items() if name in (*CALLS[kind], *BATCH)}


def _ends(causal: list[bool]) -> list[tuple[int, int]]:
    """The request of each row, and the number of keys that it sees."""
    return [(i, k - q + j + 1 if causal[i] else k)
            for i, (q, k) in enumerate(zip(QUERIES, KEYS, strict=True)) for j in range(q)]  # fmt: skip


def call(rows: str, kind: str, registry: Registry, given: dict[str, Any], *, quantised: bool) -> Made:
    """The outcome of a call with these tensors, which may be odd; a call that is refused may not have written."""
    watched = [x for x in given.values() if isinstance(x, Tensor)]
    before = [bytes_of(x) for x in watched]
    try:
        return _call(rows, kind, registry, given, quantised)
    except REFUSALS as refusal:
        return Made(None, None, refusal, [bytes_of(x) for x in watched] != before)


def _call(rows: str, kind: str, registry: Registry, given: dict[str, Any], quantised: bool) -> Made:
    platform, decode, prefill = ROWS[rows]
    features = {"lse"} | ({"causal_by_request", "non_causal"} if kind == "sparse" else set())
    request = AttentionRequest(
        attention="mla_sparse" if kind == "sparse" else "mla", phase="decode", head_size=RANK + ROPE, head_size_v=RANK,
        num_heads=HEADS, num_kv_heads=1, block_size=BLOCK, kv_lora_rank=RANK, qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE, v_head_dim=WIDTH, dtype="float16", kv_dtype="fp8_e4m3" if quantised else "auto",
        features=features,
    )  # fmt: skip
    name = SPARSE[rows] if kind == "sparse" else decode
    selection = attnreg.select(request, platform, registry, name)
    batch = BatchMetadata(max_query_len=5, max_seq_len=37, **{n: given[n] for n in BATCH if n in given})
    scale, cache = given.get("kv_scale"), given.get("kv_cache")
    if kind == "indexer":
        query, weights, keys = (given[name] for name in CALLS["indexer"])
        found = choose_tokens(query, weights, keys, batch, topk=TOPK, scale=0.2)
        return Made(found.float(), _best(batch, query, weights, keys), None, True)
    if kind in ("attend", "sparse", "write"):
        layer = Attention.from_selection(selection, softmax_scale=0.1, k_scale=scale)
        strided = isinstance(cache, Tensor) and cache.layout is torch.strided and cache.ndim == 3
        views = as_kv_cache(layer.spec, cache) if strided else (cache, cache)
        if kind == "write":
            latent, rope = (x[:, None] if isinstance(x, Tensor) and x.ndim == 2 else x
                            for x in (given["latent"], given["rope"]))  # fmt: skip
            stored = cache.float() if isinstance(cache, Tensor) and cache.layout is torch.strided else None
            layer.write_kv(latent, rope, KVCache(*views), batch)
            return Made(cache.float(), _stored(given, stored, scale), None, True)
        indices = {"indices": given["indices"]} if kind == "sparse" else {}
        layer.attend(given["query"], KVCache(*views), batch, given["output"], lse=given["lse"], **indices)
        params = LayerParams(k_scale=layer.params.k_scale, v_scale=layer.params.v_scale)
        exact = reference.attention(layer.spec, batch, given["query"], KVCache(*views), params=params, **indices)
        return Made(given["output"], exact.output, None, True)
    select = attnreg.select(request.expanded(), platform, registry, prefill)
    mla = MLAAttention(
        selection, select, kv_b_proj=given["kv_b_proj"], kv_scale=scale, softmax_scale=0.1, workspace_tokens=16
    )
    query, latent, rope, output, lse = (given[name] for name in ("query", "latent", "rope", "output", "lse"))
    new: Any = (latent, rope)
    if kind == "op":
        ops.register_mla(mla, f"walked {id(mla)}")
        with ops.forward_context(batch):
            ops.unified_mla_attention_with_output(query, latent, rope, cache, output, mla.name, lse=lse)
    elif kind == "layer":
        mla(query, latent, rope, cache, batch, output, lse=lse)
    else:
        prompts = ExpandedPrompts(
            mla.spec,
            mla.prefill.module,
            given["kv_b_proj"],
            kv_scale=mla.decode.params.k_scale,
            workspace_tokens=16,  # type: ignore[union-attr]
        )
        prompts(query, latent, rope, cache, batch, output, lse=lse)
    exact = mla_reference.attention(
        mla.spec, batch, query, cache, given["kv_b_proj"], kv_scale=mla.decode.params.k_scale, new=new,
        decode_queries=0 if kind == "prompts" else 1,
    )  # fmt: skip
    if lse is None or output is None:
        return Made(exact.output if output is None else output, exact.output, None, True)
    both = torch.cat([output.float(), lse.T[..., None]], -1)
    return Made(both, torch.cat([exact.output, exact.lse.T[..., None]], -1), None, True)


def _stored(given: dict[str, Any], before: Tensor, scale: Tensor | None) -> Tensor:
    """The numbers of a cache after the new latents were written to it."""
    new = torch.cat([given["latent"], given["rope"]], -1).float()
    new = new if scale is None else new / scale
    slots = given["slot_mapping"]
    before.view(-1, RANK + ROPE)[slots] = new[: len(slots)].to(given["kv_cache"].dtype).float()
    return before.double()


def _best(batch: BatchMetadata, query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """What the indexer chooses, query by query."""
    found = torch.full((query.shape[0], TOPK), -1.0, dtype=torch.float64)
    assert batch.block_table is not None
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    for i, length in enumerate(lengths):
        table = batch.block_table[i].tolist()
        key = [keys[table[t // BLOCK], t % BLOCK].double() for t in range(length)]
        for row in range(starts[i], starts[i + 1]):
            end = length - starts[i + 1] + row + 1
            scores = [float((weights[row].double() * (query[row].double() @ k * 0.2).relu()).sum()) for k in key[:end]]
            order = sorted(range(end), key=lambda t: (-scores[t], t))[:TOPK]
            found[row, : len(order)] = torch.tensor(order, dtype=torch.float64)
    return found
