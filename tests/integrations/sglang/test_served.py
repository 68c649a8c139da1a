"""What attnreg's backend gives SGLang's layers, over pools of SGLang's form, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.layers.sglang_world import World, attend, close, run, trees, whole_mask

Serve = Callable[..., tuple[World, Any]]
WINDOWS = ({}, {"sliding_window_size": 7}, {"sliding_window_size": 23})


def generate(world: World, backend: Any, scale: float = 1.0) -> None:
    """Prompts, the second part of one, more prompts beside it, and some tokens each: what a scheduler makes of it."""
    run(world, backend, world.extend({1: 40, 2: 5}), scale=scale)
    run(world, backend, world.extend({1: 33, 3: 17}), scale=scale)
    run(world, backend, world.extend({2: 1, 4: 20, 1: 1}, "MIXED"), scale=scale)
    for _ in range(3):
        run(world, backend, world.decode([1, 2, 3, 4]), scale=scale)
    run(world, backend, world.decode([3]), scale=scale)


@pytest.mark.parametrize("page", [1, 16, 32, 64, 128])
def test_pages_of_any_size(serve: Serve, page: int) -> None:
    generate(*serve(page=page, layers=WINDOWS))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
def test_grouped_heads(serve: Serve, heads: tuple[int, int]) -> None:
    generate(*serve(heads=heads))


@pytest.mark.parametrize(("size", "size_v"), [(64, None), (192, 128), (512, None)])
def test_wide_heads_and_narrower_values(serve: Serve, size: int, size_v: int | None) -> None:
    generate(*serve(size=size, size_v=size_v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(serve: Serve, dtype: torch.dtype) -> None:
    generate(*serve(dtype=dtype, layers=WINDOWS))


def test_a_softcap_that_matters(serve: Serve) -> None:
    # scores of these inputs reach far beyond the cap
    generate(*serve(layers=({"logit_cap": 5.0}, {"logit_cap": 2.0, "sliding_window_size": 9})), scale=4.0)


def test_sinks(serve: Serve) -> None:
    generate(*serve(sinks=True, layers=WINDOWS))


def test_chunks(serve: Serve) -> None:
    generate(*serve(chunk=16, layers=({"use_irope": True}, {})))


@pytest.mark.parametrize("page", [1, 16])
def test_windows_in_a_pool_of_their_own(serve: Serve, page: int) -> None:
    generate(*serve(page=page, windows_apart=True, layers=WINDOWS))


def test_pages_that_left_the_window_may_be_gone(serve: Serve) -> None:
    world, backend = serve(windows_apart=True, layers=({}, {"sliding_window_size": 7}))
    run(world, backend, world.extend({1: 90}))
    # SGLang frees the pages before the window: their tokens map to slot 0, or to none
    gone = world.tokens[1, :64].long()
    world.pool.full_to_swa_index_mapping[gone[:32]] = 0
    world.pool.full_to_swa_index_mapping[gone[32:]] = -1
    for _ in range(3):
        run(world, backend, world.decode([1]))


@pytest.mark.parametrize(
    ("cache", "scales"),
    [(torch.float8_e4m3fn, None), (torch.float8_e4m3fn, (0.5, 0.25)), (torch.float8_e5m2, (2.0, 0.5))],
)
def test_an_fp8_cache(serve: Serve, cache: torch.dtype, scales: tuple[float, float] | None) -> None:
    world, backend = serve(cache=cache, layers=WINDOWS)
    if scales is not None:
        for layer in world.layers:
            layer.k_scale, layer.v_scale = map(torch.tensor, scales)
    generate(world, backend)


def test_scales_that_are_replaced_count(serve: Serve) -> None:
    world, backend = serve(cache=torch.float8_e4m3fn)
    run(world, backend, world.extend({1: 20}))
    world.known.clear()
    world.lens.clear()
    for layer in world.layers:
        layer.k_scale, layer.v_scale = torch.tensor(0.25), torch.tensor(4.0)
    run(world, backend, world.extend({2: 20}))


def test_a_hybrid_model_has_attention_in_some_layers(sglang: Any) -> None:
    from support.layers.sglang_world import Facts
    from support.stand_ins.sglang_modules import HybridLinearKVPool

    from attnreg.integrations.sglang.backend import SglangBackend

    world = World(Facts())
    for layer, number in zip(world.layers, (3, 7), strict=True):
        layer.layer_id = number
    world.runner.token_to_kv_pool = world.pool = HybridLinearKVPool(world.pool, [3, 7])
    world.sinks = [None] * 8
    generate(world, SglangBackend(world.runner))


def test_a_layer_that_shares_the_cache_of_another(serve: Serve) -> None:
    world, backend = serve(layers=({}, {"sliding_window_size": 9}))
    first, second = world.layers
    for batch in (world.extend({1: 40, 2: 5}), world.decode([1, 2])):
        backend.init_forward_metadata(batch)
        query, key, value = world.inputs(batch, first)
        backend.forward(query, key, value, first, batch)
        second.layer_id, written = 0, len(world.pool.written)
        found = backend.forward(query, None, None, second, batch)
        close(found, world.expected(batch, second, query), torch.float32)
        assert len(world.pool.written) == written


def test_keys_that_another_op_has_stored(serve: Serve) -> None:
    world, backend = serve()
    layer, batch = world.layers[0], world.extend({1: 21})
    backend.init_forward_metadata(batch)
    query, key, value = world.inputs(batch, layer)
    for kept, rows in ((world.pool.k_buffer, key), (world.pool.v_buffer, value)):
        kept[0][batch.out_cache_loc] = rows
    found = backend.forward(query, key.fill_(torch.nan), value.fill_(torch.nan), layer, batch, save_kv_cache=False)
    close(found, world.expected(batch, layer, query), torch.float32)
    assert not world.pool.written


def test_models_find_the_pools_where_they_look(serve: Serve) -> None:
    """SGLang's models store keys themselves where one op rotates and stores them."""
    world, backend = serve()
    assert backend.token_to_kv_pool is world.pool
    assert backend.req_to_token_pool is world.runner.req_to_token_pool


def test_padded_rows_are_zero(serve: Serve) -> None:
    world, backend = serve()
    layer, batch = world.layers[0], world.extend({1: 5})
    backend.init_forward_metadata(batch)
    query, key, value = world.inputs(batch, layer)
    padded = torch.cat([query, query.new_full((3, query.shape[1]), torch.nan)])
    found = backend.forward(padded, key, value, layer, batch)
    close(found[:5], world.expected(batch, layer, query), torch.float32)
    assert not found[5:].any()


def test_a_scheduler_that_runs_ahead_has_no_lengths_on_the_host(serve: Serve) -> None:
    world, backend = serve(layers=WINDOWS)
    run(world, backend, world.extend({1: 40, 2: 5}))
    batch = world.decode([1, 2])
    # what stands there is of an earlier step
    batch.seq_lens_sum, batch.seq_lens_cpu = None, torch.tensor([1, 1])
    run(world, backend, batch)


def test_later_changes_of_the_slots_do_not_reach_a_step(serve: Serve) -> None:
    world, backend = serve()
    assert backend.shared_read_ends(type("Mode", (), {"name": "EXTEND"})()).name == "PRE_REPLAY"
    assert backend.shared_read_ends(type("Mode", (), {"name": "DECODE"})()).name == "IN_REPLAY"
    batch = world.extend({1: 40})
    backend.init_forward_metadata(batch)
    world.tokens[1] = 0
    batch.seq_lens.zero_()
    attend(world, backend, batch)


def test_drafts_of_one_branch_are_causal(serve: Serve, sglang: Any) -> None:
    sglang.algorithm, sglang.topk = "EAGLE", 1
    world, backend = serve(layers=WINDOWS)
    run(world, backend, world.extend({1: 40, 2: 5}))
    # SGLang gives a mask all the same; nobody has to read it
    run(world, backend, world.verify([1, 2], 4, torch.zeros(2, 4, 4, dtype=torch.bool), 1))


@pytest.mark.parametrize("whole", [True, False])
def test_trees_of_drafts(serve: Serve, sglang: Any, whole: bool) -> None:
    sglang.algorithm, sglang.topk = "EAGLE", 4
    world, backend = serve(layers=({}, {"logit_cap": 3.0}))
    run(world, backend, world.extend({1: 40, 2: 5, 3: 70}))
    mask = trees(3, 6)
    batch = world.verify([3, 1, 2], 6, mask, 4)
    if whole:
        batch.spec_info.custom_mask = whole_mask(batch, mask)
    run(world, backend, batch, mask)


def test_drafts_of_ngram_are_trees_whatever_their_breadth(serve: Serve, sglang: Any) -> None:
    sglang.algorithm, sglang.topk = "NGRAM", 1
    world, backend = serve()
    run(world, backend, world.extend({1: 40, 2: 5}))
    mask = trees(2, 4)
    run(world, backend, world.verify([1, 2], 4, mask, -1), mask)


def test_a_tree_that_comes_after_the_step_was_made(serve: Serve, sglang: Any) -> None:
    sglang.algorithm, sglang.topk = "EAGLE", 4
    world, backend = serve()
    run(world, backend, world.extend({1: 40, 2: 5}))
    mask = trees(2, 5)
    batch = world.verify([1, 2], 5, torch.ones_like(mask), 4)
    late = whole_mask(batch, mask)
    batch.spec_info.custom_mask = torch.ones_like(late)
    backend.init_forward_metadata(batch)
    batch.spec_info.custom_mask = late
    backend.update_verify_buffers_to_fill_after_draft(batch.spec_info, None)
    attend(world, backend, batch, mask)


def test_deterministic_runs_ask_for_batch_invariance(serve: Serve, sglang: Any) -> None:
    sglang.deterministic = True
    world, backend = serve()
    generate(world, backend)
    assert "batch_invariant" in backend.layers.of(world.layers[0], None).spec.features


def test_a_rank_of_tensor_parallelism_computes_its_own_heads(serve: Serve) -> None:
    """SGLang gives each rank layers with its share of the heads and of the sinks, here one KV head."""
    generate(*serve(heads=(3, 1), sinks=True, layers=WINDOWS))
