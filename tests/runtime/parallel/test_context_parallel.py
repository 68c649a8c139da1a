"""Attention over a cache that ranks share is attention: 2 and 4 processes beside one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from support.layers.ranks import Failure, Ranks
from support.layers.sharded import Case, alone, batch_of, inputs, layer_of, own_heads, poisoned_cache, sharded

from attnreg.runtime.parallel.attention import ContextParallel
from attnreg.runtime.parallel.exchange import Exchange

WORLDS = pytest.mark.parametrize("world", [2, 4])
# a prompt, another with few keys, then tokens one by one, and several at once; some ranks have no key of some requests
STEPS = (
    ((7, 1, 18), (7, 1, 18)),
    ((1, 1, 1), (8, 2, 19)),
    ((1, 1, 1), (9, 3, 20)),
    ((3, 5, 1), (12, 8, 21)),
    ((1, 0, 2), (13, 8, 23)),
)
LATENT = {"attention": "mla", "phase": "decode", "head_size": 48, "head_size_v": 32, "num_kv_heads": 1}
CASES = {
    "plain": Case(),
    "blocks": Case(interleave=4),
    "two at a time": Case(interleave=2),
    "padding": Case(padding=3),
    "by head": Case(by_head=True, request={"num_heads": 8}),
    "one KV head": Case(by_head=True, request={"num_kv_heads": 1}),
    "sinks": Case(request={"features": {"sinks"}}, numbers={"sinks": (4,)}),
    "sinks by head": Case(
        by_head=True, request={"features": {"sinks"}, "num_heads": 8}, numbers={"sinks": (8,)}
    ),
    "window by head": Case(
        by_head=True, request={"features": {"sliding_window"}, "num_heads": 8}, numbers={"sliding_window": 5}
    ),
    "softcap": Case(request={"features": {"softcap"}}, numbers={"softcap": 3.0}),
    "window": Case(request={"features": {"sliding_window"}}, numbers={"sliding_window": 5}),
    "window, blocks": Case(interleave=4, request={"features": {"sliding_window"}}, numbers={"sliding_window": 6}),
    "window of one": Case(request={"features": {"sliding_window"}}, numbers={"sliding_window": 1}),
    "window and sinks": Case(
        request={"features": {"sliding_window", "sinks"}}, numbers={"sliding_window": 11, "sinks": (4,)}
    ),
    "not causal": Case(causal=False, request={"features": {"non_causal"}}),
    "not causal, window": Case(
        causal=False, request={"features": {"non_causal", "sliding_window"}}, numbers={"sliding_window": 4}
    ),
    "causal by request": Case(causal=[True, False, True], request={"features": {"causal_by_request"}}),
    "tree": Case(tree=True, request={"features": {"tree_mask"}}),
    "heads first": Case(numbers={"kv_layout": "HND"}),
    "half precision": Case(request={"dtype": "float16"}),
    "8-bit cache": Case(request={"kv_dtype": "fp8_e4m3"}, numbers={"k_scale": (1,), "v_scale": (1,)}),
    "8-bit cache, window": Case(
        request={"kv_dtype": "fp8_e4m3", "features": {"sliding_window"}}, numbers={"sliding_window": 7}
    ),
    "8-bit output": Case(
        backend="TRITON_ATTN", platform={"platform": "cuda", "arch": "sm90"},
        request={"features": {"fp8_output"}, "block_size": 16, "head_size": 32}, numbers={"out_scale": (1,)},
    ),
    "latents": Case(backend="TORCH_MLA", request=LATENT, numbers={"softmax_scale": 0.2}),
    "latents, blocks": Case(backend="TORCH_MLA", interleave=4, request=LATENT, numbers={"softmax_scale": 0.2}),
    "latents by head": Case(backend="TORCH_MLA", by_head=True, request=LATENT, numbers={"softmax_scale": 0.2}),
    "latents, Triton": Case(
        backend="TRITON_MLA", platform={"platform": "cuda", "arch": "sm90"},
        request={**LATENT, "dtype": "float16", "block_size": 16}, numbers={"softmax_scale": 0.2},
    ),
}  # fmt: skip


def of(case: Case, **changes: Any) -> Case:
    features = {*case.request.get("features", ()), "lse"}
    return replace(case, **{"steps": STEPS, **changes, "request": {**case.request, "features": features}})


@WORLDS
@pytest.mark.parametrize("name", CASES)
def test_ranks_give_what_one_device_gives(ranks: Callable[[int], Ranks], world: int, name: str) -> None:
    case = of(CASES[name])
    expected = alone(case)
    found = ranks(world).run(sharded, case)
    precision = {"float16": 4e-3}.get(case.request.get("dtype", ""), 2e-5)
    if "fp8_output" in case.request["features"]:
        # one step of e4m3
        precision = 0.13
    for rank, steps in enumerate(found):
        assert not isinstance(steps, Failure), steps
        own = own_heads(case, rank, world)
        for (output, lse), (exact, exact_lse) in zip(steps, expected, strict=True):
            torch.testing.assert_close(output, exact[:, own], rtol=precision, atol=precision)
            torch.testing.assert_close(lse, exact_lse[own], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["sinks", "window and sinks"])
def test_a_sink_takes_all_the_weight_or_none(ranks: Callable[[int], Ranks], name: str) -> None:
    case = of(replace(CASES[name], numbers={**CASES[name].numbers, "sinks": [torch.inf, 0.5, -torch.inf, torch.inf]}))
    expected = alone(case)
    for steps in ranks(2).run(sharded, case):
        assert not isinstance(steps, Failure), steps
        for (output, lse), (exact, exact_lse) in zip(steps, expected, strict=True):
            torch.testing.assert_close(output, exact, rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(lse, exact_lse, rtol=2e-5, atol=2e-5)
            assert (output[:, 0] == 0).all()


def stored(rank: int, case: Case) -> tuple[list[bool], str]:
    """The slots of a cache that a step writes, by the engine's mapping, where another rank has the last request's.

    With it whether the queries of prompts alone went to other ranks.
    """
    layer = layer_of(case, heads=own_heads(case, rank, 2))
    parallel = ContextParallel(layer, by_head=True)
    batch = batch_of(case, 8, *case.steps[0], step=0, slots=False)
    by_position = parallel.shard(batch).context.slot_mapping
    assert by_position is not None
    # an engine may leave tokens without a slot that have one by their positions
    slots = by_position.clone()
    slots[-1] = -1
    cache = poisoned_cache(layer, 12, "cpu")
    said = "nothing was sent"
    with mock.patch.object(Exchange, "gather", side_effect=AssertionError("queries were sent")):
        try:
            shard = parallel.shard(replace(batch, slot_mapping=slots), slots=True)
            tensors = inputs(case, layer, 0, sum(case.steps[0][0]), own_heads(case, rank, 2))
            parallel(*tensors, cache, shard)
        except AssertionError as e:
            said = str(e)
    untouched = poisoned_cache(layer, 12, "cpu").key
    written = (cache.key != untouched).flatten(2).any(-1).flatten()
    expected = torch.zeros_like(written)
    expected[slots[slots >= 0]] = True
    assert torch.equal(written, expected), (written, expected)
    return written.tolist(), said


def test_an_engine_says_where_new_keys_go_and_prompts_alone_send_nothing(ranks: Callable[[int], Ranks]) -> None:
    prompts = replace(of(CASES["by head"]), steps=(((5, 3), (5, 3)),))
    for found in ranks(2).run(stored, prompts):
        assert not isinstance(found, Failure), found
        assert found[1] == "nothing was sent"
    later = replace(prompts, steps=(((5, 3), (5, 4)),))
    for found in ranks(2).run(stored, later):
        assert not isinstance(found, Failure), found
        assert found[1] == "queries were sent"
