# mypy: disable-error-code="misc"
"""vLLM's metadata of a step as batches of attnreg's runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_dcp_world_size_and_rank
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

from attnreg.runtime.interface import BatchMetadata
from attnreg.runtime.parallel.attention import ContextParallel
from attnreg.runtime.parallel.batch import ShardedBatch
from attnreg.runtime.tensors import is_captured
from attnreg.runtime.validation import debugging

# vLLM's wrapper of a builder for prefills that skip layers. It copies query_start_loc to the host, and does not wait
# for the copy
_FAST_PREFILL = "create_fast_prefill_custom_backend"


class Host(NamedTuple):
    """The lengths of a group's steps that the host knows.

    starts: whether it knows the queries of each request; else it knows their sum and the most of one. bounds: whether
    it knows a bound of each request's keys; else one bound for all. left_out: tokens by which bounds may be too low, in
    requests of up to ``longest`` tokens.
    """

    starts: bool
    bounds: bool
    left_out: int
    longest: int


@dataclass
class AttnregMetadata(AttentionMetadata):
    """One step of the layers of one group, as vLLM has it. The batch is made when the first layer asks for it.

    So a step that only replays a graph makes none, and vLLM may still replace ``slot_mapping``, as it does for cross
    attention. ``seq_lens_cpu`` are upper bounds. Tensors may have more rows than requests, for padding.

    interleave: for a cache that ranks share, the consecutive tokens that a rank gets in its turn; else 0. With a shared
    cache, block_table and slot_mapping are of this rank's part, and lengths are of the whole.
    """

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor | None
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor
    mm_prefix: Tensor | None
    host: Host
    interleave: int = 0
    made: BatchMetadata | None = None
    shards: dict[tuple[object, ...], ShardedBatch] = field(default_factory=dict)

    def batch(self, *, paged: bool) -> BatchMetadata:
        """The batch of the step; paged: keys are in the cache, else they are the queries' own tokens."""
        made = self.made
        if made is None:
            made = self.made = self._batch(paged)
        return made

    def shard(self, parallel: ContextParallel) -> ShardedBatch:
        """This rank's part of the step, for all layers of a kind.

        It is computed on the device. A captured graph has its own, which each replay computes again.
        """
        kind = is_captured(self.seq_lens), *parallel.kind
        made = self.shards.get(kind)
        if made is None:
            made = self.shards[kind] = parallel.shard(self.batch(paged=True), slots=True)
        return made

    def _batch(self, paged: bool) -> BatchMetadata:
        requests, causal = self.num_reqs, self.causal
        # vLLM may pass numpy's integers
        max_query_len, max_seq_len = int(self.max_query_len), int(self.max_seq_len)
        starts = _first(self.query_start_loc_cpu, requests + 1)
        if paged:
            bounds, max_seq_len = self._bounds(max_seq_len)
            if not self.host.starts:
                # with ATTNREG_DEBUG the host may wait for the device, and compares its numbers with the device's
                debug = debugging()
                starts = _first(self.query_start_loc, requests + 1).cpu() if debug else self._some_starts(bounds)
        else:
            bounds = starts.diff()
        return BatchMetadata(
            query_start_loc=_first(self.query_start_loc, requests + 1),
            seq_lens=_first(self.seq_lens, requests),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            query_start_loc_cpu=starts,
            seq_lens_cpu=bounds,
            block_table=_first(self.block_table, requests) if paged else None,
            slot_mapping=self.slot_mapping if paged else None,
            causal=_first(causal, requests) if isinstance(causal, Tensor) else causal,
            mm_prefix=self.mm_prefix,
        )

    def _bounds(self, longest: int) -> tuple[Tensor, int]:
        """Upper bounds of each request's keys, and of the longest request's."""
        if self.seq_lens_cpu is None or not self.host.bounds:
            return torch.full((self.num_reqs,), longest, dtype=torch.int32, device="cpu"), longest
        bounds = _first(self.seq_lens_cpu, self.num_reqs)
        if self.host.left_out:
            bounds = _with_more(bounds, self.host.left_out, self.host.longest)
        # the bound of a request may exceed ``longest``
        return bounds, max(longest, int(bounds.max()) if self.num_reqs else 0)

    def _some_starts(self, bounds: Tensor) -> Tensor:
        """Prefix sums of assumed numbers of queries, for a host that does not know them.

        They have the step's sum at most. A request has at most max_query_len queries, and no more than it has keys.
        """
        starts = torch.zeros(self.num_reqs + 1, dtype=torch.int32, device="cpu")
        torch.cumsum(bounds.clamp(max=int(self.max_query_len)), 0, out=starts[1:])
        return starts.clamp_(max=int(self.num_actual_tokens))


class AttnregMetadataBuilder(AttentionMetadataBuilder):
    """Builds the metadata of a step from vLLM's; it reads host memory alone."""

    # the layers read all that differs from step to step from vLLM's own buffers on the device
    supports_draft_decode_metadata_update = True

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """ALWAYS: captured launches read the lengths at each replay. UNIFORM_BATCH, without prompts, in two cases.

        A model has ranges of multimodal tokens, whose number a capture would fix. Or ranks share a cache: each step of
        a captured prompt would exchange as much as the longest prompt needs.
        """
        model = vllm_config.model_config
        ranges = model is not None and model.is_mm_prefix_lm
        shared = vllm_config.parallel_config.decode_context_parallel_size > 1
        return AttentionCGSupport.UNIFORM_BATCH if ranges or shared else AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        drafts = vllm_config.speculative_config
        self.host = Host(
            starts=not any(_FAST_PREFILL in cls.__qualname__ for cls in type(self).__mro__),
            # for this class vLLM lengthens the requests on the device alone
            bounds=type(kv_cache_spec).__name__ != "SinkFullAttentionSpec",
            # for a run with a draft model
            left_out=0 if drafts is None else max(1, drafts.num_speculative_tokens or 1),
            longest=0 if drafts is None else vllm_config.model_config.max_model_len,
        )
        self._causal: Tensor | None = None
        # vLLM replicates the caches of some draft models
        ranks, _ = get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)
        self._interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size if ranks > 1 else 0
        # a rank's part must be computed from the lengths of each step
        self.supports_draft_decode_metadata_update = ranks == 1

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> AttnregMetadata:
        common = common_attn_metadata
        causal, ranges = common.causal, common.mm_req_doc_ranges
        return AttnregMetadata(
            num_reqs=common.num_reqs,
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            query_start_loc_cpu=common.query_start_loc_cpu,
            seq_lens=common.seq_lens,
            seq_lens_cpu=common.seq_lens_cpu_upper_bound,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=causal if isinstance(causal, bool) else self._by_request(causal),
            mm_prefix=_ranges(ranges, common.num_reqs, common.seq_lens.device) if ranges else None,
            host=self.host,
            interleave=self._interleave,
        )

    def update_draft_decode_metadata(self, metadata: AttnregMetadata) -> None:
        """Nothing to do: see ``supports_draft_decode_metadata_update``."""

    def _by_request(self, causal: Tensor) -> Tensor:
        """Causality by request as truth values.

        vLLM's integers are converted into memory that stays: each step writes it before it replays a graph.
        """
        if causal.dtype == torch.bool:
            return causal
        if self._causal is None:
            most = self.vllm_config.scheduler_config.max_num_seqs
            self._causal = torch.empty(most, dtype=torch.bool, device=causal.device)
        return self._causal[: causal.shape[0]].copy_(causal)


def _first(tensor: Tensor, rows: int) -> Tensor:
    """The first rows of a tensor; vLLM's may have more, for padding."""
    return tensor if tensor.shape[0] == rows else tensor[:rows]


def _with_more(lengths: Tensor, left_out: int, longest: int) -> Tensor:
    """Bounds that hold for every step of a draft model.

    vLLM's bounds lack the token that the first step adds to each request. If vLLM builds the metadata once for all
    later steps, they lack the tokens of these steps too.
    """
    return torch.where(lengths > 0, (lengths + left_out).clamp(max=longest), lengths).maximum(lengths)


def _ranges(ranges: dict[int, list[tuple[int, int]]], requests: int, device: torch.device) -> Tensor | None:
    """vLLM's ranges of multimodal tokens, which include their last position, as half-open ones."""
    most = max(map(len, ranges.values()))
    if not most:
        return None
    rows = [[(a, b + 1) for a, b in ranges.get(i, ())] for i in range(requests)]
    padded = [[*row, *[(0, 0)] * (most - len(row))] for row in rows]
    on_device: Tensor = async_tensor_h2d(padded, dtype=torch.int32, device=device)
    return on_device.view(requests, most, 2)
