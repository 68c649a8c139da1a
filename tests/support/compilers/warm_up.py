"""The kernels that batches launch on an H200, planned on a machine without a GPU: those of warm-ups, and of others.

It is imported by a process that compiles alone (compiler.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from attnreg.kernels import triton_attn, triton_mla
from attnreg.kernels.hopper import attention as hopper_attn
from attnreg.kernels.hopper.latents import attention as hopper_mla
from attnreg.kernels.hopper.latents import plans as latent_plans
from attnreg.kernels.hopper.packed import attention as hopper_turboquant
from attnreg.kernels.hopper.prompts import plans as prefill_plans
from attnreg.kernels.triton import plans
from attnreg.kernels.triton.launch import Bound
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, KVCache, LayerParams
from attnreg.runtime.warm_up import warm_up_batches
from support.compilers import hopper_packed
from support.compilers.hopper_attn import BF16, PLACES, on_hopper
from support.layers.kernel_trials import Case, trial_of

SINKS = frozenset({"sinks"})
ONE = {"queries": [1], "keys": [1]}
LAYERS: dict[str, tuple[Any, Case]] = {
    "HOPPER_ATTN": (hopper_attn, Case(**ONE, **BF16)),
    "HOPPER_ATTN, fp8": (hopper_attn, Case(**ONE, **BF16, kv_dtype="fp8")),
    "HOPPER_ATTN, window": (
        hopper_attn,
        Case(**ONE, heads=(64, 8), head_size=64, dtype=torch.bfloat16, window=128, features=SINKS),
    ),
    "HOPPER_ATTN, heads of 64": (hopper_attn, Case(**ONE, heads=(16, 16), head_size=64, dtype=torch.bfloat16)),
    "HOPPER_ATTN, heads of 256": (hopper_attn, Case(**ONE, heads=(16, 4), head_size=256, dtype=torch.bfloat16)),
    "HOPPER_ATTN, invariant": (hopper_attn, Case(**ONE, **BF16, features=frozenset({"batch_invariant"}))),
    "TRITON_ATTN": (triton_attn, Case(**ONE, **BF16)),
    "TRITON_ATTN, sinks": (triton_attn, Case(**ONE, heads=(64, 8), head_size=64, dtype=torch.bfloat16, features=SINKS)),
    "TRITON_ATTN, float32": (triton_attn, Case(**ONE, heads=(8, 2), head_size=64, dtype=torch.float32)),
    "TURBOQUANT": (hopper_turboquant, replace(hopper_packed.TOKENS, **ONE)),
}
# modules, and query heads
LATENTS: dict[str, tuple[Any, int]] = {
    "HOPPER_MLA": (hopper_mla, 128),
    "HOPPER_MLA, 16 heads": (hopper_mla, 16),
    "TRITON_MLA": (triton_mla, 128),
}


def missed(name: str, tokens: int, reqs: int, seq_len: int, count: int) -> tuple[int, list[Any]]:
    """The kinds of kernel that a layer's warm-up launches, and those of so many random batches that it does not."""
    plans._launches.cache_clear()
    bounds = {"max_num_tokens": tokens, "max_num_reqs": reqs, "max_seq_len": seq_len}
    with _planned(name) as (spec, launched):
        warm = launched(warm_up_batches(spec, **bounds, device="cpu"))
        drawn = random.Random(name)
        others = launched(_batch(spec, _random_lengths(drawn, tokens, reqs, seq_len)) for _ in range(count))
    assert others
    return len(warm), [repr(kind) for kind in others - warm]


@contextmanager
def _planned(name: str) -> Iterator[tuple[AttentionSpec, Any]]:
    """The spec of a layer, and the function that says what batches of it launch."""
    seen: set[Any] = set()

    def record(bound: Any, *_: Any) -> None:
        if isinstance(bound, Bound):
            seen.add((bound.variant.function.__name__, bound.variant.code, bound.key))
            return
        seen.add(bound.code)
        if bound.code.split:
            seen.add(("merge", bound.merge.bound.variant.code))

    before = Bound.launch, prefill_plans.PromptLaunch.run
    Bound.launch, prefill_plans.PromptLaunch.run = record, record  # type: ignore[assignment, method-assign]
    places = [*PLACES, *hopper_packed.PLACES, (latent_plans, "require")]
    try:
        with on_hopper([place for place in places if hasattr(*place)]):
            module, spec, cache, params = _layer(name)
            heads, dtype = spec.num_heads, spec.dtype

            def launched(batches: Iterable[BatchMetadata]) -> set[Any]:
                seen.clear()
                for batch in batches:
                    # nothing is read
                    query = torch.empty(batch.num_tokens, heads, spec.head_size, dtype=dtype)
                    output = torch.empty(batch.num_tokens, heads, spec.head_size_v, dtype=dtype)
                    module.forward(spec, module.plan(spec, batch), Call(query, cache, output, params=params))
                return {*seen}

            yield spec, launched
    finally:
        Bound.launch, prefill_plans.PromptLaunch.run = before  # type: ignore[method-assign]


def _layer(name: str) -> tuple[Any, AttentionSpec, KVCache, LayerParams]:
    if name in LAYERS:
        module, case = LAYERS[name]
        trial = trial_of(case, "cpu", module=module)
        assert trial.cache is not None
        return module, trial.layer.spec, trial.cache, trial.layer.params
    module, heads = LATENTS[name]
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=1, head_size=576, head_size_v=512, dtype=torch.bfloat16, softmax_scale=0.1,
        block_size=64, latent=True,
    )  # fmt: skip
    key = torch.empty(1, 64, 1, 576, dtype=torch.bfloat16)
    return module, spec, KVCache(key, key[..., :512]), LayerParams()


def _batch(spec: AttentionSpec, lengths: Sequence[tuple[int, int]]) -> BatchMetadata:
    queries, keys = zip(*lengths, strict=True)
    table = torch.zeros(len(lengths), -(-max(keys) // (spec.block_size or 1)), dtype=torch.int32)
    slots = torch.full((sum(queries),), -1, dtype=torch.int64)
    return BatchMetadata.build(queries, keys, block_table=table, slot_mapping=slots)


def _random_lengths(drawn: random.Random, tokens: int, reqs: int, seq_len: int) -> list[tuple[int, int]]:
    """The queries and keys of a step: decodes, drafts, prompts, all of them."""
    kind, lengths, left = (
        drawn.choice(["decode", "draft", "prompts", "mixed", "mixed", "any"]),
        list[tuple[int, int]](),
        tokens,
    )
    for _ in range(int(reqs ** drawn.random())):
        size = {
            "decode": 1, "draft": drawn.choice([2, 3, 4, 5, 8]), "prompts": int(tokens ** drawn.uniform(0.3, 1)),
            "mixed": 1 if drawn.random() < 0.8 else int(tokens ** drawn.random()), "any": int(tokens ** drawn.random()),
        }[kind]  # fmt: skip
        queries = min(size, left, seq_len)
        if not queries:
            break
        context = int(seq_len ** drawn.random()) if drawn.random() < 0.8 else 0
        lengths.append((queries, min(queries + context, seq_len)))
        left -= queries
    return lengths
