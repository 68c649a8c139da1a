"""Trials of TRITON_ATTN's kernels for any layer and lengths, independent of the registry's claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attnreg.conformance.proof import examine
from attnreg.conformance.trial import Draw, Trial, fill
from attnreg.kernels import triton_attn
from attnreg.kernels.triton.plans import AttentionPlan
from attnreg.language.packed import Packed
from attnreg.loader import default_registry
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCache, LayerParams, Layout

# the entry of block tables past a request's last block: far outside any cache
NOWHERE = 2**30


@dataclass(frozen=True)
class Case:
    """A layer and the lengths of its batch. ``heads``: query and KV heads."""

    queries: Sequence[int]
    keys: Sequence[int]
    heads: tuple[int, int] = (4, 2)
    head_size: int = 32
    head_size_v: int | None = None
    dtype: torch.dtype = torch.float16
    kv_dtype: str = "auto"
    block_size: int | None = 16
    layout: Layout = "NHD"
    causal: bool | list[bool] = True
    window: int | tuple[int, int] | None = None
    chunk: int | None = None
    softcap: float | None = None
    features: frozenset[str] = frozenset()
    ranges: list[list[list[int]]] | None = None
    fnuz: bool = False

    @property
    def spec(self) -> AttentionSpec:
        """The layer; it returns its LSE."""
        kind = "asymmetric_window" if isinstance(self.window, tuple) else "sliding_window"
        numbers = {kind: self.window, "chunk": self.chunk, "softcap": self.softcap}
        if any(q > k for q, k in zip(self.queries, self.keys, strict=True)):
            attn_type = "encoder_decoder"
        else:
            attn_type = "decoder" if self.causal or self.block_size else "encoder_only"
        return AttentionSpec(
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_size=self.head_size,
            head_size_v=self.head_size_v or self.head_size,
            dtype=self.dtype,
            softmax_scale=self.head_size**-0.5,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            attn_type=attn_type,
            features=self.features | {"lse"} | {name for name, number in numbers.items() if number},
            kv_layout=self.layout,
            fnuz=self.fnuz,
            packed=Packed.among(default_registry().vocabulary.words, self.kv_dtype),
            **numbers,  # type: ignore[arg-type]
        )


def in_graphs(module: Any) -> Any:
    """A kernel module whose plans are those that graphs capture: nothing is known of the lengths."""

    def plan(spec: AttentionSpec, batch: BatchMetadata) -> Any:
        made = module.plan(spec, batch)
        if not hasattr(made, "attention"):
            return made.for_graphs()
        made.attention = made.attention.for_graphs()
        return made

    return SimpleNamespace(**{name: getattr(module, name) for name in module.__all__} | {"plan": plan})


class KernelLayer:
    """A layer of a kernel module, without a selection. ``chosen`` overrides what `AttentionPlan` launches."""

    def __init__(self, spec: AttentionSpec, params: LayerParams, module: Any = triton_attn, **chosen: Any) -> None:
        self.spec, self.params, self.module, self.chosen = spec, params, module, chosen

    def plan(self, batch: BatchMetadata) -> Any:
        """The plan of a batch. It is made once, as in `Attention`, so that a graph can be captured."""
        if "kernel" not in batch.plans:
            plan = batch.plans["kernel"] = self.module.plan(self.spec, batch)
            if self.chosen:
                plan.launches = AttentionPlan(self.spec, batch, **self.chosen).launches
        return batch.plans["kernel"]

    def new_kv_cache(self, num_blocks: int, device: torch.device | str) -> KVCache:
        shape = self.module.kv_cache_shape(self.spec, num_blocks)
        return KVCache(*(torch.empty(size, dtype=shape.dtype, device=device) for size in shape[:2]))

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache, batch: BatchMetadata) -> None:
        self.module.write_kv(self.spec, self.plan(batch), key, value, kv_cache, params=self.params)

    def attend(
        self, query: Tensor, kv_cache: KVCache | None, batch: BatchMetadata, output: Tensor, **more: Tensor | None
    ) -> None:
        self.module.forward(self.spec, self.plan(batch), Call(query, kv_cache, output, params=self.params, **more))


def trial_of(case: Case, device: str, **chosen: Any) -> Trial:
    """The trial of a case on a device, with memory poisoned as in conformance. ``chosen`` is for `KernelLayer`."""
    draw, spec = Draw(repr(case), torch.device(device)), case.spec
    heads, kv_heads = case.heads
    per_head = "per_head_quant_scales" in spec.features
    scales = draw.scales(kv_heads) if per_head else draw.scales(1).expand(2, kv_heads)
    scaled = spec.quantised and spec.packed is None
    params = LayerParams(
        sinks=draw.sinks(heads) if "sinks" in spec.features else None,
        alibi_slopes=draw.slopes(heads) if "alibi" in spec.features else None,
        k_scale=scales[0] if scaled else None,
        v_scale=scales[1] if scaled else None,
        q_scale=draw.scales(1)[0].expand(kv_heads) if "fp8_query" in spec.features else None,
        out_scale=draw.scales(1)[0] if "fp8_output" in spec.features else None,
    )
    lengths = list(zip(case.queries, case.keys, strict=True))
    ranges = None if case.ranges is None else torch.tensor(case.ranges, dtype=torch.int32, device=device)
    storage = "packed" if case.block_size is None else case.layout
    layer = KernelLayer(spec, params, **chosen)
    return fill(layer, lengths, draw, storage=storage, causal=case.causal, ranges=ranges, unused_block=NOWHERE)


def check(case: Case, device: str, **chosen: Any) -> None:
    """Assert that the kernels compute a case correctly and touch no other memory."""
    assert examine(trial_of(case, device, **chosen)).problem is None


def at_odd_addresses(trial: Trial) -> Trial:
    """The trial with rows of queries that lie one element further apart: the first begins at a multiple of 16 bytes."""
    rows, heads, size = trial.query.shape
    room = torch.zeros(rows, heads * size + 1, device=trial.query.device, dtype=trial.query.dtype)
    query = room[:, :-1].unflatten(1, (heads, size)).copy_(trial.query)
    assert query.data_ptr() % 16 == 0
    return replace(trial, query=query)
