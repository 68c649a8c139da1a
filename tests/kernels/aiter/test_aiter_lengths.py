"""The rows over aiter compute with the lengths on the device, where the host knows upper bounds only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.stand_ins.aiter_layers import MHA, check, filled, latent_layer, make
from support.stand_ins.fake_aiter import Fake

from attnreg import Platform, Registry
from attnreg.runtime.interface import BatchError, BatchMetadata

LENGTHS = [(1, 40), (1, 17), (5, 9), (0, 12), (1, 1), (20, 33), (1, 64), (0, 0), (1, 2)]


def loose(batch: BatchMetadata) -> BatchMetadata:
    """The batch as a host knows it that has not waited for the device: longer, and with room in the block table."""
    table = torch.full((batch.num_reqs, 12), 2**30, dtype=torch.int32)
    assert batch.block_table is not None
    table[:, : batch.block_table.shape[1]] = batch.block_table
    return replace(
        batch, seq_lens_cpu=batch.seq_lens_cpu + 37, max_seq_len=batch.max_seq_len + 37, block_table=table
    )  # fmt: skip


@pytest.mark.parametrize("backend", MHA)
@pytest.mark.parametrize("features", [(), ("alibi", "sinks")])
def test_upper_bounds(
    fake: Fake,
    registry: Registry,
    mi350: Platform,
    backend: str,
    features: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if backend == "ROCM_AITER_FA" and features:
        pytest.skip("its packed kernels take either")
    given = {"alibi_slopes": torch.rand(4), "sinks": torch.full((1,), 0.7).expand(4)} if features else {}
    layer = make(registry, mi350, backend, features=features, **given)
    cache, table = filled(layer, [k for _, k in LENGTHS])
    batch = BatchMetadata.build([q for q, _ in LENGTHS], [k for _, k in LENGTHS], block_table=table)
    query = torch.randn(batch.num_tokens, 4, 64, dtype=torch.bfloat16)
    output = torch.full_like(query, torch.nan)
    # as of a GPU's memory, which cannot be read without waiting for it
    monkeypatch.setattr(BatchMetadata, "on_host", False)
    layer.attend(query, cache, loose(batch), output)
    check(layer, batch, query, output, cache)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [[1, 1, 1], [3, 3, 3], [1, 3, 0], [9, 0, 6]])
@pytest.mark.parametrize("heads", [8, 16])
def test_upper_bounds_of_mla(
    fake: Fake,
    registry: Registry,
    mi350: Platform,
    heads: int,
    queries: list[int],
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = latent_layer(registry, mi350, heads, features=[] if causal else ["non_causal"])
    cache, table = filled(layer, [40, 9, 17])
    batch = BatchMetadata.build(queries, [40, 9, 17], block_table=table, causal=causal)
    query = torch.randn(batch.num_tokens, heads, 576).bfloat16()
    output = torch.full((batch.num_tokens, heads, 512), torch.nan, dtype=torch.bfloat16)
    monkeypatch.setattr(BatchMetadata, "on_host", False)
    layer.attend(query, cache, loose(batch), output)
    check(layer, batch, query, output, cache)


@pytest.mark.parametrize("backend", MHA)
def test_padding_without_keys_is_refused(fake: Fake, registry: Registry, mi350: Platform, backend: str) -> None:
    layer = make(registry, mi350, backend)
    batch = BatchMetadata.build([1, 1], [4, 0], block_table=torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(BatchError, match=f"request 1 has queries and no keys, which {backend} does not serve"):
        layer.plan(batch)
