"""TRITON_MLA_SPARSE: TRITON_MLA's kernels over the tokens that an indexer chose, behind the runtime's contract."""

from __future__ import annotations

from attnreg.kernels.mla.cache import write_latents as write_kv
from attnreg.kernels.mla.plans import LatentPlan, validate_spec
from attnreg.kernels.mla.sparse import by_token
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, KVCacheShape, paged_cache_shape

__all__ = ["CAPTURABLE", "forward", "kv_cache_shape", "plan", "write_kv"]

CAPTURABLE = True


def kv_cache_shape(spec: AttentionSpec, num_blocks: int) -> KVCacheShape:
    """The shape of one layer's cache of latents."""
    validate_spec(spec)
    return paged_cache_shape(spec, num_blocks)


def plan(spec: AttentionSpec, batch: BatchMetadata) -> SparsePlan:
    """The batch, whose launches depend on the rows of a call. Raises `SpecError` and `BatchError`."""
    return SparsePlan(spec, batch)


class SparsePlan:
    """A batch, and the slots of its new keys. It holds the batch's tensors and not the batch, which holds its plans."""

    def __init__(self, spec: AttentionSpec, batch: BatchMetadata) -> None:
        validate_spec(spec)
        if batch.block_table is None:
            raise BatchError(["the batch has no block_table: MLA in its latent form reads the cache"])
        self.slot_mapping = batch.slot_mapping
        self.batch = BatchMetadata(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            query_start_loc_cpu=batch.query_start_loc_cpu,
            seq_lens_cpu=batch.seq_lens_cpu,
            block_table=batch.block_table,
            causal=batch.causal,
        )


def forward(spec: AttentionSpec, plan: SparsePlan, call: Call) -> None:
    """Writes the attention of each query to the latents that it chose into ``output``, and into ``lse``."""
    if not call.query.shape[0]:
        return
    dense, batch, call = by_token(spec, plan.batch, call)
    LatentPlan(dense, batch).run(call)
