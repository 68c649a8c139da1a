"""Steps that a CUDA graph captures: where their tensors are, and what a replay for other lengths computes.

On a processor nothing is captured. A replay here is what a graph would do: the operations in the graph, and the layers
over the tensors of the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.layers.sglang_world import World, run, trees, whole_mask
from support.stand_ins import sglang_modules as sglang

from attnreg.integrations.sglang.registries import SglangError

Serve = Callable[..., tuple[World, Any]]
REQUESTS = 4
# of the fields of SGLang's `build_replay_fb_view`, those that the backend may read
VIEW = (
    "forward_mode", "batch_size", "req_pool_indices", "seq_lens", "seq_lens_sum", "seq_lens_cpu", "encoder_lens",
    "out_cache_loc", "spec_info",
)  # fmt: skip


def dummy(world: World, requests: int, drafts: int = 0, mask: Any = None, topk: int = 1) -> Any:
    """The batch that SGLang captures: lengths of 1, and slot 0."""
    tokens = requests * max(1, drafts)
    return sglang.ForwardBatch(
        forward_mode=sglang.Mode("TARGET_VERIFY" if drafts else "DECODE"), batch_size=requests,
        req_pool_indices=torch.zeros(requests, dtype=torch.int64), seq_lens=torch.ones(requests, dtype=torch.int64),
        out_cache_loc=torch.zeros(tokens, dtype=torch.int64),
        spec_info=sglang.EagleVerifyInput(mask, drafts, topk) if drafts else None,
    )  # fmt: skip


def view(batch: Any) -> Any:
    """What SGLang gives in place of a batch before a replay: these fields alone."""
    return SimpleNamespace(**{name: getattr(batch, name) for name in VIEW})


def capture(backend: Any, batch: Any) -> Any:
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    return backend.forward_metadata


def replay(world: World, backend: Any, static: Any, batch: Any, mask: Any = None) -> Any:
    """What SGLang does before a replay, and what the graph then does, for a batch padded to the captured requests."""
    count, tokens = batch.batch_size, batch.out_cache_loc.shape[0]
    static.req_pool_indices.zero_()
    static.req_pool_indices[:count] = batch.req_pool_indices
    static.seq_lens.fill_(1)
    static.seq_lens[:count] = batch.seq_lens
    static.out_cache_loc.zero_()
    static.out_cache_loc[:tokens] = batch.out_cache_loc
    if batch.spec_info is not None:
        static.spec_info = batch.spec_info
    backend.init_forward_metadata_out_graph(view(static))
    backend.init_forward_metadata_in_graph(static)
    step = backend.forward_metadata
    width = static.out_cache_loc.shape[0]
    for layer in world.layers:
        query, key, value = world.inputs(batch, layer)
        padded = [torch.cat([x, x.new_zeros(width - tokens, *x.shape[1:])]) for x in (query, key, value)]
        found = backend.forward(*padded, layer, static)
        expected = world.expected(batch, layer, query, mask)
        assert (found[:tokens].double() - expected).abs().max() < 1e-4
    return step


def memory(step: Any) -> list[int]:
    batches = [made for made in (step.full, step.window) if made is not None]
    tensors = [x for made in batches for x in made.given]
    return [x.data_ptr() for x in (*tensors, *([] if step.window_slots is None else [step.window_slots]))]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("page", [1, 16])
def test_decoding_is_replayed_for_other_lengths(serve: Serve, page: int, apart: bool) -> None:
    world, backend = serve(page=page, windows_apart=apart, layers=({}, {"sliding_window_size": 9}))
    backend.init_cuda_graph_state(REQUESTS, REQUESTS)
    static = {n: dummy(world, n) for n in (4, 2)}
    steps = {n: capture(backend, batch) for n, batch in static.items()}
    places = {n: memory(step) for n, step in steps.items()}
    run(world, backend, world.extend({1: 40, 2: 5, 3: 60}))
    for requests in ([1, 2, 3], [3, 1], [2], [1, 3, 2]):
        size = 2 if len(requests) <= 2 else 4
        step = replay(world, backend, static[size], world.decode(requests))
        assert step is steps[size]
        assert memory(step) == places[size]
    # prompts between the replays do not disturb what the graphs read
    run(world, backend, world.extend({4: 33}))
    step = replay(world, backend, static[4], world.decode([4, 1, 2, 3]))
    assert memory(step) == places[4]


@pytest.mark.parametrize("topk", [1, 4])
def test_verification_is_replayed(serve: Serve, sglang: Any, topk: int) -> None:
    sglang.algorithm, sglang.topk = "EAGLE", topk
    world, backend = serve(layers=({}, {"logit_cap": 3.0}))
    drafts = 5
    backend.init_cuda_graph_state(REQUESTS, REQUESTS * drafts)
    static = dummy(world, 3, drafts, torch.ones(3 * drafts * (drafts + 1), dtype=torch.bool), topk)
    places = memory(capture(backend, static))
    run(world, backend, world.extend({1: 40, 2: 5, 3: 60}))
    for requests in ([1, 2, 3], [3, 1]):
        mask = trees(len(requests), drafts)
        batch = world.verify(requests, drafts, mask, topk)
        batch.spec_info.custom_mask = whole_mask(batch, mask)
        step = replay(world, backend, static, batch, mask if topk > 1 else None)
        assert memory(step) == places


def test_decoding_and_verification_have_memory_of_their_own(serve: Serve, sglang: Any) -> None:
    sglang.algorithm, sglang.topk = "EAGLE", 1
    world, backend = serve()
    backend.init_cuda_graph_state(REQUESTS, REQUESTS * 3)
    decoding, verifying = capture(backend, dummy(world, 2)), capture(backend, dummy(world, 2, 3))
    both = {id(step): {made.block_table.data_ptr(), made.seq_lens.data_ptr()}
            for step in (decoding, verifying) for made in (step.full,)}  # fmt: skip
    first, second = both.values()
    assert not first & second


def test_what_is_in_a_graph_reads_nothing_back(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    world, backend = serve(windows_apart=True, layers=({}, {"sliding_window_size": 9}))
    backend.init_cuda_graph_state(REQUESTS, REQUESTS)
    static = dummy(world, 4)
    capture(backend, static)

    def read(self: torch.Tensor, *args: Any) -> Any:
        raise AssertionError("a graph cannot read a value back")

    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, read)
    backend.init_forward_metadata_in_graph(static)


def test_a_larger_state_gets_new_memory(serve: Serve) -> None:
    world, backend = serve()
    backend.init_cuda_graph_state(2, 2)
    before = memory(capture(backend, dummy(world, 2)))
    backend.init_cuda_graph_state(2, 2)
    assert memory(capture(backend, dummy(world, 2))) == before
    backend.init_cuda_graph_state(4, 4)
    capture(backend, dummy(world, 4))


def test_full_graphs_of_prompts_are_refused(serve: Serve) -> None:
    world, backend = serve()
    backend.init_cuda_graph_state(4, 64)
    with pytest.raises(SglangError, match="no full CUDA graph of prompts"):
        backend.init_forward_metadata_out_graph(world.extend({1: 9}), in_capture=True)


def test_padding_of_decoding_has_length_one(serve: Serve) -> None:
    assert serve()[1].get_cuda_graph_seq_len_fill_value() == 1
