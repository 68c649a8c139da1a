"""How the cache is written in PyTorch: slots, scales, rounding and saturation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attnreg.runtime.interface import BatchMetadata, KVCache, LayerParams
from attnreg.runtime.layer import Attention

Make = Callable[..., Attention]


def written(layer: Attention, slots: list[int], *rows: list[float]) -> KVCache:
    """A poisoned cache of two blocks of four after rows of constants went to slots."""
    cache = layer.new_kv_cache(2)
    for tensor in cache:
        tensor.view(torch.uint8).fill_(0x7F) if layer.spec.quantised else tensor.fill_(torch.nan)
    key, value = (torch.tensor(r)[:, None, None].expand(-1, 2, 16).contiguous() for r in rows)
    table = torch.zeros(1, 1, dtype=torch.int32)
    batch = BatchMetadata.build([0], [0], block_table=table, slot_mapping=torch.tensor(slots, dtype=torch.int64))
    layer.write_kv(key, value, cache, batch)
    return cache


@pytest.mark.parametrize("slots", [[], [-1], [-1, -1]])
def test_without_a_slot_nothing_is_written(make: Make, slots: list[int]) -> None:
    cache = written(make(), slots, [1.0] * len(slots), [2.0] * len(slots))
    assert all(tensor.isnan().all() for tensor in cache)


def test_rows_without_a_slot_are_passed_over(make: Make) -> None:
    cache = written(make(), [-1, 5, -7, 2], [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0])
    assert cache.key[..., 0, 0].nan_to_num(0).tolist() == [[0, 0, 4, 0], [0, 2, 0, 0]]
    assert cache.value[..., 1, 7].nan_to_num(0).tolist() == [[0, 0, 8, 0], [0, 6, 0, 0]]


@pytest.mark.parametrize(("word", "largest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_a_quantised_cache_is_scaled_and_saturates(make: Make, word: str, largest: float) -> None:
    layer = make(kv_dtype=word, k_scale=torch.tensor(0.5), v_scale=torch.tensor([2.0]))
    cache = written(layer, [0, 1, 2], [1.0, 1e6, -1e6], [1.0, 1e6, -1e6])
    assert cache.key.float()[0, :3, 0, 0].tolist() == [2.0, largest, -largest]
    assert cache.value.float()[0, :3, 0, 0].tolist() == [0.5, largest, -largest]
    assert cache.key.float().isfinite().sum() == 3 * 2 * 16


def test_scales_of_each_head(make: Make) -> None:
    scale = torch.tensor([1.0, 4.0])
    layer = make(kv_dtype="fp8", k_scale=scale, features={"per_head_quant_scales"})
    cache = written(layer, [0], [8.0], [8.0])
    assert cache.key.float()[0, 0, :, 0].tolist() == [8.0, 2.0]
    assert cache.value.float()[0, 0, :, 0].tolist() == [8.0, 8.0]
    # changed in place, as a calibration does
    scale.fill_(2.0)
    assert isinstance(layer.params, LayerParams)
    assert layer.params.k_scale is not None
    assert layer.params.k_scale.tolist() == [2.0, 2.0]
