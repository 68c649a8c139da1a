"""Attention: what an engine holds per layer."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.registries import tiny

import attnreg
from attnreg import AttentionRequest, NoBackendError, Platform, Registry, load_registry, loader
from attnreg.kernels import cpu_attn, reference
from attnreg.runtime.interface import BatchError, BatchMetadata, SpecError, UnclaimedError
from attnreg.runtime.layer import Attention, refuse_unasked
from attnreg.selection.trace import answer_sentence

Make = Callable[..., Attention]


def prompt_then_token(layer: Attention) -> tuple[BatchMetadata, BatchMetadata]:
    """A prompt of 6 in blocks of four, and the token after it."""
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    slots = torch.tensor([8, 9, 10, 11, 0, 1, 2])
    prompt = BatchMetadata.build([6], [6], block_table=table, slot_mapping=slots[:6])
    return prompt, BatchMetadata.build([1], [7], block_table=table, slot_mapping=slots[6:])


@pytest.mark.parametrize("flat", [False, True])
def test_prompts_and_tokens_through_a_cache_are_attention_over_all_keys(make: Make, flat: bool) -> None:
    torch.manual_seed(0)
    layer = make()
    cache = layer.new_kv_cache(3)
    q, k, v = torch.randn(7, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    prompt, token = prompt_then_token(layer)
    found = []
    for batch, rows in ((prompt, slice(0, 6)), (token, slice(6, 7))):
        arguments = [x[rows].flatten(1) if flat else x[rows] for x in (q, k, v)]
        out = layer.forward(*arguments, cache, batch)
        assert out.shape == ((len(arguments[0]), 64) if flat else (len(arguments[0]), 4, 16))
        found.append(out.view(-1, 4, 16))
    exact = reference.attention(layer.spec, BatchMetadata.build([7]), q, key=k, value=v)
    torch.testing.assert_close(torch.cat(found).double(), exact.output, atol=1e-5, rtol=1e-5)


def test_the_output_is_the_callers_and_padding_stays_as_it_is(make: Make) -> None:
    layer = make()
    batch = BatchMetadata.build([3])
    q, k = torch.randn(5, 4, 16), torch.randn(3, 2, 16)
    output = torch.full((5, 4, 16), 7.0)
    assert layer(q, k, k, None, batch, output) is output
    assert (output[3:] == 7).all()
    assert not (output[:3] == 7).any()


def test_a_prompt_may_be_written_to_the_cache_and_attended_to_as_it_is(make: Make) -> None:
    layer = make()
    cache = layer.new_kv_cache(1)
    q, k = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
    batch = replace(BatchMetadata.build([3]), slot_mapping=torch.tensor([2, 1, 0]))
    packed = layer.forward(q, k, k, None, BatchMetadata.build([3]))
    assert torch.equal(layer.forward(q, k, k, cache, batch), packed)
    assert torch.equal(cache.key[0, :3], k.flip(0))


def test_layers_of_one_spec_share_a_plan_and_others_do_not(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    plan = cpu_attn.plan
    monkeypatch.setattr(cpu_attn, "plan", lambda spec, batch: made.append(spec) or plan(spec, batch))
    batch = BatchMetadata.build([2])
    q, k = torch.randn(2, 4, 16), torch.randn(2, 2, 16)
    for layer in (make(), make(), make(features={"sliding_window"}, sliding_window=1)):
        layer.forward(q, k, k, None, batch)
        layer.forward(q, k, k, None, batch)
    assert [spec.sliding_window for spec in made] == [None, 1]


def test_sinks_are_the_weights_that_they_are_when_they_are_used(make: Make) -> None:
    sinks = torch.zeros(4)
    layer = make(features={"sinks"}, sinks=sinks)
    q, k, v = torch.zeros(1, 4, 16), torch.zeros(1, 2, 16), torch.ones(1, 2, 16)
    batch = BatchMetadata.build([1])
    assert layer.forward(q, k, v, None, batch)[0, 0, 0] == 0.5
    # loaded after the layer was made
    sinks.fill_(torch.tensor(3.0).log())
    torch.testing.assert_close(layer.forward(q, k, v, None, batch), torch.full((1, 4, 16), 0.25))


def test_what_a_layer_did_not_ask_for_is_refused_and_who_serves_it_is_named(
    make: Make, default: Registry, cpu: Platform
) -> None:
    with pytest.raises(
        UnclaimedError, match=r"sinks: TORCH_SDPA does not serve it .*; these accept it when asked for: "
    ) as e:
        make("TORCH_SDPA", sinks=torch.zeros(4))
    assert (e.value.backend, e.value.alternatives) == ("TORCH_SDPA", ("CPU_ATTN",))
    with pytest.raises(
        UnclaimedError, match="softcap: given, but not asked for when CPU_ATTN was selected; add it"
    ) as e:
        make(softcap=2.0)
    assert e.value.alternatives == ("CPU_ATTN",)
    layer, q, k = make(), torch.zeros(2, 4, 16), torch.zeros(2, 2, 16)
    for batch, word in (
        (BatchMetadata.build([2], causal=False), "non_causal"),
        (BatchMetadata.build([2], mm_prefix=torch.zeros(1, 1, 2, dtype=torch.int32)), "mm_prefix"),
    ):
        with pytest.raises(UnclaimedError, match=word):
            layer.forward(q, k, k, None, batch)
    with pytest.raises(UnclaimedError, match="lse"):
        layer.forward(q, k, k, None, BatchMetadata.build([2]), lse=torch.zeros(4, 2))


def test_a_spec_with_a_feature_that_was_not_asked_for_is_refused(make: Make) -> None:
    layer = make()
    for feature in ("batch_invariant", "non_causal"):
        spec = replace(layer.spec, features=layer.spec.features | {feature})
        with pytest.raises(UnclaimedError, match=f"{feature}: given, but not asked for when CPU_ATTN was selected"):
            Attention(layer.selection, spec, layer.params)
    spec = replace(layer.spec, features=layer.spec.features | {"dcp"})
    with pytest.raises(UnclaimedError, match="dcp: CPU_ATTN does not serve it"):
        Attention(layer.selection, spec, layer.params)


@pytest.mark.parametrize("feature", ["pcp", "rswa", "score_bias", "sparse_blocks"])
def test_a_feature_that_a_layer_has_no_input_for_is_refused(feature: str, cpu: Platform) -> None:
    overlay = {"backends": {"CPU_ATTN": {"capabilities": {"add": {"features": [feature]}}}}}
    request = AttentionRequest(head_size=16, num_heads=4, dtype="float32", block_size=16, features={feature})
    selection = attnreg.select(request, cpu, load_registry("default", [overlay]), "CPU_ATTN")
    assert selection.backend is not None
    with pytest.raises(SpecError, match=f"the request asks for {feature}, and a layer here is given nothing to"):
        Attention.from_selection(selection)


def test_a_selection_that_cannot_run(make: Make, default: Registry, cpu: Platform) -> None:
    from attnreg.selection.selector import evaluate

    request = AttentionRequest(head_size=16, num_heads=4, kv_dtype="nvfp4")
    with pytest.raises(NoBackendError, match="nvfp4"):
        Attention.from_selection(evaluate(request, cpu, default))
    hopper = Platform(platform="cuda", arch="sm90")
    known = attnreg.select(AttentionRequest(head_size=64, num_heads=4), hopper, default, "FLASHINFER")
    with pytest.raises(ImportError, match=r"FLASHINFER(/\w+)? has no kernel module .*: the row is knowledge only"):
        Attention.from_selection(known)
    with pytest.raises(SpecError, match="num_heads is not given"):
        make(num_heads=None)


def test_a_module_that_is_no_kernel_module(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu_attn, "write_kv")
    with pytest.raises(
        ImportError, match=r"^attnreg.kernels.cpu_attn, the kernel module of CPU_ATTN, has no write_kv$"
    ):
        make()


def test_caches_of_views_and_of_other_layouts(make: Make) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(7, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    found = []
    for layout in ("NHD", "HND"):
        layer = make(kv_layout=layout)
        shape = layer.kv_cache_shape(3)
        fused = torch.full((3, 2, *shape.key[1:]), torch.nan)
        cache = type(layer.new_kv_cache(1))(fused[:, 0], fused[:, 1])
        prompt, token = prompt_then_token(layer)
        layer.forward(q[:6], k[:6], v[:6], cache, prompt)
        found.append(layer.forward(q[6:], k[6:], v[6:], cache, token))
        assert int(fused.isfinite().sum()) == 2 * 7 * 2 * 16
    torch.testing.assert_close(*found)


def test_an_empty_batch(make: Make) -> None:
    layer = make()
    empty = torch.empty(0, 2, 16)
    assert layer.forward(torch.empty(0, 4, 16), empty, empty, None, BatchMetadata.build([])).shape == (0, 4, 16)


def test_errors_come_before_the_cache_is_written(make: Make) -> None:
    layer = make()
    cache = layer.new_kv_cache(3)
    cache.key.zero_()
    prompt, _ = prompt_then_token(layer)
    with pytest.raises(BatchError, match="query has 5 rows; the batch has 6 tokens"):
        layer.forward(torch.ones(5, 4, 16), torch.ones(6, 2, 16), torch.ones(6, 2, 16), cache, prompt)
    assert not cache.key.any()


def test_the_options_of_the_row_reach_the_module(default: Registry, cpu: Platform) -> None:
    overlay = {"backends": {"CPU_ATTN": {"module": "attnreg.kernels.cpu_attn", "options": {"tile": 64}}}}
    registry = attnreg.load_registry("default", [overlay, {"backends": {"CPU_ATTN": {"options": {"tile": 32}}}}])
    request = AttentionRequest(head_size=16, num_heads=4, dtype="float32")
    layer, plain = (Attention.from_selection(attnreg.select(request, cpu, r, "CPU_ATTN")) for r in (registry, default))
    assert (layer.spec.options, plain.spec.options) == ((("tile", 32),), ())
    assert layer.spec != plain.spec


def test_a_layer_to_run_needs_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loader, "load_kernel", lambda registry, backend: types.ModuleType(backend))
    request, registry = AttentionRequest(head_size=64, num_heads=2, num_kv_heads=2), load_registry("default")
    for platform, arch in (("cuda", "sm90"), ("rocm", "gfx942")):
        there = Platform(platform=platform, arch=arch)
        selection = attnreg.select(request, there, registry, "TRITON_ATTN", to_run=True)
        with pytest.raises(SpecError) as caught:
            Attention.from_selection(selection)
        assert str(caught.value) == (
            f"the selection is to run on {platform}, and PyTorch sees no such device here; "
            "select without `to_run` to describe a layer of another machine"
        )


@pytest.mark.parametrize("name", ["write_kv", "forward"])
def test_an_error_of_a_kernel_says_how_its_backend_was_chosen(
    name: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as of memory that runs out: the choice may have been made long before, by nobody who is asked now."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cpu_attn, name, fails)
    layer = make()
    prompt, _ = prompt_then_token(layer)
    with pytest.raises(RuntimeError, match=r"^out of memory") as e:
        layer.forward(torch.ones(6, 4, 16), torch.ones(6, 2, 16), torch.ones(6, 2, 16), layer.new_kv_cache(3), prompt)
    (note,) = e.value.__notes__
    assert note == f"attnreg: {answer_sentence(layer.selection)}"
    assert note.startswith("attnreg: CPU_ATTN for ")


def test_layers_of_other_modules_under_one_name_share_no_plan(
    make: Callable[..., Attention], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make()
    other = types.ModuleType("other")
    vars(other).update(vars(cpu_attn), plan=lambda spec, batch: "other")
    monkeypatch.setattr(loader, "load_kernel", lambda registry, title: other)
    second = make()
    batch = BatchMetadata.build([2])
    assert layer.spec == second.spec
    assert layer.kind is not second.kind
    for _ in range(2):
        assert layer.plan(batch) != "other"
        assert second.plan(batch) == "other"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_layer_attends_alike_and_has_no_name(make: Make, copied: Callable[[Attention], Attention]) -> None:
    sinks = torch.nn.Parameter(torch.randn(4), requires_grad=False)
    layer = make(features={"sinks"}, sinks=sinks, name="copied")
    q, k = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
    batch = BatchMetadata.build([3])
    expected = layer(q, k, k, None, batch)
    other = copied(layer)
    assert (other.name, other.kind, other.backend, other.selection) == (None, layer.kind, "CPU_ATTN", layer.selection)
    assert torch.equal(other(q, k, k, None, batch), expected)
    # a module that holds a layer and its sinks has one tensor of sinks after a copy, too
    held = copied(types.SimpleNamespace(layer=layer, sinks=sinks))  # type: ignore[arg-type]
    assert held.layer.params.sinks is held.sinks  # type: ignore[attr-defined]
    assert (held.sinks is sinks) == (copied is copy.copy)  # type: ignore[attr-defined]
    with torch.no_grad():
        held.sinks.fill_(3.0)  # type: ignore[attr-defined]
    assert torch.equal(layer(q, k, k, None, batch), expected) == (copied is not copy.copy)


def test_a_layer_that_gave_way_is_refused_with_its_own_reasons() -> None:
    """Asked again with a feature that it lacks, the order would decide in its place."""
    module = "attnreg.kernels.torch_sdpa"
    rows = {"A": tiny.row(module=module), "B": tiny.row(module=module, capabilities={"features": ["sinks"]})}
    fallbacks = [{"when": {"arch": "g1"}, "only": ["features"], "because": "so it is"}]
    registry = tiny.load(rows, fallbacks=fallbacks)
    platform = Platform(platform="gpu", arch="g1")
    selection = attnreg.select(AttentionRequest(head_size=64), platform, registry, "A")
    with pytest.raises(UnclaimedError, match=r"^sinks: A does not serve it \(sinks is not supported\); .*: B$") as e:
        refuse_unasked(selection, {"sinks"})
    assert e.value.alternatives == ("B",)
