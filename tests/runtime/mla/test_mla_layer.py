"""MLAAttention and its custom op: both phases of a batch, in any order, against the float64 reference."""

from __future__ import annotations

import copy
import gc
import pickle
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.layers.mla import filled_cache
from torch import Tensor

import attnreg
from attnreg import AttentionRequest, BatchError, BatchMetadata, MLAAttention, Platform, SpecError, UnclaimedError
from attnreg.kernels.mla import reference as mla_reference
from attnreg.runtime.mla.interface import read_latents

REQUEST = AttentionRequest(
    attention="mla", phase="decode", head_size=80, head_size_v=64, num_heads=4, num_kv_heads=1, block_size=16,
    kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24, dtype="float32",
    features={"lse", "non_causal"},
)  # fmt: skip
# decodes and prompts, side by side and mixed; with and without context, and requests without a query
BATCHES = {
    "decodes first": ([1, 1, 5, 20], [40, 1, 5, 50]),
    "mixed": ([5, 1, 0, 20, 1], [30, 9, 7, 20, 33]),
    "decodes": ([1, 0, 1], [40, 3, 17]),
    "prompts": ([7, 18], [7, 33]),
    "nothing": ([0], [5]),
}


class Case:
    """A layer, a batch and its tensors, with poison in the rows of padding and in all that is written."""

    def __init__(
        self, cpu: Platform, pattern: str, *, prefill: bool = True, causal: bool = True, **changes: Any
    ) -> None:
        torch.manual_seed(0)
        fields = {k: v for k, v in changes.items() if k in AttentionRequest.__dataclass_fields__}
        request = replace(REQUEST, **fields)
        select = [attnreg.select(r, cpu, to_run=True) for r in (request, request.expanded())]
        quantised = request.kv_dtype == "fp8"
        self.scale = torch.tensor([0.25]) if quantised else None
        self.weight = torch.randn(4 * 56, 64) * 0.2
        more = {k: v for k, v in changes.items() if k not in fields}
        self.layer = MLAAttention(
            select[0], select[1] if prefill else None, kv_b_proj=self.weight, kv_scale=self.scale,
            workspace_tokens=32, **more,
        )  # fmt: skip
        queries, keys = BATCHES[pattern]
        self.spec = self.layer.spec
        self.cache, table = filled_cache(self.spec, keys, self.scale)
        slots = [int(table[i, t // 16]) * 16 + t % 16 for i, (q, k) in enumerate(zip(queries, keys, strict=True))
                 for t in range(k - q, k)]  # fmt: skip
        self.batch = BatchMetadata.build(
            queries, keys, block_table=table, causal=causal, slot_mapping=torch.tensor(slots, dtype=torch.int64)
        )
        rows = sum(queries) + 2
        self.query, self.latent, self.rope = (torch.randn(rows, *size) for size in ((4, 48), (64,), (16,)))
        self.output = torch.full((rows, 4, 24), torch.nan)
        self.lse = torch.full((4, rows), torch.nan)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.query, self.latent, self.rope, self.cache

    def check(self, tolerance: float = 2e-5) -> None:
        """Assert that output and lse are exact but for rounding, that latents are stored, and that padding is kept."""
        n = self.batch.num_tokens
        new = (self.latent, self.rope) if self.layer.prompts is not None else None
        exact = mla_reference.attention(
            self.spec, self.batch, self.query, self.cache, self.weight, kv_scale=self.scale, new=new,
            decode_queries=self.layer.decode_queries,
        )  # fmt: skip
        torch.testing.assert_close(self.output[:n].double(), exact.output, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(self.lse[:, :n].double(), exact.lse, rtol=tolerance, atol=tolerance)
        assert self.output[n:].isnan().all()
        assert self.lse[:, n:].isnan().all()
        assert self.batch.slot_mapping is not None
        stored = read_latents(self.spec.latent, self.cache.flatten(0, 1)[self.batch.slot_mapping], self.scale)
        given = torch.cat([self.latent, self.rope], -1)[:n]
        torch.testing.assert_close(stored, given, rtol=0.07 if self.scale is not None else 0, atol=1e-3)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("changes", [{}, {"prefill": False}, {"kv_dtype": "fp8"}, {"decode_queries": 5}], ids=str)
def test_both_phases_of_a_batch(cpu: Platform, name: str, causal: bool, changes: dict[str, Any]) -> None:
    case = Case(cpu, name, causal=causal, **changes)
    case.layer(*case.tensors, case.batch, case.output, lse=case.lse)
    case.check()


def test_a_table_laid_out_anew_in_place_is_seen(cpu: Platform) -> None:
    case = Case(cpu, "mixed")
    table = case.batch.block_table
    assert table is not None
    # all requests read the blocks of the first, which are those of the longest, and then their own again
    table[0] = table[4]
    for strides in (table.stride(), (0, 1), table.stride()):
        table.as_strided_(table.shape, strides)
        case.layer(*case.tensors, case.batch, case.output, lse=case.lse)
        case.check()


@pytest.mark.parametrize("name", ["query", "latent", "rope", "cache", "output", "lse", "weight"])
def test_a_gradient_that_a_call_would_lose_is_refused(cpu: Platform, name: str) -> None:
    case = Case(cpu, "mixed")
    before = case.cache.clone()
    getattr(case, name).requires_grad_()
    words = {"cache": "kv_cache", "weight": "kv_b_proj"}.get(name, name)
    with pytest.raises(BatchError, match=f"{words} requires a gradient, and attnreg computes none"):
        case.layer(*case.tensors, case.batch, case.output, lse=case.lse)
    torch.testing.assert_close(case.cache.detach(), before, rtol=0, atol=0, equal_nan=True)
    with torch.no_grad():
        case.layer(*case.tensors, case.batch, case.output, lse=case.lse)
        case.check()


def test_an_output_is_allocated(cpu: Platform) -> None:
    case = Case(cpu, "mixed")
    output = case.layer(*case.tensors, case.batch)
    case.output[: case.batch.num_tokens] = output[: case.batch.num_tokens]
    case.layer(*case.tensors, case.batch, lse=case.lse)
    case.check()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("changes", [{}, {"prefill": False}, {"kv_dtype": "fp8", "decode_queries": 5}], ids=str)
def test_a_copy_of_a_layer_attends_alike_and_has_no_name(
    cpu: Platform, copied: Callable[[MLAAttention], MLAAttention], changes: dict[str, Any]
) -> None:
    case = Case(cpu, "mixed", **changes, name="copied-mla")
    case.layer(*case.tensors, case.batch, case.output, lse=case.lse)
    expected = case.output.clone()
    other = copied(case.layer)
    assert other.name is None
    assert (other.decode_queries, other.prefill is None) == (case.layer.decode_queries, case.layer.prefill is None)
    case.output.fill_(torch.nan)
    other(*case.tensors, case.batch, case.output, lse=case.lse)
    torch.testing.assert_close(case.output, expected, rtol=0, atol=0, equal_nan=True)
    case.check()
    # a module that holds a layer and its weight has one weight after a copy, too
    held: Any = copied(types.SimpleNamespace(layer=case.layer, weight=case.weight))  # type: ignore[arg-type]
    assert held.layer.kv_b_proj is held.weight
    assert (held.weight is case.weight) == (copied is copy.copy)


@pytest.mark.parametrize("name", ["mixed", "decodes", "prompts"])
def test_latents_that_are_stored_already_are_not_written(cpu: Platform, name: str) -> None:
    case = Case(cpu, name)
    case.layer(*case.tensors, case.batch, case.output, lse=case.lse)
    outputs, before = (case.output.clone(), case.lse.clone()), case.cache.clone()
    case.output.fill_(torch.nan)
    case.lse.fill_(torch.nan)
    batch = BatchMetadata.build(*BATCHES[name], block_table=case.batch.block_table)
    with pytest.raises(BatchError, match="slot_mapping is None"):
        case.layer(*case.tensors, batch, case.output)
    case.layer(*case.tensors, batch, case.output, lse=case.lse, stored=True)
    torch.testing.assert_close((case.output, case.lse), outputs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(case.cache.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("changes", [{}, {"kv_dtype": "fp8"}], ids=str)
def test_a_cache_that_holds_all_latents_is_attended_to(cpu: Platform, name: str, changes: dict[str, Any]) -> None:
    # in the latent form, as a layer without a backend for prompts computes it
    case = Case(cpu, name, prefill=False, **changes)
    case.layer(*case.tensors, case.batch, case.output, lse=case.lse)
    outputs, before = (case.output.clone(), case.lse.clone()), case.cache.clone()
    layer = Case(cpu, name, **changes).layer
    batch = BatchMetadata.build(*BATCHES[name], block_table=case.batch.block_table)
    case.output.fill_(torch.nan)
    case.lse.fill_(torch.nan)
    assert layer.attend(case.query, case.cache, batch, case.output, lse=case.lse) is case.output
    torch.testing.assert_close((case.output, case.lse), outputs, rtol=0, atol=0, equal_nan=True)
    made, rows = layer.attend(case.query, case.cache, batch), batch.num_tokens
    assert torch.equal(made[:rows], outputs[0][:rows])
    # the weight is read at each call
    layer.kv_b_proj.neg_()
    layer.attend(case.query[:rows], case.cache, batch, case.output[:rows])
    case.weight.neg_()
    again = case.layer(*case.tensors, case.batch)
    assert torch.equal(case.output[:rows], again[:rows])
    assert not rows or not torch.equal(case.output[:rows], outputs[0][:rows])
    assert torch.equal(case.cache.view(torch.uint8), before.view(torch.uint8))


def test_what_does_not_fit_a_cache_that_is_read_is_refused(cpu: Platform) -> None:
    case = Case(cpu, "decodes")
    attend, query, cache, batch = case.layer.attend, case.query, case.cache, case.batch
    rows = len(query)
    attend(query, cache, batch, case.output, lse=case.lse)
    with pytest.raises(BatchError, match=r"query is \[4, 4, 47\] float32; expected \[4, 4, 48\] float32"):
        attend(query[..., 1:], cache, batch)
    with pytest.raises(BatchError, match=r"query has 1 rows; the batch has 2 tokens"):
        attend(query[:1], cache, batch)
    with pytest.raises(BatchError, match=r"kv_cache is \[.*, 16, 79\] float32; expected \[any, 16, 80\]"):
        attend(query, cache[..., 1:], batch)
    with pytest.raises(BatchError, match=r"lse is \[4, 1\] float32; expected \[4, 4\] float32"):
        attend(query, cache, batch, lse=case.lse[:, :1])
    with pytest.raises(BatchError, match="indices are given, but the layer is not sparse MLA"):
        attend(query, cache, batch, indices=torch.zeros(rows, 3, dtype=torch.int32))
    with pytest.raises(BatchError, match="output overlaps query in memory"):
        attend(query, cache, batch, query.flatten()[: rows * 96].view(rows, 4, 24))
    with pytest.raises(BatchError, match="output overlaps kv_cache in memory"):
        attend(query, cache, batch, cache.flatten()[: rows * 96].view(rows, 4, 24))
    with pytest.raises(BatchError, match="query requires a gradient, and attnreg computes none"):
        attend(query.clone().requires_grad_(), cache, batch)


def test_the_op_runs_the_layer_of_a_name(cpu: Platform) -> None:
    case = Case(cpu, "mixed", name="mla.0")
    op = attnreg.ops.unified_mla_attention_with_output
    with pytest.raises(LookupError, match="no batch for layer 'mla"):
        op(*case.tensors, case.output, "mla.0", lse=case.lse)
    with attnreg.ops.forward_context(case.batch):
        with pytest.raises(LookupError, match=r"there is no layer of MLA named 'mla.1'; the layers are: .*mla.0"):
            op(*case.tensors, case.output, "mla.1")
        op(*case.tensors, case.output, "mla.0", lse=case.lse)
    case.check()
    assert "attnreg::unified_mla_attention_with_output" in attnreg.ops.SPLITTING_OPS
    with pytest.raises(ValueError, match=r"there is a layer of MLA named 'mla.0' already"):
        Case(cpu, "mixed", name="mla.0")
    del case
    gc.collect()
    Case(cpu, "mixed", name="mla.0")


def test_the_op_is_traced(cpu: Platform) -> None:
    case = Case(cpu, "mixed", name="mla.traced")

    def model(query: Tensor, latent: Tensor, rope: Tensor, cache: Tensor, output: Tensor, lse: Tensor) -> Tensor:
        attnreg.ops.unified_mla_attention_with_output(query * 1, latent, rope, cache, output, "mla.traced", lse=lse)
        return output * 2

    with attnreg.ops.forward_context(case.batch):
        doubled = torch.compile(model, backend="aot_eager", fullgraph=True)(*case.tensors, case.output, case.lse)
    case.check()
    torch.testing.assert_close(doubled[: case.batch.num_tokens], case.output[: case.batch.num_tokens] * 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(29, 4, 47)}, r"query is \[29, 4, 47\] float32; expected \[29, 4, 48\] float32"),
        ({"latent": torch.zeros(28, 64)}, r"latent is \[28, 64\] float32; expected \[29, 64\] float32"),
        ({"rope": torch.zeros(29, 16).half()}, r"rope is \[29, 16\] float16; expected \[29, 16\] float32"),
        ({"kv_cache": torch.zeros(9, 16, 81)}, r"kv_cache is \[9, 16, 81\] float32; expected \[any, 16, 80\]"),
        ({"output": torch.zeros(29, 4, 1).expand(29, 4, 24)}, "output has stride 0 in its last dimension"),
        ({"lse": torch.zeros(4, 28)}, r"lse is \[4, 28\] float32; expected \[4, 29\] float32"),
        ({"latent": None}, "latent is None; expected a tensor"),
        ({"kv_cache": [1]}, r"kv_cache is \[1\]; expected a tensor"),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_what_does_not_fit_is_refused_before_the_cache_is_written(
    cpu: Platform, changes: dict[str, Any], message: str, known: bool
) -> None:
    case = Case(cpu, "mixed")
    names = ("query", "latent", "rope", "kv_cache")
    given = dict(zip(names, case.tensors, strict=True)) | {"output": case.output, "lse": case.lse}
    if known:
        # others of their kind have fitted
        case.layer(batch=case.batch, **given)
        case.output.fill_(torch.nan)
    before = case.cache.clone()
    with pytest.raises(BatchError, match=message):
        case.layer(batch=case.batch, **(given | changes))
    assert torch.equal(case.cache.view(torch.uint8), before.view(torch.uint8))
    assert case.output.isnan().all()


def test_fewer_slots_than_tokens_are_refused_before_the_cache_is_written(cpu: Platform) -> None:
    case = Case(cpu, "mixed")
    assert case.batch.slot_mapping is not None
    batch, before = replace(case.batch, slot_mapping=case.batch.slot_mapping[:-1]), case.cache.clone()
    with pytest.raises(BatchError, match="slot_mapping has 26 slots; the batch has 27 tokens"):
        case.layer(*case.tensors, batch, case.output)
    assert torch.equal(case.cache.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("read", ["query", "latent", "rope", "kv_cache", "lse"])
def test_memory_that_is_written_while_it_is_read_is_refused(cpu: Platform, read: str) -> None:
    case = Case(cpu, "mixed")
    given = dict(zip(("query", "latent", "rope", "kv_cache"), case.tensors, strict=True)) | {"lse": case.lse}
    # an output that begins in the last elements of what is read
    before = given[read].numel() - 1
    memory = torch.zeros(before + case.output.numel())
    given[read] = memory[: before + 1].view(given[read].shape).copy_(given[read])
    kept = memory.clone()
    message = f"(kv_cache overlaps output|output overlaps {read}) in memory; it is written while that is read"
    with pytest.raises(BatchError, match=message):
        case.layer(batch=case.batch, output=memory[before:].view(case.output.shape), **given)
    torch.testing.assert_close(memory, kept, rtol=0, atol=0, equal_nan=True)


def test_an_output_may_lie_beside_the_query_in_one_tensor(cpu: Platform) -> None:
    case = Case(cpu, "mixed")
    rows = case.query.shape[0]
    memory = torch.full((2, rows, 4, 48), torch.nan)
    case.query = memory[0].copy_(case.query)
    case.output = memory[1, ..., :24]
    case.layer(*case.tensors, case.batch, case.output, lse=case.lse)
    case.check()


def test_a_mask_that_was_not_asked_for_is_refused_before_the_cache_is_written(cpu: Platform) -> None:
    case = Case(cpu, "mixed", causal=False, features={"lse"})
    before = case.cache.clone()
    with pytest.raises(UnclaimedError, match="non_causal: given, but not asked for"):
        case.layer(*case.tensors, case.batch)
    assert torch.equal(case.cache.view(torch.uint8), before.view(torch.uint8))


def test_selections_of_different_layers_are_refused(cpu: Platform) -> None:
    decode, weight = attnreg.select(REQUEST, cpu, to_run=True), torch.zeros(224, 64)
    other = attnreg.select(replace(REQUEST, num_heads=8).expanded(), cpu, to_run=True)
    with pytest.raises(SpecError, match=r"prefill is a selection for 8 heads of 48/24.* have 4 heads of 48/24"):
        MLAAttention(decode, other, kv_b_proj=weight)
    with pytest.raises(SpecError, match="expected one of MLA in its latent form"):
        MLAAttention(other, kv_b_proj=weight)
    with pytest.raises(SpecError, match=r"kv_b_proj is \[224, 63\] float32; expected \[224, 64\] float32"):
        MLAAttention(decode, kv_b_proj=weight[:, 1:])
    with pytest.raises(SpecError, match="decode_queries is 0; expected an integer of at least 1"):
        MLAAttention(decode, kv_b_proj=weight, decode_queries=0)


def test_what_a_backend_has_and_the_layer_has_not_is_refused(cpu: Platform) -> None:
    weight, triton = torch.zeros(224, 64), Platform(platform="cuda", arch="sm80")
    for feature in ("batch_invariant", "dcp", "adaptive_verification"):
        request = replace(REQUEST, dtype="float16", features={"lse", feature})
        decode = attnreg.select(request, triton, backend="TRITON_MLA")
        with pytest.raises(SpecError, match=f"decode asks for {feature}, which TRITON_MLA serves and a layer of MLA"):
            MLAAttention(decode, kv_b_proj=weight.half())
    overlay = {"backends": {"TORCH_PREFILL": {"capabilities": {"add": {"features": ["batch_invariant"]}}}}}
    registry = attnreg.load_registry("default", [overlay])
    expanded = replace(REQUEST.expanded(), features=frozenset({"lse", "batch_invariant"}))
    prefill = attnreg.select(expanded, cpu, registry, "TORCH_PREFILL")
    with pytest.raises(SpecError, match="prefill asks for batch_invariant, which TORCH_PREFILL serves and a layer of"):
        MLAAttention(attnreg.select(REQUEST, cpu), prefill, kv_b_proj=weight)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_ds_mla"])
def test_a_layer_has_what_its_rows_for_both_phases_claim(kv_dtype: str) -> None:
    request = attnreg.AttentionRequest(
        attention="mla", phase="decode", head_size=576, head_size_v=512, num_heads=4, num_kv_heads=1, block_size=16,
        kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=16, dtype="bfloat16", kv_dtype=kv_dtype,
        features={"lse", "causal_by_request", "non_causal"},
    )  # fmt: skip
    cpu = attnreg.Platform(platform="cpu", arch="x86_64")
    decode = attnreg.select(request, cpu, backend="TORCH_MLA")
    prefill = attnreg.select(request.expanded(), cpu, backend="TORCH_PREFILL")
    torch.manual_seed(0)
    weight = (torch.randn(4 * 48, 512) * 0.05).bfloat16()
    layer = attnreg.MLAAttention(decode, prefill, kv_b_proj=weight, workspace_tokens=16)
    cache = layer.new_kv_cache(8)
    cache.view(torch.uint8).fill_(0)
    table = torch.tensor([[5, 2, 7], [1, 6, 3]], dtype=torch.int32)
    slots = [int(table[i, t // 16]) * 16 + t % 16 for i, n in enumerate((40, 33)) for t in range(n)]
    # a context, then a step of prompts of which one is not causal
    for queries, keys, where in (
        ([35, 30], [35, 30], [*slots[:35], *slots[40:70]]),
        ([5, 3], [40, 33], [*slots[35:40], *slots[70:]]),
    ):
        batch = attnreg.BatchMetadata.build(
            queries, keys, block_table=table, slot_mapping=torch.tensor(where), causal=[True, False]
        )
        rows = sum(queries)
        query, new = torch.randn(rows, 4, 96).bfloat16(), torch.randn(rows, 576).bfloat16()
        parts = new[:, :512], new[:, 512:]
        output = layer(query, *parts, cache, batch)
    exact = mla_reference.attention(layer.spec, batch, query, cache, weight, new=parts)
    torch.testing.assert_close(output.double(), exact.output, atol=3e-2, rtol=3e-2)
