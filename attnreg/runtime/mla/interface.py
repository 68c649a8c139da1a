"""The contract (version 1) of MLA: what a layer computes, the two forms that kernels compute it in, and who owns what.

**Numbers.** A token has a latent c of ``kv_lora_rank`` elements, after its norm, and one rotary part r of
``qk_rope_head_dim`` elements, rotated already. ``kv_b_proj`` [num_heads * (qk_nope_head_dim + v_head_dim),
kv_lora_rank] is the weight of a model's layer of that name. For each head it holds W_UK [qk_nope_head_dim,
kv_lora_rank] and below it W_UV [v_head_dim, kv_lora_rank]. The key of a head is ``[W_UK c, r]``, its value ``W_UV c``.
A query of a head is ``[q_nope, q_rope]``, rotated already. Scores, mask, softmax, output and lse are those of
`attnreg.runtime.interface`. The default ``softmax_scale`` is ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``; models
with YaRN multiply it. The output of a head has ``v_head_dim`` elements.

**Two forms.** Both are attention by the contract of `attnreg.runtime.interface`, so a kernel module of MLA has that
contract's functions and no others. Both forms have the same scores and the same lse. So parts of one request's keys may
be computed in different forms and merged.

- *Latent* (`MLASpec.latent`), for generated tokens. The query of a head is ``[W_UK' q_nope, q_rope]``, of
  ``kv_lora_rank + qk_rope_head_dim`` elements: ``q_nope`` is absorbed into W_UK. There is one KV head: the key
  ``[c, r]``, the value ``c``, both read from the cache. A head's output has ``kv_lora_rank`` elements, and the layer
  multiplies it by W_UV. A kernel of this form serves any number of queries.
- *Expanded* (`MLASpec.expanded`), for prompts. kv_b_proj makes keys and values of every head: ``num_heads`` KV heads,
  keys of ``qk_nope_head_dim + qk_rope_head_dim`` and values of ``v_head_dim``; packed, without a cache. The context,
  which is in the cache, is read, dequantised and expanded in chunks. New tokens attend to each other, as the batch is
  causal or not, and to each chunk without a mask; the results are merged by their lse.

Rounding: absorbed queries, latent outputs, expanded keys and values, and each merged result are in ``dtype``. Prompts
see their own new tokens unrounded, as the caller passes them; other tokens are seen as the cache holds them.

**The cache** is one tensor [num_blocks, block_size, width] for all heads (`latent_cache_shape`); dimension 2 is
contiguous, other strides are free. Its rows hold

- ``[c, r]`` in ``dtype``, or ``[c, r] / kv_scale`` in an 8-bit format, rounded as the other contract says; or
- 656 bytes of ``fp8_ds_mla`` (`attnreg.runtime.latents`), which has no kv_scale.

Kernels get two views of it (`as_kv_cache`). The kernel module of the latent form writes it, by ``write_kv``.

**Sparse** MLA (`AttentionSpec.sparse`) is the latent form over chosen tokens. A call has ``indices`` [tokens, topk]
int32: for each query the positions of the keys that it attends to, in any order, and -1 for none. A position counts
from its request's first key, whatever block that is in. Of these keys, a query sees those that it would see in dense
MLA. Two kinds of indices are wrong: a position that the query does not see, and one that is given twice. For a batch in
host memory, or with ``ATTNREG_DEBUG=1``, `BatchError` refuses both. Otherwise the first contributes nothing, and the
second counts as often as it is given. `attnreg.runtime.mla.indexer` chooses tokens. A query without a key has the
output zero and the lse -inf.

**The batch** is `BatchMetadata`, with a block table; ``seq_lens`` count this step's tokens, whose latents ``forward``
writes first. Requests may stand in any order. Requests of up to ``decode_queries`` queries are computed in the latent
form and the others expanded. If the layer has no backend for prompts, all are computed in the latent form.
``query_start_loc_cpu`` decides which requests are which. A replay of a CUDA graph may have other requests, so a
captured call computes all in the latent form, which serves any number of queries.

**Memory.** The caller owns queries, latents, the cache and the output, which may be uninitialised; rows past
``query_start_loc[-1]`` are padding. Each call allocates absorbed queries and latent outputs on its stream. Expanded
context lies in a workspace of bounded size, uninitialised too. No step reads memory that the same call has not written:
a token without context is copied from its own part, not merged with an empty one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnreg.runtime import latents
from attnreg.runtime.interface import KVCache
from attnreg.runtime.spec import AttentionSpec, SpecError
from attnreg.runtime.tensors import tensor_problems

if TYPE_CHECKING:
    from typing import Self

    from attnreg.request import AttentionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """The constants of one MLA layer: ``latent`` is its attention in the latent form, the rest its dimensions.

    ``expanded_features`` are the features that the request for the backend of prompts has. Raises `SpecError`.
    """

    latent: AttentionSpec
    qk_nope_head_dim: int
    v_head_dim: int
    expanded_features: frozenset[str] = frozenset({"lse"})

    def __post_init__(self) -> None:
        if not self.latent.latent:
            raise SpecError("the spec is not for MLA in its latent form")
        for name in ("qk_nope_head_dim", "v_head_dim"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise SpecError(f"{name} is {value!r}; expected an integer of at least 1")

    @classmethod
    def from_request(cls, request: AttentionRequest, latent: AttentionSpec) -> Self:
        """The spec of a layer from its request in the latent form. Raises `SpecError` for missing dimensions."""
        for name in ("qk_nope_head_dim", "v_head_dim"):
            if getattr(request, name) is None:
                raise SpecError(f"{name} is not given; a layer of MLA expands latents by it")
        assert request.qk_nope_head_dim is not None
        assert request.v_head_dim is not None
        rope = request.qk_rope_head_dim
        if rope is not None and rope != latent.head_size - latent.head_size_v:
            raise SpecError(
                f"qk_rope_head_dim is {rope}, and a cached latent of {latent.head_size} with a value of "
                f"{latent.head_size_v} has a rotary part of {latent.head_size - latent.head_size_v}"
            )
        return cls(latent=latent, qk_nope_head_dim=request.qk_nope_head_dim, v_head_dim=request.v_head_dim)

    @property
    def num_heads(self) -> int:
        return self.latent.num_heads

    @property
    def kv_lora_rank(self) -> int:
        return self.latent.head_size_v

    @property
    def qk_rope_head_dim(self) -> int:
        return self.latent.head_size - self.latent.head_size_v

    @property
    def qk_head_dim(self) -> int:
        """The elements of a query, and of an expanded key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def expanded(self) -> AttentionSpec:
        """The attention of this layer in its expanded form, over packed keys."""
        return replace(
            self.latent,
            num_kv_heads=self.num_heads,
            head_size=self.qk_head_dim,
            head_size_v=self.v_head_dim,
            kv_dtype="auto",
            block_size=None,
            features=self.expanded_features,
            latent=False,
            options=(),
        )


class Projections(NamedTuple):
    """The two parts of kv_b_proj, as views: w_uk [num_heads, nope, rank], w_uv [num_heads, v_head_dim, rank]."""

    w_uk: Tensor
    w_uv: Tensor


def weight_problems(spec: MLASpec, kv_b_proj: Any, device: torch.device | None = None) -> Iterator[str]:
    """The problems of a weight [num_heads * (nope + v_head_dim), kv_lora_rank], of any strides, on ``device``."""
    shape = (spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank)
    yield from tensor_problems("kv_b_proj", kv_b_proj, shape, spec.latent.dtype, device=device, dense=False)


def projections(spec: MLASpec, kv_b_proj: Tensor) -> Projections:
    """The parts of a weight [num_heads * (nope + v_head_dim), kv_lora_rank]. Raises `SpecError` if it does not fit."""
    problem = next(weight_problems(spec, kv_b_proj), None)
    if problem is not None:
        raise SpecError(problem)
    return parts_of(spec, kv_b_proj)


def parts_of(spec: MLASpec, kv_b_proj: Tensor) -> Projections:
    """The parts of a weight, not validated, as it is now: between calls it may be loaded or moved."""
    nope, value = spec.qk_nope_head_dim, spec.v_head_dim
    whole = kv_b_proj.view(spec.num_heads, nope + value, spec.kv_lora_rank)
    # Tensor.split is written in Python, and takes several times as long
    return Projections(*whole.split_with_sizes((nope, value), 1))


def latent_cache_shape(spec: AttentionSpec, num_blocks: int) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape [num_blocks, block_size, width] and the dtype of a cache of latents; spec is of the latent form."""
    if spec.block_size is None:
        raise SpecError("block_size is not given; a paged cache needs the tokens per block")
    width = latents.BYTES if spec.kv_dtype == "fp8_ds_mla" else spec.head_size
    return (num_blocks, spec.block_size, width), spec.cache_dtype


def as_kv_cache(spec: AttentionSpec, cache: Tensor) -> KVCache:
    """Two views of a cache of latents, as kernels of the latent form take it: keys, and values that begin each key."""
    key = cache.unsqueeze(2 if spec.kv_layout == "NHD" else 1)
    return KVCache(key, key[..., : spec.head_size_v])


def read_latents(spec: AttentionSpec, rows: Tensor, kv_scale: Tensor | None = None) -> Tensor:
    """Cache rows [..., width], dequantised: ``[c, r]`` [..., kv_lora_rank + rope], in float32 if quantised."""
    if spec.kv_dtype == "fp8_ds_mla":
        return latents.unpacked(rows)
    if not spec.quantised:
        return rows
    return rows.float() if kv_scale is None else rows.float() * kv_scale
