"""Trials: the layer, the batch and the tensors of a case, with lengths around the edges of blocks, and poison."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from attnreg.runtime.interface import DTYPES, AttentionSpec, BatchMetadata, KVCache, LayerParams, Layout
from attnreg.runtime.layer import Attention
from attnreg.runtime.sparse.indices import ends_of, rows_of
from attnreg.selection.wording import request_words

if TYPE_CHECKING:
    from attnreg.request import AttentionRequest
    from attnreg.selection.trace import Selection

LENGTHS = ("mixed", "decode", "prefill", "chunked", "single")
# `long` has lengths for several steps of a kernel's loop; an interpreter would take minutes for it
ON_GPU = (*LENGTHS, "long")
# layouts of a cache; `fused`: two views of one tensor; `packed`: no cache; `latents`: MLA prompts with cached context
STORAGES = ("NHD", "HND", "SPLIT", "fused", "packed", "latents")
# the byte in unused latents of fp8_ds_mla and in unused rows of a packed cache: NaN in each of their types
UNUSED = 0xFF
# the number of rows of query, key and value after those of the batch
PADDING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layer and one batch: ``lengths`` of `ON_GPU`, ``storage`` of `STORAGES` (fused: two views of one tensor)."""

    request: AttentionRequest
    lengths: str
    storage: str

    @property
    def layout(self) -> Layout:
        """The layout of the cache, in a spec's words."""
        return "NHD" if self.storage in ("fused", "packed", "latents") else self.storage  # type: ignore[return-value]

    @property
    def words(self) -> str:
        """The case as text."""
        return " · ".join([*request_words(self.request), self.storage, self.lengths])

    @property
    def seed(self) -> str:
        """The text that seeds its random numbers: equal in every run, and independent of the wording of requests."""
        r = self.request
        sizes = f"h{r.num_heads}/{r.num_kv_heads}-d{r.head_size}" + (f"/{r.head_size_v}" if r.head_size_v else "")
        words = [
            *([r.attention] if r.attention != "mha" else []),
            r.attn_type,
            r.dtype,
            f"kv_{r.kv_dtype}",
            f"b{r.block_size}",
            sizes,
            self.storage,
            self.lengths,
        ]
        return "-".join([*words, *sorted(r.features)])


class TrialLayer(Protocol):
    """The part of a layer's interface that a trial uses; `Attention` has it."""

    @property
    def spec(self) -> AttentionSpec: ...

    @property
    def params(self) -> LayerParams: ...

    def new_kv_cache(self, num_blocks: int, device: torch.device | str) -> KVCache: ...

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache, batch: BatchMetadata) -> None: ...

    def attend(
        self,
        query: Tensor,
        kv_cache: KVCache | None,
        batch: BatchMetadata,
        output: Tensor,
        *,
        key: Tensor | None = None,
        value: Tensor | None = None,
        lse: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> None: ...


@dataclass
class Trial:
    """A layer, a batch, and the tensors of one call. Unused rows and slots hold NaN.

    tokens: each request's keys and values before they are stored, [keys, num_kv_heads, head_size(_v)]. indices: for
    sparse MLA the positions that each query attends to. merges: the number of merges that round the output.
    """

    layer: TrialLayer
    batch: BatchMetadata
    query: Tensor
    key: Tensor
    value: Tensor
    cache: KVCache | None
    tokens: list[tuple[Tensor, ...]]
    indices: Tensor | None = None
    merges: int = 0


def lengths_of(pattern: str, block: int, attn_type: str) -> list[tuple[int, int]]:
    """Queries and keys of each request: lengths around the edges of a block, one token, no token."""
    if attn_type == "encoder_decoder":
        # the encoder's length is independent of the queries, and may be 0
        cross = {
            "single": [(1, 1)],
            "decode": [(1, block + 1), (1, 1), (1, 0), (0, 5), (1, 2 * block)],
            "long": [(1, 700), (150, 333), (40, 129), (300, 0)],
        }
        return cross.get(pattern, [(3, 40), (1, block + 1), (0, 0), (5, 2), (2, 0), (37, block)])
    lengths = {
        "single": [(1, 1)],
        "decode": [(1, 1), (1, block), (1, block + 1), (1, 2 * block + 1), (1, 77)],
        "prefill": [(1, 1), (0, 0), (block, block), (block + 1, block + 1), (37, 37)],
        "chunked": [(2, 10), (5, block + 4), (block, 2 * block), (3, 2 * block + 2)],
        "mixed": [(1, 2 * block), (6, 6), (0, 7), (4, block + 4), (1, 1), (0, 0), (19, 83)],
        "long": [(1, 1000), (40, 700), (200, 455), (300, 300), (3, 129)],
    }[pattern]
    return lengths if attn_type == "decoder" else [(q, q) for q, _ in lengths]


class Draw:
    """The random numbers of one case, the same on every device and every processor."""

    def __init__(self, seed: str, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        # the last bits of PyTorch's normal numbers depend on the processor; rounding from float64 drops them
        drawn = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return drawn.float().to(self.device, dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return (low + (high - low) * torch.rand(*shape, generator=self.generator)).to(self.device)

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=self.generator))

    def scales(self, kv_heads: int) -> Tensor:
        """Scales of keys and of values, [2, kv_heads]."""
        return self.uniform(0.05, 0.4, 2, kv_heads)

    def sinks(self, heads: int) -> Tensor:
        return self.normal(heads) + 1

    def slopes(self, heads: int) -> Tensor:
        return self.uniform(0.01, 1, heads)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator)

    def chosen(self, batch: BatchMetadata, block: int) -> Tensor:
        """Some of the keys that each query sees, as indices of sparse MLA: none, some, or as many as fit.

        The number of indices is 1, a few, more than there are keys, or more than a program reads at once. They are in
        any order, with unused entries between them.
        """
        topk = (1, 1, 7, block + 1, 130, 1030)[self.integer(0, 6)]
        ends = ends_of(batch, *rows_of(batch)).tolist()
        rows = torch.full((len(ends) + PADDING, topk), -1, dtype=torch.int32)
        for row, end in zip(rows, ends, strict=False):
            count = (0, min(1, end), min(end, topk), self.integer(0, min(end, topk) + 1))[self.integer(0, 4)]
            row[self.order(topk)[:count]] = self.order(max(end, 0))[:count].int()
        # rows without a query have indices that are not keys
        rows[len(ends) :] = 2**30
        return rows.to(self.device)


def make_layer(
    case: Case,
    selection: Selection,
    device: torch.device,
    *,
    draw: Draw | None = None,
    numbers: Mapping[str, Any] = MappingProxyType({}),
) -> Attention:
    """The layer of a case, with a value for every number that its features need.

    numbers: feature -> its number, for windows, chunks and softcap; missing ones are drawn, and small.
    """
    draw = draw or Draw(case.seed, device)
    features, heads, kv_heads = case.request.features, case.request.num_heads or 1, case.request.num_kv_heads or 1
    scales = draw.scales(kv_heads if "per_head_quant_scales" in features else 1)
    kv_dtype, latent = case.request.kv_dtype or "", case.request.attention in ("mla", "mla_sparse")
    quantised = kv_dtype.startswith("fp8") and kv_dtype != "fp8_ds_mla"
    window = numbers.get("sliding_window") or numbers.get("asymmetric_window") or _window(case, draw)
    return Attention.from_selection(
        selection,
        # a case has no width of expanded keys, so the scale is given
        softmax_scale=case.request.head_size**-0.5 if latent else None,
        sliding_window=window,
        chunk=numbers.get("chunk") or ((3, _block(case), 40)[draw.integer(0, 3)] if "chunk" in features else None),
        softcap=numbers.get("softcap") or (1.5 if "softcap" in features else None),
        sinks=draw.sinks(heads).to(DTYPES[case.request.dtype]) if "sinks" in features else None,
        alibi_slopes=draw.slopes(heads) if "alibi" in features else None,
        k_scale=scales[0] if quantised else None,
        v_scale=scales[1] if quantised and not latent else None,
        q_scale=draw.scales(1)[0] if "fp8_query" in features else None,
        out_scale=draw.scales(1)[0] if "fp8_output" in features else None,
        kv_layout=case.layout,
    )


def _window(case: Case, draw: Draw) -> int | tuple[int, int] | None:
    features, short, long = case.request.features, 1, _block(case)
    if "batch_invariant" in features:
        # the window covers all keys of some requests but not of others: kernels may treat it as no window for the first
        short = long = 300 if case.lengths == "long" else 40
    if "asymmetric_window" in features:
        return ((0, 3), (5, 0), (long, -1), (-1, 2))[draw.integer(0, 4)]
    return (short, 5, long, 40)[draw.integer(0, 4)] if "sliding_window" in features else None


def _block(case: Case) -> int:
    return case.request.block_size or 16


def prepare(case: Case, selection: Selection, device: torch.device, *, causal: bool | None) -> Trial:
    """The tensors of a case; if it has a cache, the cache has the context. causal: None means by request."""
    draw = Draw(case.seed, device)
    layer = make_layer(case, selection, device, draw=draw)
    lengths = lengths_of(case.lengths, _block(case), layer.spec.attn_type)
    mixed = [i % 2 == 1 for i in range(len(lengths))]
    return fill(layer, lengths, draw, storage=case.storage, causal=mixed if causal is None else causal)


def fill(
    layer: TrialLayer,
    lengths: list[tuple[int, int]],
    draw: Draw,
    *,
    storage: str,
    causal: bool | list[bool],
    ranges: Tensor | None = None,
    unused_block: int | None = None,
) -> Trial:
    """The tensors of one call of a layer; if it has a cache, the cache has the context.

    lengths: queries and keys of each request. storage: one of `STORAGES`. ranges: the batch's mm_prefix, if the layer
    has the feature; drawn if None. unused_block: the entries of the block table after a request's last block; by
    default a block that no request has.
    """
    spec, device = layer.spec, draw.device
    queries, keys = [q for q, _ in lengths], [k for _, k in lengths]
    tokens: list[tuple[Tensor, ...]] = [_tokens(spec, draw, k) for k in keys]
    query = padded(draw.normal(sum(queries), spec.num_heads, spec.head_size, dtype=spec.query_dtype))
    if ranges is None and "mm_prefix" in spec.features:
        ranges = _ranges(draw, lengths)
    tree = _tree(draw, queries) if "tree_mask" in spec.features else None
    build = partial(BatchMetadata.build, device=device, causal=causal)
    if storage == "packed":
        key, value = (padded(torch.cat(x)) for x in zip(*tokens, strict=True))
        return Trial(layer, build(queries, keys, mm_prefix=ranges, tree_mask=tree), query, key, value, None, tokens)
    assert spec.block_size is not None
    table, slots, blocks = blocks_of(draw, keys, spec.block_size, unused_block)
    table = table.to(device)
    # cross-attention reads keys that the encoder has written; other layers write their own
    new = [0 if spec.attn_type == "encoder_decoder" else q for q in queries]

    def part(cuts: list[slice]) -> tuple[Tensor, Tensor, Tensor]:
        """Key, value and slots for a slice of each request's tokens; rows of poison have no slot."""
        new = [_written(spec, t, c) for t, c in zip(tokens, cuts, strict=True)]
        key, value = (padded(torch.cat(x)) for x in zip(*new, strict=True))
        cut_slots = [s[c] for s, c in zip(slots, cuts, strict=True)]
        return key, value, torch.cat([*cut_slots, torch.full((PADDING,), -1)]).to(device)

    cache = _poisoned_cache(layer, storage, blocks, device)
    key, value, where = part([slice(0, k - n) for k, n in zip(keys, new, strict=True)])
    # rolled, so that a row without a slot can be the first one
    earlier = build([0] * len(keys), keys, block_table=table, slot_mapping=where.roll(1))
    layer.write_kv(key.roll(1, 0), value.roll(1, 0), cache, earlier)
    key, value, where = part([slice(k - n, k) for k, n in zip(keys, new, strict=True)])
    batch = build(queries, keys, block_table=table, slot_mapping=where, mm_prefix=ranges, tree_mask=tree)
    indices = draw.chosen(batch, spec.block_size) if spec.sparse else None
    return Trial(layer, batch, query, key, value, cache, tokens, indices)


def _tokens(spec: AttentionSpec, draw: Draw, keys: int) -> tuple[Tensor, Tensor]:
    """The keys and values of a request; the value of a latent is the beginning of its key."""
    key = draw.normal(keys, spec.num_kv_heads, spec.head_size, dtype=spec.dtype)
    if spec.latent:
        return key, key[..., : spec.head_size_v]
    return key, draw.normal(keys, spec.num_kv_heads, spec.head_size_v, dtype=spec.dtype)


def _written(spec: AttentionSpec, tokens: tuple[Tensor, ...], cut: slice) -> tuple[Tensor, Tensor]:
    """The two arguments of `write_kv` for some tokens: keys and values, or the two parts of latents."""
    key, value = (x[cut] for x in tokens)
    return (value, key[..., spec.head_size_v :]) if spec.latent else (key, value)


def blocks_of(draw: Draw, keys: list[int], block: int, unused: int | None) -> tuple[Tensor, list[Tensor], int]:
    """Block table, slots of each request's tokens, and the number of blocks.

    Blocks are in random order, and two are unused. Entries after a request's last block are ``unused``, by default one
    of the two.
    """
    needed = [-(-k // block) for k in keys]
    ids = draw.order(sum(needed) + 2)
    table = torch.full(
        (len(keys), max([*needed, 1]) + 1), int(ids[-1]) if unused is None else unused, dtype=torch.int32
    )
    for row, blocks in zip(table, torch.split(ids[:-2], needed), strict=True):
        row[: len(blocks)] = blocks
    at = [torch.arange(k) for k in keys]
    slots = [row[t // block].long() * block + t % block for row, t in zip(table, at, strict=True)]
    return table, slots, len(ids)


def _tree(draw: Draw, queries: list[int]) -> Tensor:
    """A random tree mask: for each query of a batch the queries of its request that it sees."""
    return draw.uniform(0, 1, sum(queries) + PADDING, max(queries) + 3) < 0.6


def padded(rows: Tensor) -> Tensor:
    """Rows with `PADDING` rows of NaN after them."""
    return torch.cat([rows, poison(PADDING, *rows.shape[1:], dtype=rows.dtype, device=rows.device)])


def poison(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of NaN."""
    if dtype.itemsize > 1:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)
    # the bits of NaN are all ones except the sign; a fnuz format's NaN has the bits of -0 in other formats
    nan = 0x80 if "fnuz" in str(dtype) else 0x7F
    return torch.full(shape, nan, dtype=torch.uint8, device=device).view(dtype)


def _poisoned_cache(layer: TrialLayer, storage: str, blocks: int, device: torch.device) -> KVCache:
    cache = layer.new_kv_cache(blocks, device)
    if storage == "fused" and layer.spec.packed is not None:
        pages = torch.cat(list(cache), -1)
        cache = KVCache(pages[..., : cache.key.shape[-1]], pages[..., cache.key.shape[-1] :])
    elif storage == "fused":
        both = torch.stack(list(cache), dim=1)
        cache = KVCache(both[:, 0], both[:, 1])
    for tensor in cache:
        # as in `poison`
        bytes_ = layer.spec.kv_dtype == "fp8_ds_mla" or layer.spec.packed is not None
        nan = UNUSED if bytes_ else 0x80 if layer.spec.fnuz else 0x7F
        tensor.view(torch.uint8).fill_(nan) if layer.spec.quantised else tensor.fill_(torch.nan)
    return cache


def _ranges(draw: Draw, lengths: list[tuple[int, int]]) -> Tensor:
    """Two prefix ranges per request: one among the latest tokens, one anywhere. Both may be empty.

    The second may begin before the first key.
    """
    rows = []
    for q, k in lengths:
        begin = draw.integer(max(0, k - q - 2), k + 1)
        anywhere = draw.integer(-4, k + 1)
        rows.append([[begin, draw.integer(begin, k + 1)], [anywhere, min(k, anywhere + draw.integer(0, 9))]])
    return torch.tensor(rows, dtype=torch.int32).to(draw.device)
