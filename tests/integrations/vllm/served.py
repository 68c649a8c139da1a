"""One step of one layer through attnreg's backend, with vLLM's own metadata, specs and KV caches, on the processor."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# as much of vLLM's configuration as the builder looks at
CONFIG = SimpleNamespace(
    model_config=None, speculative_config=None, scheduler_config=SimpleNamespace(max_num_seqs=16)
)  # fmt: skip


@dataclass
class Layer:
    """A layer as a model of vLLM makes it, and the lengths of a step: (queries, keys before them) per request."""

    lengths: list[tuple[int, int]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    head_size_v: int | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: str = "auto"
    block_size: int = 16
    layout: str = "LBNHC"
    window: int | None = None
    softcap: float | None = None
    slopes: list[float] | None = None
    sinks: bool = False
    scale: float = 0.3
    scales: tuple[Any, Any] = (1.0, 1.0)
    attn_type: str = "decoder"
    causal: bool | list[bool] = True
    # what vLLM's metadata says, where a wrapper of vLLM's makes another thing of it
    says_causal: bool = False
    # a query sees the keys of its own chunk of so many positions alone
    chunk: int = 0
    ranges: dict[int, list[tuple[int, int]]] | None = None
    # ranges end at the window, as Gemma 4 says of its layers
    clamps: bool = False
    encoder_lens: list[int] | None = None
    # vLLM's wrapper for cross attention is told the decoder's lengths, and puts the encoder's in their place
    wrapped: bool = False
    # requests and rows beyond the real ones, as a graph of a fixed size has them
    padding: int = 0
    # how far the host's bound is above the true length; negative: below it, as a draft model's may be
    slack: int = 0
    # kernel blocks for each block of the manager, and bytes of padding after each page
    kernel_blocks: int = 1
    page_padding: int = 0
    shares: bool = False
    # of an output that vLLM's compiler has attention write in fp8
    output_scale: Tensor | None = None
    config: Any = field(default_factory=lambda: CONFIG)
    backend: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    # entries of block tables past the last block of a request hold anything
    junk: bool = False
    # the host has no bounds of single requests
    bounds: bool = True
    # queries, keys and values are views of one tensor
    fused: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(len(self.lengths))
        self.value_size = self.head_size_v or self.head_size
        keys = self.encoder_lens or [before + new for new, before in self.lengths]
        tokens = sum(new for new, _ in self.lengths)
        self.query = torch.randn(tokens + self.padding, self.num_heads, self.head_size).to(self.dtype)
        self.keys = [torch.randn(n, self.num_kv_heads, self.head_size).to(self.dtype) for n in keys]
        self.values = [torch.randn(n, self.num_kv_heads, self.value_size).to(self.dtype) for n in keys]
        if self.backend is None:
            from attnreg.integrations.vllm.backend import AttnregBackend

            self.backend = AttnregBackend
        self.sink_values = torch.randn(self.num_heads) if self.sinks else None

    # through vLLM -----------------------------------------------------------------------------------------------------

    def run(self) -> Tensor:
        """The output of a step through the backend: the history is in the cache, the new tokens are given."""
        self.table = self._block_table()
        self.cache = self._kv_cache()
        self.impl = self._impl()
        # the history goes in as a step of its own, which is a prefill of every request
        if self.encoder_lens is None and any(before for _, before in self.lengths):
            lengths, query, padding, shares = self.lengths, self.query, self.padding, self.shares
            self.lengths, self.padding, self.shares = [(before, 0) for _, before in lengths], 0, False
            self.query = torch.zeros(sum(n for n, _ in self.lengths), *query.shape[1:], dtype=self.dtype)
            self._step()
            self.lengths, self.query, self.padding, self.shares = lengths, query, padding, shares
        return self._step()

    def _step(self) -> Tensor:
        builder = self.backend.get_builder_cls()(self.spec(), ["layer"], self.config, torch.device("cpu"))
        metadata = builder.build(0, self.common())
        tokens = sum(new for new, _ in self.lengths)
        new_keys, new_values = self._new(self.keys), self._new(self.values)
        if self.padding and not self.encoder_lens:
            new_keys, new_values = (torch.cat([x, x[:1].expand(self.padding, -1, -1)]) for x in (new_keys, new_values))
        dtype = self.dtype if self.output_scale is None else torch.float8_e4m3fn
        output = torch.full((len(self.query), self.num_heads, self.value_size), torch.nan).to(dtype)
        layer = SimpleNamespace(
            _k_scale=torch.tensor(self.scales[0], dtype=torch.float32),
            _v_scale=torch.tensor(self.scales[1], dtype=torch.float32),
            kv_sharing_target_layer_name="other" if self.shares else None,
            mm_prefix_clamp_sliding_window=self.clamps,
        )
        given = (None, None) if self.shares else (new_keys, new_values)
        query = self.query
        if self.fused:
            sizes = [query.shape[1], *[self.num_kv_heads] * 2]
            query, *given = torch.cat([query, new_keys, new_values], 1).split(sizes, 1)
        self.impl.forward(layer, query, *given, self.cache, metadata, output, output_scale=self.output_scale)
        self.unwritten = output[tokens:]
        return output[:tokens]

    def _new(self, tensors: list[Tensor]) -> Tensor:
        if self.encoder_lens is not None:
            return torch.cat(tensors)
        return torch.cat([x[before : before + new] for x, (new, before) in zip(tensors, self.lengths, strict=True)])

    def _impl(self) -> Any:
        before = torch.get_default_dtype()
        # as a model is made in vLLM
        torch.set_default_dtype(self.dtype)
        try:
            return self.backend.get_impl_cls()(
                self.num_heads,
                self.head_size,
                self.scale,
                self.num_kv_heads,
                self.slopes,
                self.window,
                self.kv_dtype,
                self.softcap,
                self.attn_type,
                "other" if self.shares else None,
                **({"sinks": self.sink_values} if self.sinks else {}),
                **self.extra,
            )
        finally:
            torch.set_default_dtype(before)

    def spec(self) -> Any:
        """vLLM's spec of the layer's cache, of the manager's block size."""
        from vllm.v1.kv_cache_interface import (
            CrossAttentionSpec,
            EncoderOnlyAttentionSpec,
            FullAttentionSpec,
            SlidingWindowSpec,
        )
        from vllm.v1.kv_cache_interface import get_kv_quant_mode as quant_mode

        shape = {"num_kv_heads": self.num_kv_heads, "head_size": self.head_size, "dtype": self._cache_dtype()}
        shape |= {"block_size": self.block_size * self.kernel_blocks, "kv_quant_mode": quant_mode(self.kv_dtype)}
        if self.head_size_v:
            shape["head_size_v"] = self.head_size_v
        if self.attn_type in ("encoder", "encoder_only"):
            return EncoderOnlyAttentionSpec(**shape)
        if self.attn_type == "encoder_decoder":
            return CrossAttentionSpec(**shape)
        if self.window is not None:
            return SlidingWindowSpec(**shape, sliding_window=self.window)
        return FullAttentionSpec(**shape)

    def _cache_dtype(self) -> torch.dtype:
        from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE as DTYPES

        return self.dtype if self.kv_dtype == "auto" else DTYPES[self.kv_dtype]

    def _kv_cache(self) -> Tensor:
        """The last of two layers' views that vLLM makes of one buffer, full of what must not be read."""
        from vllm.v1.kv_cache_interface import KVCacheTensor, create_kv_cache_views
        from vllm.v1.kv_cache_layout import KVCacheLayout

        spec, layout = self.spec(), KVCacheLayout[self.layout]
        blocks = self.num_blocks // self.kernel_blocks
        page = spec.real_page_size_bytes + self.page_padding
        outer = layout.is_layer_compact
        tensor = KVCacheTensor(
            size=page * blocks * 2,
            layers=["other", "layer"],
            layer_stride=page * blocks if outer else page,
            block_stride=page if outer else 2 * page,
        )
        raw = torch.full((tensor.size,), -1, dtype=torch.int8)
        kernel = self.block_size if self.kernel_blocks > 1 else None
        views = create_kv_cache_views(raw, spec, blocks, layout, tensor, kernel_block_size=kernel)
        view: Tensor = views[1]
        return view

    def _block_table(self) -> Tensor:
        """Blocks in no order, of the kernel's size; those of one block of the manager stay together."""
        longest = max(len(k) for k in self.keys) + max(self.slack, 3)
        width, ratio = -(-longest // (self.block_size * self.kernel_blocks)), self.kernel_blocks
        requests = len(self.lengths)
        managed = torch.randperm(requests * width) + 1
        self.num_blocks = (requests * width + 1) * ratio
        table = (managed.view(requests, width)[..., None] * ratio + torch.arange(ratio)).flatten(1).to(torch.int32)
        if self.junk:
            used = torch.tensor([-(-len(k) // self.block_size) for k in self.keys])
            past = torch.arange(table.shape[1]) >= used[:, None]
            table = table.masked_fill(past, 2**31 - 1).masked_fill(past & (torch.arange(table.shape[1]) % 2 > 0), -7)
        return table

    def common(self) -> Any:
        """vLLM's metadata of the step."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        queries = [new for new, _ in self.lengths] + [0] * self.padding
        own = self.encoder_lens is None or self.wrapped
        keys = [new + before for new, before in self.lengths] if own else list(self.encoder_lens or ())
        keys += [0] * self.padding
        starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lens = torch.tensor(keys, dtype=torch.int32)
        bounds = torch.where(lens > 0, lens + self.slack, lens)
        table = torch.cat([self.table, torch.zeros(self.padding, self.table.shape[1], dtype=torch.int32)])
        slots = self._slots()
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=lens,
            seq_lens_cpu_upper_bound=bounds if self.bounds else None,
            num_reqs=len(queries),
            num_actual_tokens=sum(queries) + self.padding,
            max_query_len=max(queries),
            max_seq_len=int(bounds.max()),
            block_table_tensor=table,
            slot_mapping=slots,
            causal=self.says_causal or self._causal(),
            mm_req_doc_ranges=self.ranges,
            **self._of_the_encoder(),
        )

    def _causal(self) -> Any:
        if isinstance(self.causal, list):
            return torch.tensor([*self.causal, *[True] * self.padding])
        return self.causal and self.attn_type == "decoder"

    def _of_the_encoder(self) -> dict[str, Any]:
        if self.encoder_lens is None:
            return {}
        lens = torch.tensor(self.encoder_lens, dtype=torch.int32)
        return {"encoder_seq_lens": lens, "encoder_seq_lens_cpu": lens.numpy()}

    def _slots(self) -> Tensor:
        slots = []
        for i, (new, before) in enumerate(self.lengths):
            at = torch.arange(len(self.keys[i])) if self.encoder_lens else torch.arange(before, before + new)
            slots.append(self.table[i].long()[at // self.block_size] * self.block_size + at % self.block_size)
        return torch.cat([*slots, torch.full((0 if self.encoder_lens else self.padding,), -1)])

    # in float64, without attnreg --

    def expected(self) -> Tensor:
        """The same attention, request by request, with nothing of attnreg's."""
        rows, at = [], 0
        for i, (new, before) in enumerate(self.lengths):
            q = self.query[at : at + new].double()
            k, v = self._stored(self.keys[i], self.scales[0]), self._stored(self.values[i], self.scales[1])
            rows.append(self._attend(i, q, k, v, len(k) - new if self.encoder_lens is None else 0, before))
            at += new
        return torch.cat(rows)

    def _stored(self, x: Tensor, scale: Any) -> Tensor:
        if not self.kv_dtype.startswith("fp8"):
            return x.to(self._cache_dtype()).double()
        dtype = torch.float8_e5m2 if self.kv_dtype == "fp8_e5m2" else torch.float8_e4m3fn
        factor = torch.tensor(scale, dtype=torch.float32).view(-1, 1)
        most = torch.finfo(dtype).max
        return (x.float() / factor).clamp(-most, most).to(dtype).double() * factor.double()

    def _attend(self, request: int, q: Tensor, k: Tensor, v: Tensor, first: int, before: int) -> Tensor:
        group = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        x = self.scale * torch.einsum("qhd,khd->hqk", q, k)
        if self.softcap:
            x = self.softcap * torch.tanh(x / self.softcap)
        distance = (torch.arange(len(q)) + first)[:, None] - torch.arange(len(k))
        if self.slopes:
            x = x - torch.tensor(self.slopes).double()[:, None, None] * distance.abs()
        seen = torch.ones_like(distance, dtype=torch.bool)
        causal = self.causal[request] if isinstance(self.causal, list) else self.causal
        if self.attn_type == "decoder" and causal:
            seen = distance >= 0
        if self.chunk:
            own = (torch.arange(len(q)) + first)[:, None] // self.chunk
            seen = seen & (own == torch.arange(len(k)) // self.chunk)
        if self.window:
            seen = seen & (distance.abs() < self.window)
        for begin, last in (self.ranges or {}).get(request, ()):
            position, key = (torch.arange(len(q)) + first)[:, None], torch.arange(len(k))
            beside = (position >= begin) & (position <= last) & (key >= begin) & (key <= last)
            seen = seen | (beside & (distance < self.window) if self.clamps and self.window else beside)
        x = x.masked_fill(~seen, -torch.inf)
        if self.sink_values is not None:
            x = torch.cat([x, self.sink_values.double()[:, None, None].expand(-1, len(q), 1)], -1)
        weights = x.softmax(-1)[..., : len(k)]
        return torch.einsum("hqk,khd->qhd", weights, v)


def close(layer: Layer) -> None:
    """Run a layer, and hold it against its reference."""
    got, expected = layer.run(), layer.expected()
    tolerance = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[layer.dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
    # rows of padding are left alone
    assert layer.unwritten.isnan().all()
