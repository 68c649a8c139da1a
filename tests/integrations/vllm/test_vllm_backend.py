"""attnreg's backend in vLLM 0.33.0: its builder and layers against a float64 reference, with vLLM's own classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import Engine
from served import Layer, close

import attnreg

# torch and vLLM warn of their own future
pytestmark = pytest.mark.filterwarnings("default")

DECODE = [(1, 40), (1, 5), (1, 0), (1, 17)]
PREFILL = [(33, 0), (5, 0), (16, 0)]
MIXED = [(1, 40), (9, 30), (20, 0), (1, 64)]
VERIFY = [(4, 20), (4, 61), (4, 3)]
SLOPES = [0.5, 0.25, 0.125, 0.0625]


@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED, VERIFY, [(1, 0)]], ids=str)
@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
def test_every_kind_of_step_in_every_layout_of_the_cache(
    lengths: list[tuple[int, int]], layout: str, on_cpu: Engine
) -> None:
    close(Layer(lengths, layout=layout))


MASKS: dict[str, dict[str, Any]] = {
    "window": {"window": 7},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 1.5},
    "alibi": {"slopes": SLOPES},
    "window and sinks": {"window": 20, "sinks": True},
    "a group of one": {"num_heads": 2},
    "one KV head": {"num_kv_heads": 1},
    "wide values": {"head_size": 32, "head_size_v": 48},
    "heads of 80": {"head_size": 80},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "bfloat16 in float32's cache": {"kv_dtype": "bfloat16"},
    "padded": {"padding": 3},
    "bounds above the lengths": {"slack": 40, "padding": 2},
    "not causal": {"causal": False},
    "not causal with a window": {"causal": False, "window": 9},
    "shared keys": {"shares": True},
}


@pytest.mark.parametrize("lengths", [DECODE, MIXED, VERIFY], ids=["decode", "mixed", "verify"])
@pytest.mark.parametrize("what", MASKS)
def test_what_a_layer_asks_for(what: str, lengths: list[tuple[int, int]], on_cpu: Engine) -> None:
    layer = Layer(lengths, **MASKS[what])
    if layer.shares:
        # another layer has written these keys: here its own first step
        layer.shares = False
        layer.run()
        cache, layer.shares = layer.cache, True
        layer._kv_cache = lambda: cache  # type: ignore[method-assign]
        layer._block_table = lambda: layer.table  # type: ignore[method-assign]
    close(layer)


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 0.5), ([0.5, 2.0], [0.25, 1.0])], ids=["1", "layer", "heads"])
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
def test_an_fp8_cache_is_written_and_read_with_the_layers_scales(
    kv_dtype: str, scales: Any, lengths: list[tuple[int, int]], on_cpu: Engine
) -> None:
    close(Layer(lengths, kv_dtype=kv_dtype, scales=scales))
    close(Layer(lengths, kv_dtype=kv_dtype, scales=scales, layout="LBHNC", dtype=torch.bfloat16, window=9))


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLHNC"])
def test_pages_of_hybrid_models(layout: str, on_cpu: Engine) -> None:
    # a page that was made as long as another group's, and one that is padded up to it
    close(Layer(MIXED, block_size=48, layout=layout))
    close(Layer(MIXED, block_size=16, page_padding=4096, layout=layout))
    if layout.startswith("L"):
        close(Layer(MIXED, kernel_blocks=3, layout=layout))


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
@pytest.mark.parametrize("window", [None, 5])
def test_encoders_have_no_cache(attn_type: str, window: int | None, on_cpu: Engine) -> None:
    close(Layer(PREFILL, attn_type=attn_type, window=window))
    close(Layer(PREFILL, attn_type=attn_type, padding=2, dtype=torch.bfloat16))


@pytest.mark.parametrize("lengths", [[(1, 7), (1, 2)], [(4, 0), (1, 9), (3, 0)]], ids=["decode", "mixed"])
def test_cross_attention_reads_the_encoders_keys(lengths: list[tuple[int, int]], on_cpu: Engine) -> None:
    close(Layer(lengths, attn_type="encoder_decoder", encoder_lens=[33, 5, 17][: len(lengths)]))


def test_vllms_own_wrapper_for_cross_attention(on_cpu: Engine) -> None:
    from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend

    from attnreg.integrations.vllm.backend import AttnregBackend

    backend = create_cross_attention_backend(AttnregBackend)
    close(Layer([(4, 0), (3, 0)], attn_type="encoder_decoder", encoder_lens=[33, 5], backend=backend, wrapped=True))


def test_vllms_own_wrappers_that_make_batches_of_a_batch(on_cpu: Engine) -> None:
    from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
    from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend

    from attnreg.integrations.vllm.backend import AttnregBackend

    both_ways = create_encoder_only_attention_backend(AttnregBackend)
    close(Layer(PREFILL, attn_type="encoder_only", backend=both_ways))
    # a decoder whose prompts are read both ways, with its keys in the cache
    close(Layer(PREFILL, backend=both_ways, causal=False, says_causal=True))
    close(Layer(PREFILL, backend=create_chunked_local_attention_backend(AttnregBackend, 16), chunk=16))
    close(Layer(MIXED, backend=create_chunked_local_attention_backend(AttnregBackend, 32), chunk=32))


RANGES = {0: [(3, 9), (20, 28)], 2: [(0, 4)]}


@pytest.mark.parametrize("window", [None, 4])
def test_multimodal_ranges_include_their_last_position(window: int | None, on_cpu: Engine) -> None:
    model = SimpleNamespace(is_mm_prefix_lm=True)
    on_cpu.config.model_config, before = model, on_cpu.config.model_config  # type: ignore[assignment]
    try:
        close(Layer([(33, 0), (5, 0), (16, 0)], window=window, ranges=RANGES))
        close(Layer([(33, 0), (5, 0), (16, 0)], window=window, ranges={0: [], 1: []}))
        close(Layer([(13, 20), (5, 0), (1, 16)], window=window, ranges=RANGES))
        close(Layer([(33, 0), (5, 0), (16, 0)], window=window, ranges=RANGES, clamps=True))
        close(Layer([(13, 20), (5, 0), (1, 16)], window=window, ranges=RANGES, clamps=True))
    finally:
        on_cpu.config.model_config = before


def test_a_step_that_replays_a_graph_plans_nothing(on_cpu: Engine) -> None:
    from attnreg.integrations.vllm.backend import AttnregBackend

    layer = Layer(DECODE)
    layer.table = layer._block_table()
    builder = AttnregBackend.get_builder_cls()(layer.spec(), ["layer"], on_cpu.config, torch.device("cpu"))
    assert builder.build(0, layer.common()).made is None


@pytest.mark.parametrize("longest", [64, 4096])
@pytest.mark.parametrize("lengths", [[(6, 0), (3, 40), (2, 62)], [(1, 5), (1, 63), (1, 4)]], ids=str)
@pytest.mark.parametrize("left_out", [1, 3])
def test_the_bounds_of_a_draft_model_leave_tokens_out(
    lengths: list[tuple[int, int]], left_out: int, longest: int, on_cpu: Engine
) -> None:
    """vLLM puts the sampled token into every request, or appends one in each step, and its bounds do not count it."""
    model, drafts = SimpleNamespace(max_model_len=longest), SimpleNamespace(num_speculative_tokens=left_out)
    config = SimpleNamespace(model_config=model, speculative_config=drafts)
    close(Layer(lengths, config=config, slack=-left_out))
    close(Layer(lengths, config=config, padding=2))


@pytest.mark.parametrize("window", [None, 9])
def test_requests_that_differ_in_causality(window: int | None, on_cpu: Engine) -> None:
    close(Layer(MIXED, causal=[True, False, False, True], window=window, padding=1))
    close(Layer(VERIFY, causal=[False, True, False], window=window))


# refused --------------------------------------------------------------------------------------------------------------


def test_an_argument_that_nobody_has_read_is_refused_when_the_layer_is_made(on_cpu: Engine) -> None:
    with pytest.raises(ValueError, match="attnreg knows no argument chunk_lookback of an attention layer"):
        Layer(DECODE, extra={"chunk_lookback": 1}).run()


def test_a_layer_that_the_kernels_do_not_serve_is_refused_when_it_is_made(on_cpu: Engine) -> None:
    from attnreg.integrations.vllm.impl import AttnregImpl

    with pytest.raises(ValueError, match=r"attnreg \(ATTNREG\): (.|\n)*cross-attention shares no positions"):
        AttnregImpl(4, 32, 0.3, 2, None, 7, "auto", None, "encoder_decoder")


def test_a_run_that_measures_memory_computes_nothing(on_cpu: Engine) -> None:
    from attnreg.integrations.vllm.impl import AttnregImpl

    x = torch.ones(2, 4, 32)
    AttnregImpl(4, 32, 0.3, 2).forward(SimpleNamespace(), x, x[:, :2], x[:, :2], torch.zeros(0), None, x)
    assert not x.any()


def test_an_output_that_is_quantised_by_blocks_is_refused(on_cpu: Engine) -> None:
    from attnreg.integrations.vllm.impl import AttnregImpl

    x = torch.ones(2, 4, 32)
    with pytest.raises(ValueError, match="no output that is quantised by blocks"):
        AttnregImpl(4, 32, 0.3, 2).forward(SimpleNamespace(), x, x, x, x, None, x, output_block_scale=torch.ones(1))


# fp8 output -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def quantising(on_cpu: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row for processors writes fp8 too, as the contract says."""
    from dataclasses import replace

    from attnreg.integrations import kernels
    from attnreg.kernels import cpu_attn

    features = {"fp8_output", *attnreg.load_registry("default").backends["CPU_ATTN"].variants[0].served}
    row = {"capabilities": {"features": sorted(features)}}
    registry = attnreg.load_registry("default", {"backends": {"CPU_ATTN": row}})
    monkeypatch.setattr(kernels, "own_registry", lambda: registry)
    attend = cpu_attn.forward

    def forward(spec: Any, plan: Any, call: Any) -> None:
        if "fp8_output" not in spec.features:
            attend(spec, plan, call)
            return
        exact = torch.zeros(call.output.shape, dtype=spec.dtype)
        attend(replace(spec, features=spec.features - {"fp8_output"}), plan, call._replace(output=exact))
        call.output.copy_((exact / call.params.out_scale).clamp(-448, 448))

    monkeypatch.setattr(cpu_attn, "forward", forward)


@pytest.mark.parametrize("scale", [torch.tensor(0.02), torch.tensor([0.005]), torch.tensor([[0.5]])], ids=str)
def test_an_fp8_output_is_written_with_vllms_scale(scale: torch.Tensor, quantising: None) -> None:
    layer = Layer(MIXED, output_scale=scale)
    got, expected = layer.run(), (layer.expected() / scale.item()).clamp(-448, 448)
    assert got.dtype == torch.float8_e4m3fn
    # half a unit in the last of three bits
    torch.testing.assert_close(got.double(), expected, rtol=2**-4 + 1e-3, atol=2**-9)


def test_the_scale_may_be_another_or_none_in_the_next_step(quantising: None) -> None:
    layer = Layer(DECODE, output_scale=torch.tensor(0.02))
    first = layer.run()
    layer.output_scale = torch.tensor(0.04)
    assert (layer._step().double().abs() <= first.double().abs()).all()
    layer.output_scale = None
    torch.testing.assert_close(layer._step().double(), layer.expected(), atol=2e-5, rtol=2e-5)


def test_vllm_is_told_where_the_kernels_write_fp8_themselves(on_cpu: Engine, request: pytest.FixtureRequest) -> None:
    from vllm.model_executor.layers.quantization.utils import quant_utils

    from attnreg.integrations.vllm.impl import AttnregImpl

    one_scale, by_token = quant_utils.kFp8StaticTensorSym, quant_utils.kFp8DynamicTokenSym
    assert not AttnregImpl(4, 32, 0.3, 2).fused_output_quant_supported(one_scale)
    request.getfixturevalue("quantising")
    assert AttnregImpl(4, 32, 0.3, 2).fused_output_quant_supported(one_scale)
    assert not AttnregImpl(4, 32, 0.3, 2).fused_output_quant_supported(by_token)
