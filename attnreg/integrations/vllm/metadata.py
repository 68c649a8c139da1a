# mypy: disable-error-code="misc"
"""vLLM's metadata of a step as batches of attnreg's runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

from attnreg.runtime.interface import BatchMetadata


@dataclass
class AttnregMetadata(AttentionMetadata):
    """One step of the layers of one group. The batch is made when the first layer asks for it.

    So a step that only replays a graph makes none, and vLLM may still replace ``slot_mapping``, as it does for cross
    attention. ``seq_lens_cpu`` are upper bounds.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor
    mm_prefix: Tensor | None = None
    made: BatchMetadata | None = None

    def batch(self, *, paged: bool) -> BatchMetadata:
        """The batch of the step; paged: keys are in the cache, else they are the queries' own tokens."""
        made = self.made
        if made is None:
            made = self.made = BatchMetadata(
                query_start_loc=self.query_start_loc,
                seq_lens=self.seq_lens,
                max_query_len=self.max_query_len,
                max_seq_len=self.max_seq_len,
                query_start_loc_cpu=self.query_start_loc_cpu,
                seq_lens_cpu=self.seq_lens_cpu,
                block_table=self.block_table if paged else None,
                slot_mapping=self.slot_mapping if paged else None,
                causal=self.causal,
                mm_prefix=self.mm_prefix,
            )
        return made


class AttnregMetadataBuilder(AttentionMetadataBuilder):
    """Builds the metadata of a step from vLLM's; it reads host memory alone."""

    # all that differs from step to step is read from vLLM's own buffers on the device
    supports_draft_decode_metadata_update = True

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Whatever the lengths are, captured launches compute with those of the replay.

        Not so the ranges of multimodal tokens, whose number differs: batches with prompts are not captured then.
        """
        model = vllm_config.model_config
        ranges = model is not None and model.is_mm_prefix_lm
        return AttentionCGSupport.UNIFORM_BATCH if ranges else AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # there vLLM lengthens the requests on the device alone
        self.exact_bounds = type(kv_cache_spec).__name__ != "SinkFullAttentionSpec"
        # of a run that drafts: the tokens that bounds may leave out, and the longest request
        drafts = vllm_config.speculative_config
        self.left_out = 0 if drafts is None else max(1, drafts.num_speculative_tokens or 1)
        self.longest = 0 if drafts is None else vllm_config.model_config.max_model_len

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> AttnregMetadata:
        common = common_attn_metadata
        requests, causal = common.num_reqs, common.causal
        # numpy's integers among them
        lengths, max_seq_len = common.seq_lens_cpu_upper_bound, int(common.max_seq_len)
        if lengths is None or not self.exact_bounds:
            lengths = torch.full((requests,), max_seq_len, dtype=torch.int32, device="cpu")
        else:
            lengths = _first(lengths, requests)
            if self.left_out:
                lengths = _with_more(lengths, self.left_out, self.longest)
            # a bound of one request may pass the longest that there can be
            max_seq_len = max(max_seq_len, int(lengths.max()) if requests else 0)
        return AttnregMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=int(common.max_query_len),
            max_seq_len=max_seq_len,
            query_start_loc=_first(common.query_start_loc, requests + 1),
            query_start_loc_cpu=_first(common.query_start_loc_cpu, requests + 1),
            seq_lens=_first(common.seq_lens, requests),
            seq_lens_cpu=lengths,
            block_table=_first(common.block_table_tensor, requests),
            slot_mapping=common.slot_mapping,
            causal=_first(causal, requests) if isinstance(causal, Tensor) else causal,
            mm_prefix=_ranges(common.mm_req_doc_ranges, requests, common.seq_lens.device),
        )

    def update_draft_decode_metadata(self, metadata: AttnregMetadata) -> None:
        """Nothing to do: see ``supports_draft_decode_metadata_update``."""


def _first(tensor: Tensor, rows: int) -> Tensor:
    """The first rows of a tensor; vLLM's may have more, for padding."""
    return tensor if tensor.shape[0] == rows else tensor[:rows]


def _with_more(lengths: Tensor, left_out: int, longest: int) -> Tensor:
    """Bounds that hold for every step of a draft model.

    vLLM's leave out the token that its first step puts into each request, and where it builds the metadata of the
    later steps once, those that they append.
    """
    return torch.where(lengths > 0, (lengths + left_out).clamp(max=longest), lengths).maximum(lengths)


def _ranges(ranges: dict[int, list[tuple[int, int]]] | None, requests: int, device: torch.device) -> Tensor | None:
    """vLLM's ranges of multimodal tokens, which include their last position, as half-open ones."""
    if not ranges or not any(ranges.values()):
        return None
    most = max(map(len, ranges.values()))
    rows = [[(a, b + 1) for a, b in ranges.get(i, ())] for i in range(requests)]
    padded = [[*row, *[(0, 0)] * (most - len(row))] for row in rows]
    on_device: Tensor = async_tensor_h2d(padded, dtype=torch.int32, device=device)
    return on_device.view(requests, most, 2)
