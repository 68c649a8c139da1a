"""Packed keys that lie apart: the rows of a padded rectangle, read where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnreg import BatchMetadata
from attnreg.conformance.bounds import bounds
from attnreg.kernels import reference, triton_attn
from attnreg.runtime.interface import BatchError, Call
from attnreg.runtime.layer import Attention

Make = Callable[..., Attention]
# [requests, heads, keys, size]; the first key and the number of keys of each request
SHAPE, FIRST, KEYS = (3, 2, 70, 16), [0, 31, 5], [70, 39, 20]


def rectangle() -> tuple[Tensor, Tensor]:
    """The rectangle of a cache, NaN where there is no key, and its rows: [rows, heads, size], several in one memory."""
    x = torch.full(SHAPE, torch.nan)
    for i, (first, keys) in enumerate(zip(FIRST, KEYS, strict=True)):
        x[i, :, first : first + keys] = torch.randn(SHAPE[1], keys, SHAPE[3])
    requests, heads, keys, size = SHAPE
    return x, x.as_strided(((requests - 1) * heads * keys + keys, heads, size), (size, keys * size, 1))


def batch(queries: list[int]) -> BatchMetadata:
    starts = [i * SHAPE[1] * SHAPE[2] + first for i, first in enumerate(FIRST)]
    return BatchMetadata.build(queries, KEYS, key_starts=starts, key_rows=2 * SHAPE[1] * SHAPE[2] + SHAPE[2])


@pytest.mark.parametrize("queries", [[1, 1, 1], [3, 20, 1]])
@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_SDPA", "TRITON_ATTN"])
def test_keys_are_read_where_they_are(make: Make, backend: str, queries: list[int]) -> None:
    torch.manual_seed(0)
    layer, given = make(block_size=None), batch(queries)
    (k, key), (v, value) = rectangle(), rectangle()
    query = torch.randn(sum(queries), 4, 16)
    output = torch.full_like(query, torch.nan)
    if backend == "TRITON_ATTN":
        call = Call(query, None, output, key, value)
        triton_attn.forward(layer.spec, triton_attn.plan(layer.spec, given), call)
    else:
        make(backend, block_size=None).forward(query, key, value, None, given, output)
    ends = [first + keys for first, keys in zip(FIRST, KEYS, strict=True)]
    packed = [
        torch.cat([x[i, :, first:end].transpose(0, 1) for i, (first, end) in enumerate(zip(FIRST, ends, strict=True))])
        for x in (k, v)
    ]
    exact = reference.attention(layer.spec, BatchMetadata.build(queries, KEYS), query, key=packed[0], value=packed[1])
    apart = reference.attention(layer.spec, given, query, key=key, value=value)
    assert torch.equal(apart.output, exact.output)
    most, _ = bounds(layer.spec, given, exact, float(packed[1].abs().max()))
    assert ((output.double() - exact.output).abs() <= most).all()


def test_a_backend_that_reads_them_one_behind_the_other_refuses(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make(block_size=None)
    (_, key), query = rectangle(), torch.randn(3, 4, 16)
    monkeypatch.delattr(layer.module, "KEYS_APART")
    with pytest.raises(BatchError, match="key_rows is given, and CPU_ATTN reads packed keys one behind the other"):
        layer.forward(query, key, key, None, batch([1, 1, 1]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"key_starts": [0, 4]}, "key_starts and key_rows come together, with one start for each request"),
        ({"key_rows": 4}, "key_starts and key_rows come together"),
        ({"key_starts": [0], "key_rows": 4}, "with one start for each request"),
        ({"key_starts": [0, 4], "key_rows": -1}, "key_rows is -1; expected an integer from 0"),
        ({"key_starts": [0, 4], "key_rows": 9, "block_table": torch.zeros(2, 1).int()}, "which is for packed keys"),
    ],
)
def test_places_that_are_none(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        BatchMetadata.build([1, 1], [3, 2], **given)


@pytest.mark.parametrize(("starts", "rows"), [([0, 8], 9), ([-1, 3], 9), ([0, 7], 8)])
def test_keys_past_the_rows_are_refused(make: Make, starts: list[int], rows: int) -> None:
    key = torch.randn(rows, 2, 16)
    given = BatchMetadata.build([1, 1], [3, 2], key_starts=starts, key_rows=rows)
    with pytest.raises(BatchError, match=r"key_start_loc\[\d\] is -?\d for \d keys; key_rows is \d"):
        make(block_size=None).forward(torch.randn(2, 4, 16), key, key, None, given)
    fits = BatchMetadata.build([1, 1], [3, 2], key_starts=[0, 4], key_rows=9)
    with pytest.raises(BatchError, match="key has 8 rows; the batch has 9 keys"):
        make(block_size=None).forward(torch.randn(2, 4, 16), key[:8], key[:8], None, fits)
