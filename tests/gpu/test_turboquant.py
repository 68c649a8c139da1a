"""TURBOQUANT on a GPU: all its presets in both dtypes, replays with other lengths, and what no host can look at."""

from __future__ import annotations

import pytest
import torch

from attnreg import AttentionRequest, Registry
from attnreg.conformance.proof import prove
from attnreg.conformance.trial import Case
from attnreg.kernels import reference
from attnreg.language.packed import packed_formats
from attnreg.loader import default_registry
from attnreg.machine.detect import detect
from attnreg.runtime.interface import BatchMetadata
from attnreg.runtime.layer import Attention
from attnreg.runtime.turboquant import codec
from attnreg.runtime.turboquant.cache_bytes import packed_blocks
from attnreg.selection.selector import evaluate

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"),
    pytest.mark.filterwarnings("default"),
]
FORMATS = packed_formats(default_registry().vocabulary.words["kv_dtypes"])


def layer_of(registry: Registry, kv_dtype: str) -> Attention:
    request = AttentionRequest(
        head_size=128, num_heads=32, num_kv_heads=8, block_size=16, dtype="bfloat16", kv_dtype=kv_dtype,
        features={"lse"},
    )  # fmt: skip
    return Attention.from_selection(evaluate(request, detect(registry.vocabulary), registry, "TURBOQUANT"))


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("lengths", ["mixed", "prefill"])
def test_every_preset_is_exact(default: Registry, kv_dtype: str, dtype: str, head_size: int, lengths: str) -> None:
    request = AttentionRequest(
        head_size=head_size, num_heads=8, num_kv_heads=2, block_size=16, dtype=dtype, kv_dtype=kv_dtype,
        features={"lse", "non_causal", "sinks", "softcap", "sliding_window"},
    )  # fmt: skip
    selection = evaluate(request, detect(default.vocabulary), default, "TURBOQUANT")
    outcome = prove(Case(request=request, lengths=lengths, storage="NHD"), selection, "cuda")
    assert outcome.problem is None


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_captured_step_is_replayed_with_other_lengths(default: Registry, kv_dtype: str) -> None:
    layer = layer_of(default, kv_dtype)
    requests, blocks = 4, 64
    cache = layer.new_kv_cache(requests * blocks, "cuda")
    table = torch.randperm(requests * blocks, device="cuda").int().view(requests, blocks)
    key, value = (torch.randn(requests * blocks * 16, 8, 128, device="cuda").bfloat16() for _ in range(2))
    every = torch.arange(requests * blocks * 16, device="cuda")
    layer.write_kv(
        key, value, cache, BatchMetadata.build([0], [1], device="cuda", block_table=table[:1], slot_mapping=every)
    )
    slots = torch.full((requests,), -1, device="cuda")
    batch = BatchMetadata.build([1] * requests, [1024] * requests, device="cuda", block_table=table, slot_mapping=slots)
    query = torch.randn(requests, 32, 128, device="cuda").bfloat16()
    new_key, new_value = (torch.randn(requests, 8, 128, device="cuda").bfloat16() for _ in range(2))
    output, lse = torch.empty_like(query), torch.empty(32, requests, device="cuda")
    layer.forward(query, new_key, new_value, cache, batch, output, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.forward(query, new_key, new_value, cache, batch, output, lse=lse)
    for lengths in ([1, 17, 300, 1024], [1024, 0, 5, 999]):
        batch.seq_lens.copy_(torch.tensor(lengths))
        last = (batch.seq_lens.long() - 1).clamp(min=0)
        slots.copy_(table.gather(1, (last // 16)[:, None])[:, 0].long() * 16 + last % 16)
        slots.masked_fill_(batch.seq_lens == 0, -1)
        query.normal_()
        new_key.normal_()
        graph.replay()
        exact = reference.attention(layer.spec, batch, query, cache)
        assert float((output.double() - exact.output).abs().max()) < 0.03
        seen = exact.lse.isfinite()
        assert float((lse.double() - exact.lse)[seen].abs().max()) < 0.03


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_slots_past_the_cache_are_skipped_and_rows_without_numbers_are_marked(default: Registry, kv_dtype: str) -> None:
    layer = layer_of(default, kv_dtype)
    cache = layer.new_kv_cache(2, "cuda")
    for tensor in cache:
        tensor.fill_(0xFF)
    key, value = (torch.randn(5, 8, 128, device="cuda").bfloat16() for _ in range(2))
    key[1, 3, 7], value[2, 5, 0] = torch.nan, torch.inf
    # nothing of this waits for the device
    slots = torch.tensor([0, 1, 2, 32, 10**9], device="cuda")
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.write_kv(
            key, value, cache, BatchMetadata.build([0], [3], device="cuda", block_table=table, slot_mapping=slots)
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    packed = FORMATS[kv_dtype]
    for page, tensor, marked in zip(packed_blocks(packed, 128, 128, 16), cache, ((1, 3), (2, 5)), strict=True):
        rows = page.rows(tensor).transpose(1, 2).flatten(0, 1)
        assert (rows != 0xFF).any(-1).all(-1).nonzero().flatten().tolist() == [0, 1, 2]
        finite = codec.decode(page, rows[:3]).isfinite().all(-1)
        assert (~finite).nonzero().tolist() == [list(marked)]
