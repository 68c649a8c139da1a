"""attnreg's backend in vLLM 0.33.0 in steps that are not plain: odd metadata, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine import Engine
from served import CONFIG, Layer, close
from torch import Tensor

# torch and vLLM warn of their own future
pytestmark = pytest.mark.filterwarnings("default")

MIXED = [(1, 40), (9, 30), (20, 0), (1, 64)]
ODD: dict[str, dict[str, Any]] = {
    "tables with anything past the last block": {"junk": True, "slack": 70},
    "no bounds of single requests": {"bounds": False},
    "no bounds, and rows of padding": {"bounds": False, "padding": 3},
    "views of one tensor": {"fused": True},
    "views of one tensor, padded": {"fused": True, "padding": 2, "dtype": torch.bfloat16},
    "a softcap of 0 is none": {"softcap": 0.0},
    "scales of one element": {"kv_dtype": "fp8", "scales": ([0.5], [0.25])},
}


@pytest.mark.parametrize("lengths", [MIXED, [(1, 40), (1, 5), (1, 0)]], ids=["mixed", "decode"])
@pytest.mark.parametrize("what", ODD)
def test_odd_metadata(what: str, lengths: list[tuple[int, int]], on_cpu: Engine) -> None:
    close(Layer(lengths, **ODD[what]))
    close(Layer(lengths, window=9, **ODD[what]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sinks_have_any_floating_type(dtype: torch.dtype, on_cpu: Engine) -> None:
    layer = Layer(MIXED, sinks=True)
    layer.sink_values = torch.nn.Parameter(torch.randn(4).to(dtype), requires_grad=False)
    close(layer)


def test_a_step_without_requests_or_without_tokens(on_cpu: Engine) -> None:
    layer = Layer([(1, 3)])
    layer.run()
    builder = layer.backend.get_builder_cls()(layer.spec(), ["layer"], CONFIG, torch.device("cpu"))
    common, nothing = layer.common(), torch.zeros(0, 4, 32)
    for requests in (0, 1):
        none = common.replace(
            num_reqs=requests, num_actual_tokens=0, max_query_len=0, max_seq_len=0,
            query_start_loc=common.query_start_loc * 0, query_start_loc_cpu=common.query_start_loc_cpu * 0,
            seq_lens=common.seq_lens * 0, seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound * 0,
            slot_mapping=common.slot_mapping[:0],
        )  # fmt: skip
        keys = nothing[:, :2]
        layer.impl.forward(SimpleNamespace(), nothing, keys, keys, layer.cache, builder.build(0, none), nothing.clone())


def test_numbers_of_numpy_are_numbers(on_cpu: Engine) -> None:
    layer = Layer(MIXED)
    common = layer.common

    def of_numpy() -> Any:
        told = common()
        return told.replace(
            max_query_len=np.int32(told.max_query_len), max_seq_len=np.int64(told.max_seq_len),
            num_actual_tokens=np.int32(told.num_actual_tokens),
        )  # fmt: skip

    layer.common = of_numpy  # type: ignore[method-assign]
    close(layer)


def test_a_request_that_was_preempted_begins_anew_in_other_blocks(on_cpu: Engine) -> None:
    layer = Layer(MIXED)
    close(layer)
    layer.table = layer.table[[2, 0, 3, 1]]
    layer.lengths = [(new + before, 0) for new, before in MIXED]
    layer.query = torch.randn(sum(n for n, _ in layer.lengths), 4, 32)
    torch.testing.assert_close(layer._step().double(), layer.expected(), atol=2e-5, rtol=2e-5)


def test_a_layer_that_shares_keys_does_not_write_those_that_it_is_given(on_cpu: Engine) -> None:
    layer = Layer(MIXED)
    layer.run()
    before, given = layer.cache.clone(), torch.full((31, 2, 32), torch.nan)
    layer.impl.kv_sharing_target_layer_name = "other"
    layer._new = lambda tensors: given  # type: ignore[method-assign]
    torch.testing.assert_close(layer._step().double(), layer.expected(), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(layer.cache, before, equal_nan=True, atol=0, rtol=0)


# causality by request -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 9])
def test_causality_by_request_may_be_integers_as_of_diffusion_gemma(window: int | None, on_cpu: Engine) -> None:
    layer = Layer(MIXED, causal=[True, False, False, True], window=window, padding=1, bounds=False)
    of_bools = layer._causal
    layer._causal = lambda: of_bools().int()  # type: ignore[method-assign]
    close(layer)


def test_a_captured_graph_reads_integers_of_causality_where_every_step_writes_them(on_cpu: Engine) -> None:
    layer = Layer(MIXED, bounds=False)
    layer.run()
    builder = layer.backend.get_builder_cls()(layer.spec(), ["layer"], CONFIG, torch.device("cpu"))
    told = [layer.common().replace(causal=torch.tensor(x, dtype=torch.int32)) for x in ([1, 0, 1, 0], [0, 0, 1, 1])]
    captured = builder.build_for_cudagraph_capture(told[0]).batch(paged=True).causal
    builder.build(0, told[1])
    assert captured.tolist() == [False, False, True, True]


# prefills that leave layers out, whose query_start_loc is still on its way to the host --------------------------------


@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.parametrize("several", [False, True], ids=["one token each", "verified tokens"])
def test_the_fast_prefill_of_layers_that_share_keys(
    several: bool, debug: str, on_cpu: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends import utils

    monkeypatch.setenv("ATTNREG_DEBUG", debug)
    layer = Layer(MIXED)
    layer.run()
    # the last token of each request, and of the second the last three
    last = torch.tensor([0, *([7, 8] if several else []), 9, 29, 30])
    ahead = utils.make_kv_sharing_fast_prefill_common_attn_metadata

    def copied_later(common: Any) -> Any:
        told = ahead(common)
        return told.replace(query_start_loc_cpu=torch.full_like(told.query_start_loc, -12345))

    monkeypatch.setattr(utils, "make_kv_sharing_fast_prefill_common_attn_metadata", copied_later)
    backend = utils.create_fast_prefill_custom_backend("FastPrefill", layer.backend)
    builder = backend.get_builder_cls()(layer.spec(), ["layer"], CONFIG, torch.device("cpu"))
    padded = torch.cat([last, last[-1:], last[-1:]])
    common = layer.common().replace(
        logits_indices_padded=padded, num_logits_indices=len(last), max_logits_per_req=3 if several else 1
    )
    layer.impl.kv_sharing_target_layer_name = "other"
    output = torch.full((len(padded), 4, 32), torch.nan)
    keys = torch.randn(len(padded), 2, 32)
    told = builder.build(0, common)
    layer.impl.forward(SimpleNamespace(), layer.query[padded], keys, keys, layer.cache, told, output)
    torch.testing.assert_close(output[: len(last)].double(), layer.expected()[last], atol=2e-5, rtol=2e-5)
    assert output[len(last) :].isnan().all()


# an encoder's keys ----------------------------------------------------------------------------------------------------


def test_cross_attention_goes_on_from_the_cache_beside_a_request_that_begins(on_cpu: Engine) -> None:
    from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend

    from attnreg.integrations.vllm.backend import AttnregBackend

    backend = create_cross_attention_backend(AttnregBackend)
    layer = Layer(
        [(4, 0), (3, 0)], attn_type="encoder_decoder", encoder_lens=[33, 5], backend=backend, wrapped=True,
        block_size=16,
    )  # fmt: skip
    table = layer._block_table()
    layer._block_table = lambda: table  # type: ignore[method-assign]
    # of the first request alone are keys given
    first, second = Layer([(4, 0)], **_like(layer, [0])), layer
    first.keys, first.values = layer.keys[:1], layer.values[:1]
    first.table, first.cache = table[:1], layer_cache(layer)
    first.impl = second.impl = first._impl()
    first._step()
    second.cache, second.table = first.cache, table
    second.lengths, second.query = [(1, 4), (3, 0)], torch.randn(4, 4, 32)
    all_keys = second._new
    second._new = lambda tensors: all_keys(tensors[1:])  # type: ignore[method-assign]
    torch.testing.assert_close(second._step().double(), second.expected(), atol=2e-5, rtol=2e-5)
    # and then both decode: no keys, and rows of padding
    second.lengths, second.query, second.padding, second.shares = [(1, 5), (1, 3)], torch.randn(4, 4, 32), 2, True
    second.encoder_lens = [33, 5]
    told = second.common
    second.common = lambda: _padded(told(), 2)  # type: ignore[method-assign]
    torch.testing.assert_close(second._step().double(), second.expected(), atol=2e-5, rtol=2e-5)


def _like(layer: Layer, requests: list[int]) -> dict[str, Any]:
    lens = [(layer.encoder_lens or [])[i] for i in requests]
    return {"attn_type": layer.attn_type, "encoder_lens": lens, "backend": layer.backend, "wrapped": True}


def layer_cache(layer: Layer) -> Tensor:
    layer.table = layer._block_table()
    return layer._kv_cache()


def _padded(common: Any, rows: int) -> Any:
    lens = torch.cat([common.encoder_seq_lens, torch.zeros(rows, dtype=torch.int32)])
    return common.replace(encoder_seq_lens=lens, encoder_seq_lens_cpu=lens.numpy())


# keys that every request begins with ----------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 2])
def test_static_sinks_come_before_the_keys_of_every_request(padding: int, on_cpu: Engine) -> None:
    from vllm.model_executor.layers.attention.static_sink_attention import create_static_sink_attention_backend
    from vllm.v1.kv_cache_interface import SinkFullAttentionSpec

    first, layer = 16, Layer([(1, 40), (4, 30), (3, 16)], padding=padding)
    for of_all in (layer.keys, layer.values):
        for one in of_all[1:]:
            one[:first] = of_all[0][:first]
    # vLLM keeps them in its first block that is no padding
    table = layer._block_table()
    one = table == 1
    table[one], table[0, 0] = table[0, 0].clone(), 1
    layer._block_table = lambda: table  # type: ignore[method-assign]
    layer.run()
    told = layer.common()
    without = {name: (getattr(told, name) - first).clamp(min=0) for name in ("seq_lens", "seq_lens_cpu_upper_bound")}
    # as wide as the longest model that there can be
    blocks = torch.nn.functional.pad(told.block_table_tensor[:, 1:], (0, 2), value=-7)[:, :4]
    told = told.replace(**without, max_seq_len=told.max_seq_len - first, block_table_tensor=blocks)
    config = SimpleNamespace(
        **vars(CONFIG) | {"model_config": SimpleNamespace(max_model_len=64)},
        cache_config=SimpleNamespace(block_size=16),
    )
    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    spec = SinkFullAttentionSpec(**shape, sink_len=first)
    builder = create_static_sink_attention_backend(layer.backend, first).get_builder_cls()
    layer.common = lambda: told  # type: ignore[method-assign]
    layer.backend = SimpleNamespace(get_builder_cls=lambda: lambda *given: builder(spec, ["layer"], config, given[-1]))
    torch.testing.assert_close(layer._step().double(), layer.expected(), atol=2e-5, rtol=2e-5)
    assert layer.unwritten.isnan().all()


# refused, each before anything is loaded ------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a window of no key": ({"window": 0}, "sliding_window is 0; expected more than 0"),
    "a window of -1": ({"window": -1}, "sliding_window is -1; expected more than 0"),
    "a window of two sides": ({"window": (7, 0)}, "a layer has one window: sliding_window or asymmetric_window"),
    "a softcap below 0": ({"softcap": -1.0}, r"softcap is -1\.0; expected more than 0"),
    "slopes of other heads": ({"slopes": [0.5, 0.25]}, r"alibi_slopes is \[2\] float32; expected \[4\]"),
    "a group that is no number": ({"num_heads": 4, "num_kv_heads": 3}, "the second must divide the first"),
    "a scale of 0": ({"scale": 0.0}, r"softmax_scale is 0\.0; expected more than 0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_layer_that_contradicts_itself_is_refused_when_it_is_made(what: str, on_cpu: Engine) -> None:
    layer, said = REFUSED[what]
    with pytest.raises(ValueError, match=said):
        replace(Layer(MIXED), **layer)._impl()


def test_sinks_of_other_heads_are_refused_when_the_layer_is_made(on_cpu: Engine) -> None:
    layer = Layer(MIXED, sinks=True)
    layer.sink_values = torch.randn(3)
    with pytest.raises(ValueError, match=r"sinks is \[3\] float32; expected \[4\]"):
        layer._impl()
