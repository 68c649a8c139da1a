"""What ranks cannot share is refused on every one of them, and none waits for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.layers.ranks import Failure, Ranks
from support.layers.sharded import Case, batch_of, inputs, layer_of, poisoned_cache, sharded

from attnreg import BatchError, BatchMetadata, SpecError
from attnreg.runtime.parallel.attention import ContextParallel

STEPS = (((3, 2), (3, 2)), ((1, 1), (4, 3)))
LSE = {"features": {"lse"}}


def by_rank(rank: int, *cases: Case) -> Any:
    return sharded(rank, cases[rank % len(cases)])


def refused(group: Ranks, *cases: Case) -> list[Failure]:
    found = group.run(by_rank, *cases)
    assert all(isinstance(one, Failure) for one in found), found
    return found


@pytest.mark.parametrize(
    ("case", "kind", "problem"),
    [
        (Case(interleave=3, request=LSE), "SpecError", "interleave is 3 and block_size is 4; the first must divide"),
        (
            Case(
                backend="TORCH_MLA_SPARSE", numbers={"softmax_scale": 0.2},
                request={**LSE, "attention": "mla_sparse", "phase": "decode", "head_size": 48, "head_size_v": 32,
                         "num_kv_heads": 1},
            ),
            "SpecError", "the layer is of sparse MLA, whose indices name tokens of the whole context",
        ),
        (Case(interleave=0, request=LSE), "SpecError", "interleave is 0; expected an integer of at least 1"),
        (
            Case(request={"features": {"lse", "alibi"}}, numbers={"alibi_slopes": (4,)}), "SpecError",
            "the layer has alibi, which compares queries with positions in their context",
        ),
        (Case(request={"features": {"lse", "chunk"}}, numbers={"chunk": 8}), "SpecError", "the layer has chunk, which"),
        (Case(request={"features": {"lse", "mm_prefix"}}), "SpecError", "the layer has mm_prefix, which"),
        (
            Case(request={**LSE, "attn_type": "encoder_decoder"}, causal=False), "SpecError",
            "attn_type is encoder_decoder; ranks share the cache of a decoder",
        ),
        (
            Case(
                backend="TURBOQUANT", platform={"platform": "cuda", "arch": "sm89"}, numbers={"sliding_window": 3},
                # as many heads as a block has tokens: in that shape keys of a window could be mistaken for pages
                request={"features": {"lse", "sliding_window"}, "dtype": "float16", "kv_dtype": "turboquant_k8v4",
                         "head_size": 64, "block_size": 16, "num_heads": 16, "num_kv_heads": 16},
            ),
            "SpecError", "kv_dtype is turboquant_k8v4, and the layer has a window; pages of codes are not copied",
        ),
        (Case(backend="TORCH_SDPA"), "NoBackendError", "TORCH_SDPA/gathered  lse is not supported"),
    ],
)  # fmt: skip
def test_a_layer_that_cannot_be_shared(ranks: Callable[[int], Ranks], case: Case, kind: str, problem: str) -> None:
    for failure in refused(ranks(2), replace(case, steps=STEPS)):
        assert failure.kind == kind
        assert problem in failure.text


def test_layers_that_differ_between_ranks(ranks: Callable[[int], Ranks]) -> None:
    one = Case(steps=STEPS, request=LSE)
    for other, problem in (
        (
            replace(one, request={**LSE, "dtype": "float16"}),
            "dtype is torch.float32 on rank 0, torch.float16 on rank 1",
        ),
        (replace(one, interleave=2), "interleave is 1 on rank 0, 2 on rank 1; ranks that share a cache must be alike"),
        (replace(one, numbers={"softmax_scale": 0.5}), "softmax_scale is 0.25 on rank 0, 0.5 on rank 1"),
        (
            replace(one, by_head=True, request={**one.request, "num_heads": 8}),
            "by_head is False on rank 0, True on rank 1",
        ),
        (replace(one, interleave=3), "rank 1: interleave is 3 and block_size is 4"),
    ):
        first, second = refused(ranks(2), one, other)
        assert first.kind == second.kind == "SpecError"
        assert problem in first.text


def call(rank: int, case: Case, wrong: int, change: str) -> Any:
    """One step, in which one rank's argument is wrong; then one in which all are right."""
    layer = layer_of(case)
    parallel = ContextParallel(layer)
    queries, keys = case.steps[0]
    cache = poisoned_cache(layer, 8, "cpu")
    batch = parallel.shard(batch_of(case, 8, queries, keys, step=0, slots=False))
    query, key, value = inputs(case, layer, 0, sum(queries))
    given: dict[str, Any] = {"query": query, "key": key, "value": value, "kv_cache": cache, "batch": batch}
    right, output = dict(given), torch.empty(5, 4, 16)
    if rank == wrong:
        given |= {
            "tokens": lambda: {"batch": parallel.shard(batch_of(case, 8, (1,), (1,), step=0, slots=False))},
            "query": lambda: {"query": query[:, :3]},
            "no query": lambda: {"query": None},
            "short": lambda: {"query": query[:2]},
            "rows": lambda: {"query": torch.cat([query, query])},
            "key": lambda: {"key": key.half()},
            "no value": lambda: {"value": None},
            "no keys": lambda: {"key": None, "value": None},
            "cache": lambda: {"kv_cache": (cache[0], cache[1][:, :2])},
            "small cache": lambda: {"kv_cache": tuple(x[:1] for x in cache)},
            "batch": lambda: {"batch": batch_of(case, 8, queries, keys, step=0, slots=False)},
            "output": lambda: {"output": torch.empty(5, 2, 16)},
            "shared output": lambda: {"output": torch.empty(1, 4, 16).expand(5, 4, 16)},
            "lse": lambda: {"lse": torch.empty(5, 4)},
            "output in cache": lambda: {"output": cache[0].view(-1)[: 5 * 64].view(5, 4, 16)},
            "output in lse": lambda: {"output": output, "lse": output.view(-1)[:20].view(4, 5)},
        }[change]()
    try:
        parallel(**given)
        problem = None
    except ValueError as e:
        problem = f"{type(e).__name__}: {e}"
    untouched = all((x.view(torch.uint8) == 0x7F).all() for x in cache)
    # the ranks are together still
    return problem, untouched, bool(parallel(**right).isfinite().all())


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("tokens", "tokens is "),
        ("query", "query is [5, 3, 16] float32; expected [5, 4, 16] float32"),
        ("no query", "query is None; expected"),
        ("short", "query has 2 rows; the batch has 5 tokens"),
        ("rows", "query is "),
        ("key", "key is [5, 2, 16] float16; expected [5, 2, 16] float32"),
        ("no value", "value is None; expected key and value, or neither"),
        ("no keys", "key and value are None; expected the keys and values to write"),
        ("cache", "kv_cache.value is "),
        ("small cache", "slot_mapping names slot "),
        ("batch", "batch is BatchMetadata; expected a ShardedBatch, as `shard` returns it"),
        ("output", "output is [5, 2, 16] float32; expected [5, 4, 16] float32"),
        ("shared output", "output has strides [0, 16, 1], by which several"),
        ("lse", "lse is [5, 4] float32; expected [4, 5] float32"),
        ("output in cache", "output overlaps kv_cache.key in memory"),
        ("output in lse", "output overlaps lse in memory"),
    ],
)
def test_a_call_that_is_wrong_on_one_rank_is_refused_on_all(
    ranks: Callable[[int], Ranks], wrong: int, change: str, problem: str
) -> None:
    for rank, one in enumerate(ranks(2).run(call, Case(steps=STEPS, request=LSE), wrong, change)):
        assert not isinstance(one, Failure), one
        text, untouched, finite = one
        assert problem in (text or "")
        assert text.startswith("BatchError: ")
        # the others learn whose it is
        assert rank == wrong or f"rank {wrong}" in text
        assert untouched
        assert finite


def overlapping(rank: int, case: Case, begins: bool) -> str:
    """What is said of an output that is the memory of the lse, of a prompt that begins and of one with a context."""
    layer = layer_of(case)
    parallel = ContextParallel(layer)
    queries, keys = case.steps[0 if begins else 1]
    batch = parallel.shard(batch_of(case, 8, queries, keys, step=0, slots=False))
    query, key, value = inputs(case, layer, 0, sum(queries))
    output = torch.empty(len(query), 4, 16)
    lse = output.view(-1)[: 4 * len(query)].view(4, len(query))
    try:
        parallel(query, key, value, layer.new_kv_cache(8), batch, output, lse=lse)
    except BatchError as e:
        return str(e)
    return "nothing was raised"


@pytest.mark.parametrize("begins", [True, False])
def test_an_output_in_the_memory_of_the_lse(ranks: Callable[[int], Ranks], begins: bool) -> None:
    for said in ranks(2).run(overlapping, Case(steps=STEPS, request=LSE), begins):
        assert "output overlaps lse in memory" in said


def mistaken(rank: int, case: Case, other: Case) -> str:
    """What a layer says of a shard that another made."""
    parallel, made_by = (ContextParallel(layer_of(one), interleave=one.interleave) for one in (case, other))
    queries, keys = case.steps[1]
    shard = made_by.shard(batch_of(case, 8, queries, keys, step=0, slots=False))
    query, key, value = inputs(case, parallel.layer, 0, sum(queries))
    cache = parallel.layer.new_kv_cache(8)
    for x in cache:
        x.zero_()
    try:
        parallel(query, key, value, cache, shard)
    except BatchError as e:
        return str(e)
    return "nothing was raised"


WINDOW = Case(steps=STEPS, request={"features": {"lse", "sliding_window"}}, numbers={"sliding_window": 2})
FULL = Case(steps=STEPS, request=LSE)


@pytest.mark.parametrize(
    ("case", "other", "problem"),
    [
        (WINDOW, FULL, "4 tokens, all keys, encoder_decoder; this layer has "),
        (FULL, WINDOW, "4 tokens, a window of 1 keys before the query's own, encoder_decoder; this layer has "),
        (FULL, replace(FULL, interleave=2), "interleave=2) with blocks of 4 tokens, all keys, encoder_decoder; this"),
    ],
)
def test_a_shard_for_a_layer_of_another_kind(
    ranks: Callable[[int], Ranks], case: Case, other: Case, problem: str
) -> None:
    for said in ranks(2).run(mistaken, case, other):
        assert problem in said
    assert ranks(2).run(mistaken, case, replace(case, request={**case.request})) == ["nothing was raised"] * 2


def shard(rank: int, case: Case, arguments: dict[str, Any]) -> Any:
    parallel = ContextParallel(layer_of(case))
    slots = bool(arguments and arguments.pop("slots", False))
    batch = BatchMetadata.build(**arguments) if arguments else None
    return parallel.shard(batch, slots=slots)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "batch is None; expected BatchMetadata"),
        ({"query_lens": [2], "seq_lens": [2]}, "block_table is None; a cache that ranks share is paged"),
        (
            {"query_lens": [1], "seq_lens": [17], "block_table": torch.zeros(1, 2, dtype=torch.int32)},
            "block_table has 2 blocks of 8 tokens, which hold 16; a request has 17",
        ),
        (
            {"query_lens": [3], "seq_lens": [2], "block_table": torch.zeros(1, 2, dtype=torch.int32)},
            "request 0 has seq_len 2 and 3 queries",
        ),
        (
            {"query_lens": [1], "seq_lens": [2], "block_table": torch.zeros(1, 2, dtype=torch.int32),
             "mm_prefix": torch.zeros(1, 1, 2, dtype=torch.int32)},
            "mm_prefix is given; its ranges hold positions of other ranks, which is not served",
        ),
        (
            {"query_lens": [1], "seq_lens": [2], "block_table": torch.zeros(1, 2, dtype=torch.int32), "slots": True},
            "slot_mapping is None; with slots=True it says where this rank's new keys go",
        ),
        (
            {"query_lens": [2], "seq_lens": [2], "block_table": torch.zeros(1, 2, dtype=torch.int32), "slots": True,
             "slot_mapping": torch.zeros(1, dtype=torch.int64)},
            "slot_mapping has 1 slots; the batch has 2 tokens (-1 is no slot)",
        ),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_shared(ranks: Callable[[int], Ranks], arguments: dict[str, Any], problem: str) -> None:
    for failure in ranks(2).run(shard, Case(steps=STEPS, request=LSE), arguments):
        assert isinstance(failure, Failure)
        assert failure.kind == "BatchError"
        assert problem in failure.text


def test_without_a_process_group() -> None:
    with pytest.raises(SpecError, match=r"there is no process group; call torch.distributed.init_process_group first"):
        ContextParallel(layer_of(Case(request=LSE)))


def compiled(rank: int, case: Case) -> str:
    """What a compiled model that leaves the call out gives is compared with an eager one; the refusal of the others."""
    layer = layer_of(case)
    parallel = ContextParallel(layer)
    cache = poisoned_cache(layer, 4, "cpu")
    (queries, keys) = case.steps[0]
    batch = parallel.shard(batch_of(case, 4 * parallel.shards.world_size, queries, keys, step=0, slots=False))
    query, key, value = inputs(case, layer, 0, sum(queries))

    def model(query: torch.Tensor, attend: Any) -> torch.Tensor:
        return attend(query * 1, key, value, cache, batch) + 1

    apart = torch.compiler.disable(parallel)
    found = torch.compile(model, backend="aot_eager")(query, apart)
    torch.testing.assert_close(found, model(query, parallel))
    try:
        torch.compile(model, backend="aot_eager")(query, parallel)
    except BatchError as e:
        return str(e)
    return "nothing was raised"


def test_a_compiled_model_leaves_the_call_out(ranks: Callable[[int], Ranks]) -> None:
    for refusal in ranks(2).run(compiled, Case(steps=STEPS, request=LSE)):
        assert refusal == "ContextParallel is no part of a compiled graph; call torch.compiler.disable(parallel)"
