"""TORCH_PREFILL: prompts of MLA in their expanded form by PyTorch's own operations, on any device.

New tokens without context need no LSE, so PyTorch's scaled_dot_product_attention computes them, by any of its fused
kernels. With an LSE, whole float32 score matrices are computed, piece by piece, which is slow.
"""

from __future__ import annotations

from typing import NamedTuple

from attnreg.kernels.dense import pieces
from attnreg.kernels.dense.attention import by_scores, by_sdpa
from attnreg.kernels.dense.cache import write_kv
from attnreg.kernels.dense.pieces import DensePlan
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, paged_cache_shape

__all__ = ["KEYS_APART", "forward", "kv_cache_shape", "plan", "write_kv"]

kv_cache_shape = paged_cache_shape
KEYS_APART = True


class PromptPlan(NamedTuple):
    """The dense calls of a batch, for PyTorch's function and for score matrices (None for layers without an LSE)."""

    plain: DensePlan
    scores: DensePlan | None

    @property
    def written(self) -> object:
        """The batch's writes to a cache."""
        return self.plain.written


def plan(spec: AttentionSpec, batch: BatchMetadata) -> PromptPlan:
    """The dense calls of a batch."""
    scores = pieces.plan(spec, batch, scores=True) if "lse" in spec.features else None
    return PromptPlan(pieces.plan(spec, batch, scores=False), scores)


def forward(spec: AttentionSpec, plan: PromptPlan, call: Call) -> None:
    """Writes the attention of the batch's queries into ``output``, and into ``lse`` if it is given."""
    if call.lse is None or plan.scores is None:
        by_sdpa(spec, plan.plain, call)
    else:
        by_scores(spec, plan.scores, call)
