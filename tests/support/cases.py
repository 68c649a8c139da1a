"""Batches for TRITON_ATTN with everything poisoned that must not be read or kept, and the check against float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnreg.conformance.bounds import bounds
from attnreg.kernels import reference, triton_attn
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCache, LayerParams, Layout

# rows of query and output behind the batch: never read, never written
PADDING = 3


@dataclass(frozen=True)
class Case:
    """A layer and the lengths of its batch. ``heads``: query and KV heads."""

    queries: list[int]
    keys: list[int]
    heads: tuple[int, int] = (4, 2)
    head_size: int = 32
    head_size_v: int | None = None
    dtype: torch.dtype = torch.float16
    kv_dtype: str = "auto"
    block_size: int | None = 16
    layout: Layout = "NHD"
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    features: frozenset[str] = field(default_factory=frozenset)
    ranges: list[list[list[int]]] | None = None
    fnuz: bool = False


class Setup:
    """A case's tensors on a device, its cache filled through `write_kv`, everything else NaN."""

    def __init__(self, case: Case, device: str = "cpu", only: int | None = None) -> None:
        """only: just this request, with the tokens that it has in the whole batch."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(case.dtype)

        heads, kv_heads = case.heads
        size_v = case.head_size_v or case.head_size
        features = set(case.features) | {"lse"}
        features |= {"sliding_window"} if case.window else set()
        features |= {"softcap"} if case.softcap else set()
        self.spec = AttentionSpec(
            num_heads=heads, num_kv_heads=kv_heads, head_size=case.head_size, head_size_v=size_v, dtype=case.dtype,
            softmax_scale=case.head_size**-0.5, kv_dtype=case.kv_dtype, block_size=case.block_size,
            sliding_window=case.window, softcap=case.softcap, features=frozenset(features), kv_layout=case.layout,
            fnuz=case.fnuz, attn_type="decoder" if case.causal or case.block_size else "encoder_only",
        )  # fmt: skip
        query = [random(n, heads, case.head_size) for n in case.queries]
        key = [random(n, kv_heads, case.head_size) for n in case.keys]
        value = [random(n, kv_heads, size_v) for n in case.keys]
        per_head = "per_head_quant_scales" in features
        scales = (torch.rand(2, kv_heads, generator=generator) + 0.5).to(device)
        scales = scales if per_head else scales[:, :1].expand(2, kv_heads)
        quantised = self.spec.quantised
        self.params = LayerParams(
            sinks=torch.randn(heads, generator=generator).to(device) if "sinks" in features else None,
            alibi_slopes=torch.rand(heads, generator=generator).to(device) if "alibi" in features else None,
            k_scale=scales[0] if quantised else None,
            v_scale=scales[1] if quantised else None,
        )
        chosen = range(len(case.queries)) if only is None else [only]
        queries, keys = [case.queries[i] for i in chosen], [case.keys[i] for i in chosen]
        poison = torch.full((PADDING, heads, case.head_size), torch.nan, dtype=case.dtype)
        self.query = torch.cat([*(query[i] for i in chosen), poison]).to(device)
        self.key = torch.cat([*(key[i] for i in chosen), poison[:, :kv_heads]]).to(device)
        self.value = torch.cat(
            [*(value[i] for i in chosen), poison[:, :kv_heads].new_full((3, kv_heads, size_v), torch.nan)]
        )
        self.value = self.value.to(device)
        self.output = torch.full((len(self.query), heads, size_v), torch.nan, dtype=case.dtype, device=device)
        self.lse = torch.full((heads, len(self.query)), torch.nan, device=device)
        ranges = torch.tensor([case.ranges[i] for i in chosen], dtype=torch.int32) if case.ranges else None
        table = slots = None
        self.cache: KVCache | None = None
        if case.block_size is not None:
            needed = [-(-n // case.block_size) for n in keys]
            free = torch.randperm(sum(needed) + 2, generator=generator).tolist()
            # entries that mean nothing point far outside the cache
            table = torch.full((len(keys), max([*needed, 0]) + 1), 2**30, dtype=torch.int32)
            places = []
            for row, (count, length) in enumerate(zip(needed, keys, strict=True)):
                table[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
                at = torch.arange(length)
                places.append(table[row, at // case.block_size].long() * case.block_size + at % case.block_size)
            slots = torch.cat([*places, torch.full((PADDING,), -1)]).to(device)
            shape = triton_attn.kv_cache_shape(self.spec, sum(needed) + 2)
            self.cache = KVCache(
                torch.full(shape.key, torch.nan).to(shape.dtype).to(device),
                torch.full(shape.value, torch.nan).to(shape.dtype).to(device),
            )
        self.batch = BatchMetadata.build(
            queries, keys, device=device, block_table=None if table is None else table.to(device), slot_mapping=slots,
            causal=case.causal, mm_prefix=None if ranges is None else ranges.to(device),
        )  # fmt: skip
        self.plan = triton_attn.plan(self.spec, self.batch)
        if self.cache is not None:
            triton_attn.write_kv(self.spec, self.plan, self.key, self.value, self.cache, params=self.params)

    def forward(self) -> None:
        packed = {} if self.cache else {"key": self.key, "value": self.value}
        call = Call(self.query, self.cache, self.output, lse=self.lse, params=self.params, **packed)
        triton_attn.forward(self.spec, self.plan, call)

    def check(self) -> None:
        """Output and LSE are as near to float64 as rounding allows, and nothing else was touched."""
        packed = {} if self.cache else {"key": self.key, "value": self.value}
        exact = reference.attention(self.spec, self.batch, self.query, self.cache, params=self.params, **packed)
        tokens = self.batch.num_tokens
        scale = 1.0 if self.params.v_scale is None else float(self.params.v_scale.max())
        largest = (
            float(self.value[: len(self.value) - PADDING].abs().max()) * scale * 1.1 if len(self.value) > 3 else 0.0
        )
        limit, limit_lse = bounds(self.spec, self.batch, exact, largest)
        output, lse = self.output.cpu().double(), self.lse.cpu().double()
        assert output[tokens:].isnan().all()
        assert lse[:, tokens:].isnan().all()
        wrong = (output[:tokens] - exact.output).abs() - limit
        assert wrong.le(0).all(), f"output is off by {float(wrong.max()):.2g} more than rounding explains"
        empty = exact.lse == -torch.inf
        assert torch.equal(lse[:, :tokens] == -torch.inf, empty)
        wrong = (lse[:, :tokens] - exact.lse).abs().masked_fill(empty, 0) - limit_lse
        assert wrong.le(0).all(), f"lse is off by {float(wrong.max()):.2g} more than rounding explains"
