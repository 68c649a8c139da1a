"""Faults of a backend are found, each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.layers.altered import altered
from torch import Tensor

from attnreg import loader
from attnreg.conformance.claims import Claims
from attnreg.conformance.proof import prove
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, KVCache


def without(spec: AttentionSpec, **changes: Any) -> AttentionSpec:
    """A spec with other numbers, where it has them."""
    return replace(spec, **{k: v for k, v in changes.items() if getattr(spec, k) is not None})


def wider(spec: AttentionSpec) -> AttentionSpec:
    return spec if spec.sliding_window is None else replace(spec, sliding_window=spec.sliding_window + 1)


def past_the_end(batch: BatchMetadata) -> BatchMetadata:
    longer = (batch.seq_lens + 1) if batch.paged else batch.seq_lens
    return replace(batch, seq_lens=longer, seq_lens_cpu=longer)


def remember(store: list[KVCache]) -> Callable[..., None]:
    return lambda batch, key, kv_cache: store.append(kv_cache)


def base_two(batch: BatchMetadata, output: Tensor, lse: Tensor | None, kv_cache: KVCache | None) -> None:
    if lse is not None:
        lse[:, : batch.num_tokens] /= torch.tensor(2.0).log()


def leave_empty_rows(batch: BatchMetadata, output: Tensor, *_: Any) -> None:
    empty = (batch.seq_lens_cpu == 0).repeat_interleave(batch.query_start_loc_cpu.diff())
    output[: batch.num_tokens][empty] = torch.nan


def last_bit_of_blocks(batch: BatchMetadata, output: Tensor, *_: Any) -> None:
    if batch.block_table is not None and output.dtype == torch.float32 and int(batch.block_table[0, 0]) % 2:
        rows = output[: batch.num_tokens]
        rows.copy_(torch.where(rows == 0, rows, (rows.view(torch.int32) ^ 1).view(torch.float32)))


kept: list[KVCache] = []
FAULTS: dict[str, dict[str, Any]] = {
    "sinks are dropped": {"params": lambda p: replace(p, sinks=None)},
    "sinks of other heads": {"params": lambda p: replace(p, sinks=None if p.sinks is None else p.sinks.roll(1))},
    "the softcap is dropped": {"spec": lambda s: without(s, softcap=4096.0)},
    "the window is one wider": {"spec": wider},
    "always causal": {"batch": lambda b: replace(b, causal=True)},
    "never causal": {"batch": lambda b: replace(b, causal=False)},
    "ranges are dropped": {"batch": lambda b: replace(b, mm_prefix=None)},
    "slopes of other heads": {
        "params": lambda p: replace(p, alibi_slopes=None if p.alibi_slopes is None else p.alibi_slopes.roll(1))
    },
    "where a block lies is in the last bit": {"after": last_bit_of_blocks},
    "a key too many": {"batch": past_the_end},
    "the scale is the default": {"spec": lambda s: replace(s, softmax_scale=1.01 * s.softmax_scale)},
    "values are not scaled": {"params": lambda p: replace(p, v_scale=None)},
    "scales of other heads": {"params": lambda p: replace(p, k_scale=None if p.k_scale is None else p.k_scale.roll(1))},
    "the LSE has base two": {"after": base_two},
    "empty rows are left": {"after": leave_empty_rows},
    "padding is written": {"after": lambda batch, output, *_: output[batch.num_tokens :].zero_()},
    "attention writes the cache": {"after": lambda b, o, lse, cache: cache and cache.key[0].zero_()},
    "unwanted rows go to slot 0": {"slots": lambda b: replace(b, slot_mapping=b.slot_mapping.clamp(min=0))},
    "the cache is rounded": {"written": lambda b, key, cache: cache.key.copy_(cache.key.half())},
    "the batch shows in the last digit": {"after": lambda b, output, *_: output.mul_(1 + 2e-7 * b.num_reqs)},
    "whether requests may differ in causality shows in the last digit": {
        "after": lambda b, output, *_: output.mul_(1 + 2e-7 * isinstance(b.causal, Tensor))
    },
    "the cache that was written is read": {"written": remember(kept), "kv_cache": lambda c: c and kept[-1]},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(claims: Claims, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(loader, "load_kernel", lambda registry, backend: altered(**FAULTS[fault]))
    assert any(prove(case, claims.select(case.request)).problem for case in claims.cases("claims"))


def test_the_same_without_a_fault_is_found_to_be_right(claims: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load_kernel", lambda registry, backend: altered())
    assert [prove(case, claims.select(case.request)).problem for case in claims.cases("claims")[:4]] == [None] * 4


@pytest.mark.parametrize("non_causal", [True, False])
def test_requests_that_differ_in_causality_are_proven_alone(claims: Claims, *, non_causal: bool) -> None:
    features = {"batch_invariant": True, "causal_by_request": True, "non_causal": non_causal}
    case = claims._case({**claims._base, **features})
    assert case is not None
    assert prove(case, claims.select(case.request)).problem is None
