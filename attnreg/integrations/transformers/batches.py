"""Conversion of transformers' padded rectangles to attnreg's packed batches, and of the outputs back.

Keys of padding are left out. A query of padding that sees a key is computed, as by transformers' own functions, because
models pool at such rows, convolve over them and decode them. A query that sees no key has the output zero. Keys and
values are read where transformers' cache has them, by backends that can. They are copied once per layer and step for
others, and where padding lies between a request's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.integrations.transformers.dense import dense_attention
from attnreg.integrations.transformers.masks import MaskSource
from attnreg.integrations.transformers.meanings import Ranged, known_band
from attnreg.runtime.interface import BatchMetadata
from attnreg.runtime.layer import Attention
from attnreg.runtime.masks import Band


class Rest(NamedTuple):
    """Queries of padding that see a key: no batch can express them, so they are computed densely.

    rows: [batch, most] their indices among the queries, filled up with 0. real: [batch, most] bool, false for filling.
    mask: [batch, 1, most, keys] bool, true where a key takes part.
    """

    rows: Tensor
    real: Tensor
    mask: Tensor

    def attend(self, layer: Attention, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Writes these rows of output [batch, queries, heads, head_size_v], from transformers' tensors."""
        places = self.rows[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
        keys = self.mask.shape[3]
        attended = dense_attention(
            query.gather(2, places),
            key[:, :, :keys],
            value[:, :, :keys],
            mask=self.mask,
            bias=None,
            scale=layer.spec.softmax_scale,
            softcap=layer.spec.softcap,
            sinks=layer.params.sinks,
        )
        request, at = self.real.nonzero().unbind(1)
        output[request, self.rows[request, at]] = attended[request, at]


@dataclass(frozen=True, eq=False)
class Packed:
    """The requests of a call, and the places of their rows in the rectangles that transformers passes.

    crossed: queries and keys belong to different texts. query_lens, seq_lens: of each request. queries: rows of
    [batch * queries] that are tokens, None for all. padding: [batch, key_stop] bool in host memory, true where a key is
    a token; None where all before ``key_stop`` are.
    """

    band: Band
    crossed: bool
    device: torch.device
    query_lens: list[int]
    seq_lens: list[int]
    mm_prefix: Tensor | None
    queries: Tensor | None
    padding: Tensor | None
    key_stop: int
    rest: Rest | None = None
    # the batches by the distance of the requests' keys, in rows
    batches: dict[int | None, BatchMetadata] = field(default_factory=dict, repr=False)

    def attend(self, layer: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The output [batch, queries, heads, head_size_v] of query [batch, heads, queries, size], key and value."""
        size, queries = query.shape[0], query.shape[2]
        q = _rows(query)
        distance = self._distance(layer, key, value)
        batch = self.batches.get(distance)
        if batch is None:
            batch = self.batches[distance] = self._batch(distance, key.shape[2])
        if distance is None:
            k, v = self._copied(key), self._copied(value)
        else:
            k, v = _rows_apart(key), _rows_apart(value)
        output = q.new_empty(q.shape[0], layer.spec.num_heads, layer.spec.head_size_v)
        if self.queries is None:
            layer.forward(q, k, v, None, batch, output)
        else:
            output.zero_()[self.queries] = layer.forward(q[self.queries], k, v, None, batch)
        output = output.view(size, queries, output.shape[1], output.shape[2])
        if self.rest is not None:
            self.rest.attend(layer, query, key, value, output)
        return output

    def _distance(self, layer: Attention, key: Tensor, value: Tensor) -> int | None:
        """The rows from one request's first key to the next one's, where they can be read in place; else None."""
        if not getattr(layer.module, "KEYS_APART", False) or self.first_keys is None:
            return None
        distance = _distance(key)
        return distance if distance == _distance(value) else None

    @cached_property
    def first_keys(self) -> list[int] | None:
        """The first token among the keys of each request; None where a request's tokens are not consecutive."""
        if self.padding is None:
            return [0] * len(self.seq_lens)
        return None if _has_holes(self.padding) else self.padding.int().argmax(1).tolist()

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor] | None:
        """The batch index and the position of each key; None for all before ``key_stop``."""
        if self.padding is None:
            return None
        request, position = self.padding.nonzero().unbind(1)
        return request.to(self.device), position.to(self.device)

    def _batch(self, distance: int | None, keys: int) -> BatchMetadata:
        starts = rows = None
        if distance is not None and self.first_keys is not None:
            starts = [i * distance + first for i, first in enumerate(self.first_keys)]
            rows = (len(starts) - 1) * distance + keys
        return BatchMetadata.build(
            self.query_lens, self.seq_lens, device=self.device, causal=self.band.causal, mm_prefix=self.mm_prefix,
            key_starts=starts, key_rows=rows,
        )  # fmt: skip

    def _copied(self, x: Tensor) -> Tensor:
        """The keys or values of all requests, one behind the other."""
        if self.tokens is not None:
            return _last_contiguous(x).transpose(1, 2)[self.tokens]
        return _rows(x[:, :, : self.key_stop])


def packed_mask(source: MaskSource, *, crossed: bool) -> Packed | str:
    """The batch that a mask describes, shared by the layers that share the mask; or the reason why no batch can.

    crossed: the layer may attend to another text.
    """
    key = ("packed", crossed)
    if key not in source.memo:
        source.memo[key] = _pack(source, crossed)
    return source.memo[key]  # type: ignore[no-any-return]


def packed_plainly(size: int, queries: int, keys: int, band: Band, crossed: bool, device: torch.device) -> Packed:
    """The batch of a call without a mask; the queries are the last tokens among the keys, unless ``crossed``."""
    return Packed(band, crossed, device, [queries] * size, [keys] * size, None, None, None, keys)


def _pack(source: MaskSource, crossed: bool) -> Packed | str:
    meaning = source.meaning()
    if meaning is None:
        return "its mask is neither causal, windowed nor a prefix"
    band, ranges = meaning if isinstance(meaning, Ranged) else (meaning, None)
    end = source.begin + source.queries
    # a causal mask compares positions, which only one text has
    crossed = not band.causal and (crossed or (source.begin == 0 and source.queries != source.keys))
    if crossed and band.window is not None:
        return "its window is on keys of another text"
    if not crossed and (source.begin < 0 or end > source.keys or (not band.causal and end != source.keys)):
        return f"its {source.queries} queries begin at {source.begin} of {source.keys} keys"
    # a static cache is longer than the tokens: what lies behind the last query is no key yet
    stop = source.keys if crossed else end
    padding = source.padding_before(stop)
    if padding is None:
        query_lens, seq_lens = [source.queries] * source.batch, [stop] * source.batch
        rows = rest = None
    else:
        if (band.window is not None or ranges is not None) and _has_holes(padding):
            return "its padding lies between tokens, where a window or a prefix counts"
        tokens = (
            torch.ones(source.batch, source.queries, dtype=torch.bool, device="cpu")
            if crossed
            else padding[:, source.begin :]
        )
        query_lens, seq_lens = tokens.sum(1).tolist(), padding.sum(1).tolist()
        rows = None if bool(tokens.all()) else tokens.flatten().nonzero().flatten().to(source.device)
        rest = None if crossed else _rest(source, meaning, padding, ~tokens)
        if ranges is not None:
            ranges = (ranges - padding.int().argmax(1)[:, None, None]).clamp(min=0).int()
    prefix = None if ranges is None else ranges.to(source.device)
    return Packed(band, crossed, source.device, query_lens, seq_lens, prefix, rows, padding, stop, rest)


def _rest(source: MaskSource, meaning: Band | Ranged, padding: Tensor, omitted: Tensor) -> Rest | None:
    """The omitted queries ([batch, queries] bool) that see a key; None where no such query sees one."""
    keys = torch.arange(padding.shape[1], device="cpu")
    # a meaning that was fitted says nothing of rows of padding, which it was not compared with
    if isinstance(meaning, Ranged) or known_band(source.arguments["mask_function"]) is None:
        seen = source.dense()[:, 0, :, : len(keys)].cpu()
    else:
        queries = torch.arange(source.begin, source.begin + source.queries, device="cpu")
        seen = meaning.sees(queries[:, None], keys)[None]
    computed = omitted & (seen & padding[:, None, :]).any(-1)
    most = int(computed.sum(1).max())
    if not most:
        return None
    # the rows to compute first, then filling
    order = computed.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    real = computed.gather(1, order)
    rows = order.where(real, 0)
    chosen = seen.expand(len(rows), -1, -1).gather(1, rows[:, :, None].expand(-1, -1, len(keys)))
    mask = (chosen & padding[:, None, :])[:, None]
    return Rest(*(x.to(source.device) for x in (rows, real, mask)))


def _has_holes(padding: Tensor) -> bool:
    """Whether the tokens of any row are not consecutive."""
    starts = torch.nn.functional.pad(padding, (1, 0)).int().diff(dim=1) == 1
    return bool((starts.sum(1) > 1).any())


def _rows(x: Tensor) -> Tensor:
    """[batch * tokens, heads, size] from [batch, heads, tokens, size]; a view where memory allows."""
    x = _last_contiguous(x)
    return x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)


def _distance(x: Tensor) -> int | None:
    """The rows from one request to the next in [batch, heads, tokens, size]; None if no number of whole rows."""
    batch, _, row, element = x.stride()
    if element != 1 or row < 1:
        return None
    if x.shape[0] == 1:
        return 0
    return None if batch % row else batch // row


def _rows_apart(x: Tensor) -> Tensor:
    """[rows, heads, size] from [batch, heads, tokens, size]: every row of memory from the first token to the last."""
    batch, heads, tokens, size = x.shape
    stride, head, row, _ = x.stride()
    return x.as_strided(((batch - 1) * (stride // row) + tokens, heads, size), (row, head, 1))


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
