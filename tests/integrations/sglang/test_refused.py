"""What attnreg's backend refuses inside SGLang: by name, and before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.layers.sglang_world import Facts, World, run
from support.stand_ins import sglang_modules as stand_ins
from support.stand_ins.sglang_modules import AttentionType, Context, EagleVerifyInput, HybridLinearKVPool, Mode

from attnreg.integrations.sglang.registries import SglangError

Serve = Callable[..., tuple[World, Any]]


def refused(world: World) -> str:
    from attnreg.integrations.sglang.backend import SglangBackend

    with pytest.raises(SglangError) as e:
        SglangBackend(world.runner)
    return str(e.value).partition("does not serve this run: ")[2]


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attn_type is encoder_only; served: decoder"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "attn_type is decoder_bidirectional; served: decoder"),
        ({"is_cross_attention": True}, "the layer is cross-attention over an encoder"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode is 'ALIBI'; served: 'NONE'"),
        ({"logit_cap": 30.0, "logit_capping_method": "other"}, "logit_capping_method is 'other'; served: 'tanh'"),
    ],
)
def test_layers_of_other_kinds(sglang: Context, layer: dict[str, Any], reason: str) -> None:
    assert refused(World(Facts(layers=({}, layer)))) == f"layer 1: {reason}"
    assert refused(World(Facts(layers=(layer,) * 6))) == f"layers 0, 1, 2, 3, …: {reason}"


def test_layers_outside_of_the_claims_name_the_registrys_line(sglang: Context) -> None:
    assert refused(World(Facts(size=576))) == "layers 0, 1: head_size is 576; supported: 32 to 512"
    assert "kv_dtype names 'float32'" in refused(World(Facts(cache=torch.float32, dtype=torch.bfloat16)))


def test_scores_that_scale_with_the_position(sglang: Context) -> None:
    world = World(Facts())
    world.layers[0].xai_temperature_len = 1024
    assert refused(world) == "layer 0: xai_temperature_len is 1024: scores scale with the position"


def test_scales_that_sglang_would_divide_by_without_quantising(sglang: Context) -> None:
    world = World(Facts(dtype=torch.float16, cache=torch.bfloat16))
    world.layers[0].k_scale = torch.tensor(0.5)
    assert "SGLang would divide by them" in refused(world)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"encoder": True}, "the model is an encoder with a decoder"),
        ({"dcp": 2}, "ranks share the context of a request (decode context parallelism)"),
        ({"cp": 2}, "ranks share the prompt of a request (context parallelism)"),
        ({"overlap": True}, "two batches overlap (--enable-two-batch-overlap)"),
        ({"pdmux": True}, "prompts and decoding share a GPU's multiprocessors (--enable-pdmux)"),
        ({"translating": True}, "the KV pool is unified: its slots are virtual"),
    ],
)
def test_runs_of_other_kinds(sglang: Context, change: dict[str, Any], reason: str) -> None:
    world = World(Facts())
    ((name, value),) = change.items()
    if name in vars(sglang):
        setattr(sglang, name, value)
    elif name == "encoder":
        world.runner.model_config.is_encoder_decoder = value
    elif name == "translating":
        world.runner.kv_index_translator.is_translating = value
    else:
        setattr(world.runner, name, value)
    assert refused(world) == reason


def test_models_that_give_sglangs_own_backend_a_mask(sglang: Context) -> None:
    """Gemma 3 and 4 with images look for the class of SGLang's own backend, and leave the mask out for any other."""
    world = World(Facts())
    world.runner.model.prepare_attn_masks = lambda *args: None
    assert refused(world) == "the tokens of an image see each other, by a mask that SGLang gives its own backend alone"


class MHATokenToKVPoolFP4(stand_ins.MHATokenToKVPool):
    pass


def pool_of(world: World, kind: str) -> Any:
    pool = world.pool
    if kind == "hnd":
        pool.use_hnd, pool.kv_cache_layout = True, "hnd"
    elif kind == "vectorized_5d":
        pool.kv_cache_layout = "vectorized_5d"
    elif kind == "codes":
        pool.is_quantized_kv_cache = True
    elif kind == "subclass":
        return MHATokenToKVPoolFP4(64, 2, 2, 32, 32, torch.float32)
    elif kind == "hybrid":
        return HybridLinearKVPool(MHATokenToKVPoolFP4(64, 2, 2, 32, 32, torch.float32), [0, 1])
    return pool


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("hnd", "the KV pool has the layout hnd; served: nhd"),
        ("vectorized_5d", "the KV pool has the layout vectorized_5d; served: nhd"),
        ("codes", "the KV pool holds codes with scales of their own (FP4)"),
        ("subclass", "the KV pool is MHATokenToKVPoolFP4; served: MHATokenToKVPool"),
        ("hybrid", "the KV pool is MHATokenToKVPoolFP4; served: MHATokenToKVPool"),
    ],
)
def test_pools_of_other_layouts(sglang: Context, kind: str, reason: str) -> None:
    world = World(Facts())
    world.runner.token_to_kv_pool = pool_of(world, kind)
    assert refused(world) == reason


def test_a_ring_of_windows(sglang: Context) -> None:
    world = World(Facts(windows_apart=True, layers=({}, {"sliding_window_size": 9})))
    world.pool.swa_req_ring_size = 128
    assert refused(world) == "the KV pool addresses keys of layers with windows by request"


def test_a_pool_for_windows_without_its_slots(sglang: Context) -> None:
    world = World(Facts(windows_apart=True, layers=({}, {"sliding_window_size": 9})))
    world.pool.full_to_swa_index_mapping = None
    assert refused(world) == "the KV pool does not say yet where the keys of layers with windows are"


def test_all_reasons_come_in_one_run(sglang: Context) -> None:
    world = World(Facts())
    sglang.dcp = sglang.cp = 2
    assert refused(world).count(";") == 1


# a call ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q_rope", "k_rope", "cos_sin_cache", "idx_q", "score_mod", "anything"])
def test_arguments_that_nobody_claims(serve: Serve, name: str) -> None:
    world, backend = serve()
    layer, batch = world.layers[0], world.extend({1: 5})
    backend.init_forward_metadata(batch)
    query, key, value = world.inputs(batch, layer)
    with pytest.raises(SglangError, match=f"knows no argument {name} of an attention layer"):
        backend.forward(query, key, value, layer, batch, **{name: torch.zeros(1)})
    assert not world.pool.written
    backend.forward(query, key, value, layer, batch, **{name: None})
    assert world.pool.written


@pytest.mark.parametrize("what", ["dtype", "lse", "tree"])
def test_calls_that_cannot_be_right_write_nothing(serve: Serve, what: str) -> None:
    world, backend = serve()
    layer = world.layers[0]
    batch = world.extend({1: 5})
    if what == "tree":
        run(world, backend, batch)
        batch = world.verify([1], 3, torch.ones(1, 3, 3, dtype=torch.bool), 4)
    backend.init_forward_metadata(batch)
    query, key, value = world.inputs(batch, layer)
    if what == "dtype":
        query = query.half()
    batch.mha_return_lse = what == "lse"
    before = len(world.pool.written)
    # of a tree the run said nothing, so its layers were not selected for one
    with pytest.raises(ValueError, match=r"queries of torch.float32|returns no LSE|tree_mask"):
        backend.forward(query, key, value, layer, batch)
    assert len(world.pool.written) == before


# a step ------------------------------------------------------------------------------------------------------------


def test_steps_of_other_kinds(serve: Serve) -> None:
    world, backend = serve()

    def says(batch: Any, reason: str) -> None:
        before = backend.forward_metadata
        with pytest.raises(SglangError, match=reason):
            backend.init_forward_metadata(batch)
        assert backend.forward_metadata is before

    batch = world.extend({1: 5})
    for name in ("DLLM_EXTEND", "DRAFT_EXTEND_V2", "PREBUILT", "IDLE"):
        batch.forward_mode = Mode(name)
        says(batch, f"no step of SGLang's mode {name}")
    batch = world.extend({1: 5})
    batch.encoder_lens = torch.ones(1)
    says(batch, "no encoder-decoder model")
    batch = world.extend({1: 5})
    batch.multi_item_delimiter_indices = [None, torch.ones(1)]
    says(batch, "no multi-item scoring")
    batch.multi_item_delimiter_indices = [None]
    backend.init_forward_metadata(batch)
    batch = world.verify([1], 3, None, 1)
    batch.spec_info.ragged_verify_layout = object()
    says(batch, "no verification of ragged drafts")

    class Drafts(EagleVerifyInput):
        def is_draft_input(self) -> bool:
            return True

    batch = world.decode([1])
    batch.spec_info = Drafts(None, 1)
    says(batch, "give --speculative-draft-attention-backend another backend")


def test_graphs_on_processors(serve: Serve) -> None:
    with pytest.raises(SglangError, match="give --disable-cuda-graph"):
        serve()[1].init_cpu_graph_state(4, 4)


def test_a_device_that_is_not_there(sglang: Context) -> None:
    world = World(Facts())
    world.runner.device = "npu"
    from attnreg.integrations.sglang.backend import SglangBackend

    with pytest.raises(SglangError, match="finds no device of the type 'npu'"):
        SglangBackend(world.runner)
