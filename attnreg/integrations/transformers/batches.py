"""Conversion of transformers' padded rectangles to attnreg's varlen batches, and of the outputs back.

Keys of padding are left out. A query of padding that sees a key is computed, as in transformers' own functions, because
models pool such rows, convolve over them and decode them. A query that sees no key has the output zero.

Backends that can read keys and values in place in transformers' cache. For other backends, and if padding lies between
a request's tokens, they are copied once per layer and step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.integrations.transformers.dense import dense_attention
from attnreg.integrations.transformers.mask_patterns import Ranged
from attnreg.integrations.transformers.masks import MaskSource
from attnreg.runtime.interface import BatchMetadata, Repeated
from attnreg.runtime.layer import Attention
from attnreg.runtime.masks import Band
from attnreg.runtime.tensors import Alike, Remembered, comparison, is_captured


class PaddingQueries(NamedTuple):
    """Queries of padding that see a key: no batch can express them, so they are computed densely.

    rows: [batch, most] their indices among the queries, filled with 0. real: [batch, most] bool, false for filling.
    mask: [batch, 1, most, keys] bool, true where a key takes part.
    """

    rows: Tensor
    real: Tensor
    mask: Tensor

    def attend(self, layer: Attention, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Computes these rows of output [batch, queries, heads, head_size_v] from transformers' tensors."""
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


class BoundRun(NamedTuple):
    """The run of one call, bound to its batch and its kind of layer. It runs on other memory of the same layout.

    alike: compares a query, key and value with that call's, but for their memory. tensors: from `tensors_like`.
    layer: the kind of the layer. shape: of the output.
    """

    alike: Alike
    tensors: object
    layer: object
    shape: tuple[int, int, int, int]
    run: Repeated


# the kinds of query, key and value, for any number of queries and keys: the next token's calls are of the same kind
_KINDS: Remembered[object] = Remembered({0: 2, 1: 2, 2: 2})


def tensors_like(query: Tensor, key: Tensor, value: Tensor) -> object:
    """The same object for all tensors like these but for the number of queries and keys."""
    given = query, key, value
    return (_KINDS.find(given) or _KINDS.put(given, object()))[1]


@dataclass(frozen=True, eq=False)
class VarlenBatch:
    """The requests of a call, and the places of their rows in the rectangles that transformers passes.

    crossed: queries and keys belong to different texts. query_lens, seq_lens: of each request. queries: the rows of
    [batch * queries] that are tokens, None for all. firsts: the column of each request's first key that is a token, if
    all keys from there to ``key_stop`` are; else None. Then padding is [batch, key_stop] bool in host memory, true
    where a key is a token.
    """

    band: Band
    crossed: bool
    device: torch.device
    query_lens: list[int]
    seq_lens: list[int]
    mm_prefix: Tensor | None
    queries: Tensor | None
    firsts: list[int] | None
    padding: Tensor | None
    key_stop: int
    padding_queries: PaddingQueries | None = None
    # the batches by the distance of the requests' keys, in rows
    batches: dict[int | None, BatchMetadata] = field(default_factory=dict, repr=False)
    # the same over blocks: of latents by the size of a block, of a packed cache by its shape
    blocks: dict[object, Any] = field(default_factory=dict, repr=False)
    # the run of the last call by each kind of layers; a list, which other threads may append to
    bound: list[BoundRun] = field(default_factory=list, repr=False)

    def attend(self, layer: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The output [batch, queries, heads, head_size_v] of query [batch, heads, queries, size], key and value."""
        before = next((i for i, bound in enumerate(self.bound) if bound.layer is layer.kind), None)
        if before is not None and not layer.params.tensors and not is_captured(query):
            bound = self.bound[before]
            if bound.alike(query, key, value):
                output = torch.empty(*bound.shape, dtype=query.dtype, device=query.device)
                bound.run(query, key, value, output)
                return output
        size, _, queries, _ = query.shape
        q = varlen_rows(query)
        places = self._places(layer, key, value)
        if places is None:
            distance, k, v = None, self._copied(key), self._copied(value)
        else:
            distance, k, v = places
        batch = self.batches.get(distance)
        if batch is None:
            batch = self.batches[distance] = self._batch(distance, key.shape[2])
        heads, width = layer.spec.num_heads, layer.spec.head_size_v
        output = q.new_empty(q.shape[0], heads, width)
        if self.queries is None:
            # with a copy of the query, the run is not bound: the copy has another address
            alone = places is None or self.padding_queries is not None or q.data_ptr() != query.data_ptr()
            run = None if alone else layer.repeat(q, k, v, batch, output)
            if run is None:
                layer.forward(q, k, v, None, batch, output)
            else:
                run(q, k, v, output)
                given = query, key, value
                shape = size, queries, heads, width
                new = BoundRun(comparison(given), tensors_like(*given), layer.kind, shape, run)
                if before is None:
                    self.bound.append(new)
                else:
                    self.bound[before] = new
        else:
            output.zero_()[self.queries] = layer.forward(q[self.queries], k, v, None, batch)
        output = output.view(size, queries, heads, width)
        if self.padding_queries is not None:
            self.padding_queries.attend(layer, query, key, value, output)
        return output

    def bound_for(self, query: Tensor, key: Tensor, value: Tensor) -> BoundRun | None:
        """The bound run of a call with tensors like these; None if there is none or a CUDA graph is being captured."""
        for bound in self.bound:
            if bound.alike(query, key, value):
                return None if is_captured(query) else bound
        return None

    def _places(self, layer: Attention, key: Tensor, value: Tensor) -> tuple[int, Tensor, Tensor] | None:
        """The distance in rows between the keys of two requests, and all keys and values as [rows, heads, size].

        None if the backend cannot read keys in place, or if the distance is no whole number of rows.
        """
        if self.first_keys is None or not getattr(layer.module, "KEYS_APART", False):
            return None
        size, heads, tokens, width = key.shape
        (batch, head, row, element), (batch_v, head_v, row_v, element_v) = key.stride(), value.stride()
        if element != 1 or element_v != 1 or row < 1 or row_v < 1:
            return None
        distance = 0
        if size > 1:
            distance = batch // row
            if batch != distance * row or batch_v != distance * row_v:
                return None
        rows = (size - 1) * distance + tokens
        return (
            distance,
            key.as_strided((rows, heads, width), (row, head, 1)),
            value.as_strided((rows, heads, value.shape[3]), (row_v, head_v, 1)),
        )

    @cached_property
    def facts(self) -> tuple[Any, ...]:
        """The facts about a mask's meaning that the selection of a layer depends on."""
        return self.band, self.crossed, self.mm_prefix is None

    @cached_property
    def phase(self) -> str:
        """The phase of all requests: "decode" with one query each, "prefill" with several; "any" for both kinds."""
        return phase_of(self.query_lens)

    @cached_property
    def first_keys(self) -> list[int] | None:
        """The column of each request's first key; None if a request's tokens are not consecutive."""
        if self.padding is None:
            return self.firsts
        return None if _has_holes(self.padding) else self.padding.int().argmax(1).tolist()

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor] | None:
        """The batch index and the position of each key; None for all before ``key_stop``."""
        padding = self.padding
        if padding is None:
            if self.firsts is None or not any(self.firsts):
                return None
            firsts = torch.tensor(self.firsts, device="cpu")
            padding = torch.arange(self.key_stop, device="cpu") >= firsts[:, None]
        request, position = padding.nonzero().unbind(1)
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
        return varlen_rows(x[:, :, : self.key_stop])


def phase_of(query_lens: Iterable[int]) -> str:
    """The phase of requests with these numbers of queries, "any" if they differ. It ignores those without queries."""
    phases = {"decode" if queries == 1 else "prefill" for queries in query_lens if queries}
    return phases.pop() if len(phases) == 1 else "any"


def mask_batch(source: MaskSource, *, crossed: bool) -> VarlenBatch | str:
    """The batch of a mask, shared by the layers that share the mask; or the reason why no batch can express it.

    crossed: the layer may attend to another text.
    """
    key = batch_key(crossed)
    if key not in source.memo:
        source.memo[key] = _mask_batch(source, crossed)
    return source.memo[key]  # type: ignore[no-any-return]


def batch_key(crossed: bool) -> tuple[str, bool]:
    """The key of a mask's batch in the mask's memo. crossed: for layers that may attend to another text."""
    return "varlen", crossed


def plain_batch(size: int, queries: int, keys: int, band: Band, crossed: bool, device: torch.device) -> VarlenBatch:
    """The batch of a call without a mask; the queries are the last tokens among the keys, unless ``crossed``."""
    return VarlenBatch(band, crossed, device, [queries] * size, [keys] * size, None, None, [0] * size, None, keys)


def _mask_batch(source: MaskSource, crossed: bool) -> VarlenBatch | str:
    if not crossed and source.band is None and source.seen_from is not None:
        # a single query sees its request's last key; the function's meaning for other queries does not matter
        stop, seen_from = source.begin + 1, source.seen_from
        lengths = [stop - first for first in seen_from]
        return VarlenBatch(
            Band(True, None), False, source.device, [1] * source.batch, lengths, None, None, seen_from, None, stop
        )
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
    # a static cache is longer than the tokens: columns behind the last query are no keys yet
    stop = source.keys if crossed else end
    why = _not_compared(source, stop, crossed)
    if why:
        return why
    firsts = None if ranges is not None or crossed else source.firsts
    padding = None
    if stop <= source.whole:
        firsts = [0] * source.batch
    elif firsts is None or stop > source.told_keys or max(firsts) > source.begin:
        # tokens and padding in any order, or queries of padding
        firsts, padding = None, source.padding_before(stop)
        if padding is None:
            firsts = [0] * source.batch
    if padding is None:
        assert firsts is not None
        query_lens, seq_lens = [source.queries] * source.batch, [stop - first for first in firsts]
        rows = padding_queries = None
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
        padding_queries = None if crossed else _padding_queries(source, meaning, padding, ~tokens)
        if ranges is not None:
            ranges = (ranges - padding.int().argmax(1)[:, None, None]).clamp(min=0).int()
    prefix = None if ranges is None else ranges.to(source.device)
    return VarlenBatch(
        band, crossed, source.device, query_lens, seq_lens, prefix, rows, firsts, padding, stop, padding_queries
    )


def _not_compared(source: MaskSource, stop: int, crossed: bool) -> str:
    """The reason why a fitted mask differs from its batch at elements that the fit did not compare; "" if it does not.

    The fit compares neither queries of padding, nor the queries of another text. No batch has keys behind its last
    query, so the mask must hide these.
    """
    if source.band is not None or (not crossed and stop == source.keys):
        return ""
    seen = source.dense()
    if not crossed:
        return "its mask shows keys behind its last query" if bool(seen[..., stop:].any()) else ""
    tokens = seen.new_ones(1, source.keys) if source.padding is None else source.padding.to(seen.device)
    return "" if bool((seen == tokens[:, None, None]).all()) else "its mask shows some queries other keys than others"


def _padding_queries(
    source: MaskSource, meaning: Band | Ranged, padding: Tensor, omitted: Tensor
) -> PaddingQueries | None:
    """The omitted queries ([batch, queries] bool) that see a key; None if no omitted query sees one."""
    keys = torch.arange(padding.shape[1], device="cpu")
    # a fitted meaning was not compared with rows of padding, so the whole mask is read
    if isinstance(meaning, Ranged) or source.band is None:
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
    return PaddingQueries(*(x.to(source.device) for x in (rows, real, mask)))


def _has_holes(padding: Tensor) -> bool:
    """Whether the tokens of any row are not consecutive."""
    starts = torch.nn.functional.pad(padding, (1, 0)).int().diff(dim=1) == 1
    return bool((starts.sum(1) > 1).any())


def varlen_rows(x: Tensor) -> Tensor:
    """[batch * tokens, heads, size] from [batch, heads, tokens, size]; a view where memory allows."""
    x = _last_contiguous(x)
    return x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
