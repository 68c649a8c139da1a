"""Multi-head latent attention inside SGLang: what its models ask, over pools of latents, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.layers.sglang_latents import LatentWorld, attend_latents, latent_world, run_latents
from support.stand_ins import sglang_modules as stand_ins
from support.stand_ins.sglang_modules import Context, ForwardBatch, Mode

from attnreg.integrations.sglang.registries import SglangError

Serve = Callable[..., tuple[LatentWorld, Any]]
REQUESTS = 4


@pytest.fixture
def serve_latents(sglang: Context) -> Serve:
    """A runner of MLA with these facts, and attnreg's backend for it."""

    def made(**facts: Any) -> tuple[LatentWorld, Any]:
        from attnreg.integrations.sglang.backend import SglangBackend

        world = latent_world(**facts)
        return world, SglangBackend(world.runner)

    return made


def refused(world: Any) -> str:
    from attnreg.integrations.sglang.backend import SglangBackend

    with pytest.raises(SglangError) as e:
        SglangBackend(world.runner)
    return str(e.value).partition("does not serve this run: ")[2]


def generate(world: LatentWorld, backend: Any) -> None:
    """Prompts, prompts with context beside prompts without, mixed steps, and some tokens each."""
    run_latents(world, backend, world.extend({1: 40, 2: 5}))
    run_latents(world, backend, world.extend({1: 33, 3: 17}))
    run_latents(world, backend, world.extend({2: 1, 4: 20, 1: 1}, "MIXED"))
    for _ in range(3):
        run_latents(world, backend, world.decode([1, 2, 3, 4]))
    run_latents(world, backend, world.decode([3]))
    run_latents(world, backend, world.verify([4, 1], 3, None, 1))


@pytest.mark.parametrize("page", [1, 16, 64])
def test_prompts_contexts_and_tokens(serve_latents: Serve, page: int) -> None:
    generate(*serve_latents(page=page))


@pytest.mark.parametrize("heads", [1, 3, 16])
def test_any_number_of_heads(serve_latents: Serve, heads: int) -> None:
    generate(*serve_latents(heads=(heads, 1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(serve_latents: Serve, dtype: torch.dtype) -> None:
    generate(*serve_latents(dtype=dtype))


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_latents_in_8_bits(serve_latents: Serve, cache: torch.dtype) -> None:
    """The cache is exact only for what it holds: prompts without context see their own keys unrounded."""
    world, backend = serve_latents(cache=cache)
    # a first token whose latent a later step reads
    run_latents(world, backend, world.extend({1: 1, 2: 30}, "MIXED"))
    run_latents(world, backend, world.extend({1: 33, 3: 17}))
    for _ in range(2):
        run_latents(world, backend, world.decode([1, 2, 3]))


def test_prompts_see_their_own_keys_unrounded(serve_latents: Serve) -> None:
    world, backend = serve_latents(cache=torch.float8_e4m3fn)
    world._kept = lambda rows, scale: rows.double()  # type: ignore[method-assign]
    run_latents(world, backend, world.extend({1: 20, 2: 7}))


def test_padded_rows_are_zero(serve_latents: Serve) -> None:
    world, backend = serve_latents()
    run_latents(world, backend, world.extend({1: 20}), padding=3)
    batch = world.decode([1])
    backend.init_forward_metadata(batch)
    query, key, value = world.absorbed(0, world.new(4, 4, 48), world.new(4, 64), world.new(4, 16))
    query[1:] = torch.nan
    found = backend.forward(query, key[:1], value[:1], world.layers[0], batch)
    assert found[0].any()
    assert not found[1:].any()


def test_graphs_are_replayed_for_other_lengths_and_fewer_requests(serve_latents: Serve) -> None:
    world, backend = serve_latents()
    backend.init_cuda_graph_state(REQUESTS, REQUESTS)
    static = ForwardBatch(
        forward_mode=Mode("DECODE"), batch_size=REQUESTS,
        req_pool_indices=torch.zeros(REQUESTS, dtype=torch.int64), seq_lens=torch.ones(REQUESTS, dtype=torch.int64),
        out_cache_loc=torch.zeros(REQUESTS, dtype=torch.int64),
    )  # fmt: skip
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    backend.init_forward_metadata_in_graph(static)
    step = backend.forward_metadata
    places = [x.data_ptr() for x in step.full.given]
    run_latents(world, backend, world.extend({1: 40, 2: 5, 3: 60}))
    for requests in ([1, 2, 3], [3, 1], [2]):
        batch, count = world.decode(requests), len(requests)
        for kept, new, padding in (
            (static.req_pool_indices, batch.req_pool_indices, 0),
            (static.seq_lens, batch.seq_lens, 1),
            (static.out_cache_loc, batch.out_cache_loc, 0),
        ):
            kept.fill_(padding)
            kept[:count] = new
        backend.init_forward_metadata_out_graph(static)
        backend.init_forward_metadata_in_graph(static)
        assert backend.forward_metadata is step
        attend_latents(world, backend, batch, static, REQUESTS - count)
        assert [x.data_ptr() for x in step.full.given] == places


def test_the_log_names_the_kernels_of_both_forms(serve_latents: Serve, caplog: pytest.LogCaptureFixture) -> None:
    from attnreg.integrations.sglang.forms import KERNELS, LayerForm

    for kernels in KERNELS.values():
        kernels.told.clear()
    with caplog.at_level("INFO", logger="sglang.attnreg"):
        serve_latents()
    text = caplog.text
    assert "TORCH_MLA computes the layers of attnreg" in text
    assert "TORCH_PREFILL computes the layers of attnreg" in text
    assert set(KERNELS) == set(LayerForm)


def test_deterministic_runs_compute_prompts_over_latents(serve_latents: Serve, sglang: Context) -> None:
    sglang.deterministic = True
    world, backend = serve_latents()
    # SGLang's dispatcher gives such runs latents in each step
    run_latents(world, backend, world.extend({1: 20}, "MIXED"))
    run_latents(world, backend, world.decode([1]))
    assert "batch_invariant" in backend.layers.of(world.layers[0], None).spec.features
    batch = world.extend({2: 6})
    with pytest.raises(ValueError, match="batch_invariant"):
        run_latents(world, backend, batch)


# refused -----------------------------------------------------------------------------------------------------------


def test_layers_outside_of_the_claims(sglang: Context) -> None:
    world = latent_world(layers=({"sliding_window_size": 7}, {"logit_cap": 3.0}))
    assert refused(world) == "layer 0: sliding_window is not supported; layer 1: softcap is not supported"


def test_sizes_that_are_no_form_of_the_pools_latents(sglang: Context) -> None:
    world = latent_world()
    world.runner.model.append(stand_ins.RadixAttention(4, 96, 1.0, 2, 7))
    assert refused(world) == "layer 7: the layer has 4 heads over 2 of 96/96; the pool holds latents of 64 + 16"


def test_trees_of_drafts(sglang: Context) -> None:
    sglang.algorithm, sglang.topk = "EAGLE", 4
    assert "tree_mask" in refused(latent_world())


def test_scales_that_sglang_applies_to_some_latents(serve_latents: Serve, sglang: Context) -> None:
    world = latent_world(cache=torch.float8_e4m3fn)
    for layer in world.layers:
        layer.k_scale = torch.tensor(0.5)
    assert refused(world) == (
        "layers 0, 1: the layer's KV scale is 0.5, and SGLang stores latents of prompts without it"
    )
    for layer in world.layers:
        layer.k_scale = torch.tensor(1.0)
    from attnreg.integrations.sglang.backend import SglangBackend

    backend = SglangBackend(world.runner)
    run_latents(world, backend, world.extend({1: 5}, "MIXED"))
    # a scale that comes later is refused before anything is written
    world.layers[0].k_scale = torch.tensor(0.5)
    batch, written = world.decode([1]), len(world.pool.written)
    with pytest.raises(ValueError, match=r"KV scale is 0\.5"):
        run_latents(world, backend, batch)
    assert len(world.pool.written) == written


class DSATokenToKVPool(stand_ins.MLATokenToKVPool):
    use_dsa = True


def test_pools_of_other_kinds(sglang: Context) -> None:
    world = latent_world()
    world.runner.token_to_kv_pool = DSATokenToKVPool(64, 2, 64, 16, torch.float32)
    assert refused(world) == "the KV pool is DSATokenToKVPool; served with MLA: MLATokenToKVPool"
    world.runner.token_to_kv_pool = stand_ins.MHATokenToKVPool(64, 2, 1, 80, 64, torch.float32)
    assert refused(world) == "the KV pool is MHATokenToKVPool; served with MLA: MLATokenToKVPool"
    world.runner.token_to_kv_pool = pool = stand_ins.MLATokenToKVPool(64, 2, 64, 16, torch.float32)
    pool.use_dsa = True
    assert refused(world) == "the KV pool holds latents of sparse attention (DSA)"
    world.runner.use_mla_backend, pool.use_dsa = False, False
    assert refused(world) == "the KV pool is MLATokenToKVPool; served: MHATokenToKVPool"


@pytest.mark.parametrize("name", ["q_rope", "k_rope", "topk_indices", "cos_sin_cache", "attn_sink"])
def test_arguments_that_nobody_claims(serve_latents: Serve, name: str) -> None:
    world, backend = serve_latents()
    batch = world.extend({1: 5}, "MIXED")
    backend.init_forward_metadata(batch)
    given = world.absorbed(0, world.new(5, 4, 48), world.new(5, 64), world.new(5, 16))
    with pytest.raises(SglangError, match=f"knows no argument {name} of an attention layer"):
        backend.forward(*given, world.layers[0], batch, **{name: torch.zeros(1)})
    assert not world.pool.written


@pytest.mark.parametrize("step", ["context", "decode", "stored"])
def test_keys_of_every_head_beside_a_context(serve_latents: Serve, step: str) -> None:
    """Other backends get them with the context's, or without it and with an LSE to merge by."""
    world, backend = serve_latents()
    run_latents(world, backend, world.extend({1: 5}))
    batch = {"context": lambda: world.extend({1: 3}), "decode": lambda: world.decode([1]),
             "stored": lambda: world.extend({2: 3})}[step]()  # fmt: skip
    backend.init_forward_metadata(batch)
    rows, written = batch.out_cache_loc.shape[0], len(world.pool.written)
    key, value = world.expanded(0, world.new(rows, 64), world.new(rows, 16))
    query = world.new(rows, 4, 48).flatten(1)
    with pytest.raises(SglangError, match="without context" if step != "stored" else "no keys of every head"):
        backend.forward(query, key, value, world.pairs[0][1], batch, save_kv_cache=step == "stored")
    assert len(world.pool.written) == written
