"""The custom ops: what torch.compile sees of attention."""

from __future__ import annotations

import gc
import importlib
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module

import attnreg
from attnreg import ops
from attnreg.runtime.interface import BatchError, BatchMetadata, KVCache
from attnreg.runtime.layer import Attention

Make = Callable[..., Attention]


def test_ops_are_a_module_to_import_from() -> None:
    from attnreg.ops import merge_attn_states
    from attnreg.runtime import ops as defined

    assert importlib.import_module("attnreg.ops") is ops is attnreg.ops
    assert merge_attn_states is defined.merge_attn_states
    assert (ops.__all__, ops.__doc__) == (defined.__all__, defined.__doc__)


class Model(nn.Module):
    """Two layers of attention with something to compile around them."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.layers = [make(name=f"model.{i}") for i in range(2)]
        self.caches = [layer.new_kv_cache(3) for layer in self.layers]
        self.projections = nn.ModuleList(nn.Linear(64, 128) for _ in self.layers)
        self.reset()

    def reset(self) -> None:
        for cache in self.caches:
            for tensor in cache:
                tensor.fill_(torch.nan)

    def forward(self, x: Tensor) -> Tensor:
        for layer, cache, projection in zip(self.layers, self.caches, self.projections, strict=True):
            q, k, v = projection(x).split([64, 32, 32], dim=-1)
            x = x + torch.relu(ops.attention(layer, q, k, v, cache))
        return x


@pytest.fixture
def model(make: Make) -> Iterator[Model]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    # a traceback of the test before may hold its layers, whose names are these
    gc.collect()
    yield Model(make)
    torch._dynamo.reset()


@contextmanager
def a_step() -> Iterator[None]:
    """A prompt of five, and a second one of one."""
    batch = BatchMetadata.build(
        [5, 1],
        [5, 1],
        block_table=torch.tensor([[2, 0], [1, 1]], dtype=torch.int32),
        slot_mapping=torch.tensor([8, 9, 10, 11, 0, 4]),
    )
    with torch.inference_mode(), ops.forward_context(batch):
        yield


@pytest.mark.parametrize("missing", ["key", "value"])
def test_a_key_without_a_value_is_refused_and_nothing_is_written(make: Make, missing: str) -> None:
    layer = make(name="half")
    cache = layer.new_kv_cache(3)
    for tensor in cache:
        tensor.fill_(torch.nan)
    given = {"query": torch.zeros(6, 64), "key": torch.zeros(6, 32), "value": torch.zeros(6, 32), missing: None}
    with a_step(), pytest.raises(BatchError, match=f"{missing} is None; expected key and value, or neither"):
        ops.attention(layer, given["query"], given["key"], given["value"], cache)  # type: ignore[arg-type]
    assert all(tensor.isnan().all() for tensor in cache)


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize(
    ("query", "message"),
    [
        (torch.zeros(6, 64).half(), r"query is .* float16; expected .* float32"),
        (torch.zeros(5, 64), "query has 5 rows; the batch has 6 tokens"),
        (torch.zeros(6, 4, 8), "query is .*; expected"),
    ],
)
def test_a_query_that_attention_would_refuse_has_written_no_keys(
    make: Make, query: Tensor, message: str, how: str
) -> None:
    layer = make(name="refused")
    cache = layer.new_kv_cache(3)
    for tensor in cache:
        tensor.fill_(torch.nan)

    def attend(query: Tensor, key: Tensor) -> Tensor:
        return ops.attention(layer, query, key, key, cache)

    torch._dynamo.reset()
    called = torch.compile(attend, backend="aot_eager", fullgraph=True) if how == "compiled" else attend
    with a_step(), pytest.raises(BatchError, match=message):
        called(query, torch.zeros(6, 32))
    assert all(tensor.isnan().all() for tensor in cache)


def test_a_batch_of_packed_keys_beside_a_cache(make: Make) -> None:
    layer = make(name="packed")
    cache = layer.new_kv_cache(1)
    for tensor in cache:
        tensor.zero_()
    batch = BatchMetadata.build([2], slot_mapping=torch.tensor([3, 1]))
    q, k, v = torch.randn(2, 64), torch.randn(2, 32), torch.randn(2, 32)

    def attend() -> Tensor:
        return ops.attention(layer, q, k, v, cache)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with torch.inference_mode(), ops.forward_context(batch):
        # compiled code does not know what the batch reads, so nothing is written
        with pytest.raises(BatchError, match="the batch has no block_table"):
            compiled()
        with pytest.raises(BatchError, match="key has 1 rows"):
            ops.attention(layer, q, k[:1], v[:1], cache)
        assert not any(tensor.any() for tensor in cache)
        output = attend()
    torch.testing.assert_close(output, layer(q, k, v, None, BatchMetadata.build([2])))
    torch.testing.assert_close(cache.key[0, 3].flatten(), k[0])


def test_a_tracer_sees_the_ops(make: Make) -> None:
    layer, cache, batch = cached(make)
    q, k = torch.randn(2, 64), torch.randn(2, 32)

    def attend(q: Tensor, k: Tensor, *cache: Tensor) -> Tensor:
        return ops.attention(layer, q, k, k, KVCache(*cache))

    with torch.inference_mode(), ops.forward_context(batch):
        graph = make_fx(attend)(q, k, *cache)
    assert [str(node.target) for node in graph.graph.nodes if "attnreg" in str(node.target)] == [
        "attnreg.unified_kv_cache_update_and_attention.default"
    ]
    with FakeTensorMode() as mode:
        # without a batch, because nothing is computed
        assert attend(*map(mode.from_tensor, (q, k, *cache))).shape == (2, 64)


@pytest.mark.parametrize("built", ["before", "inside"])
@pytest.mark.parametrize("how", ["make_fx", "make_fx before dispatch", "export", "FakeTensorMode"])
def test_a_tracer_sees_no_call_of_a_layer_itself(make: Make, how: str, built: str) -> None:
    layer, batch, q, k = make(), BatchMetadata.build([2]), torch.randn(2, 64), torch.randn(2, 32)

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return layer(q, k, k, None, batch if built == "before" else BatchMetadata.build([2]))

    def fake(q: Tensor, k: Tensor) -> Tensor:
        # a batch of such tensors has addresses of 0, where nothing may be read
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            return Layer()(mode.from_tensor(q), mode.from_tensor(k))

    trace: dict[str, Callable[..., Any]] = {
        "make_fx": make_fx(Layer()),
        "make_fx before dispatch": make_fx(Layer(), pre_dispatch=True),
        "export": lambda *given: torch.export.export(Layer(), given, strict=False),
        "FakeTensorMode": fake,
    }
    with torch.no_grad(), pytest.raises(BatchError, match=r"attnreg\.ops\.attention"):
        trace[how](q, k)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_the_model_and_writes_its_caches(model: Model, backend: str) -> None:
    x = torch.randn(6, 64)
    with a_step():
        expected = model(x)
        stored = [torch.stack(list(c)).nan_to_num(7.0) for c in model.caches]
        model.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)
    for cache, before in zip(model.caches, stored, strict=True):
        torch.testing.assert_close(torch.stack(list(cache)).nan_to_num(7.0), before)


@pytest.mark.parametrize("how", ["called", "compiled"])
def test_a_gradient_that_a_model_would_lose_is_refused(model: Model, how: str) -> None:
    # that of the sum beside attention would be computed, and be another
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "compiled" else model
    with (
        a_step(),
        torch.inference_mode(False),
        torch.enable_grad(),
        pytest.raises((BatchError, torch._dynamo.exc.TorchRuntimeError), match="requires a gradient"),
    ):
        called(torch.randn(6, 64))
    assert all(tensor.isnan().all() for cache in model.caches for tensor in cache)


@pytest.mark.parametrize("transform", ["functionalize", "vmap"])
def test_functional_transforms_are_refused(model: Model, transform: str) -> None:
    # their wrappers are plain tensors to Python, without numbers of their own
    layer, cache = model.layers[0], model.caches[0]

    def run(query: Tensor) -> Tensor:
        output, key, value = torch.empty_like(query), torch.ones(6, 2, 16), torch.ones(6, 2, 16)
        ops.unified_kv_cache_update_and_attention(query, key, value, cache.key, cache.value, output, layer.name)
        return output

    transformed = getattr(torch.func, transform)(run)
    queries = torch.randn(*([3] if transform == "vmap" else []), 6, 4, 16)
    with a_step(), torch.inference_mode(False), torch.no_grad(), pytest.raises(RuntimeError, match="attnreg::unified"):
        transformed(queries)
    assert all(tensor.isnan().all() for tensor in cache)


def test_a_graph_is_cut_at_the_splitting_ops(model: Model) -> None:
    pieces: list[torch.fx.GraphModule] = []

    def cut(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        part = 0
        parts = {}
        for node in graph.graph.nodes:
            splits = node.op == "call_function" and str(node.target).replace(".", "::", 1) in cut_at
            part += splits
            parts[node] = 2 * part - splits
        # the ops return nothing: that they come before what reads the output is in the order alone, as engines keep it
        split = split_module(graph, None, lambda node: parts[node], keep_original_order=True)
        pieces.extend(m for _, m in split.named_children())
        return split.forward

    cut_at = {name for op in ops.SPLITTING_OPS for name in (op, f"{op}.default")}
    x = torch.randn(6, 64)
    with a_step():
        expected = model(x)
        model.reset()
        torch.testing.assert_close(torch.compile(model, backend=cut, fullgraph=True)(x), expected)
    called = [
        [str(n.target) for n in piece.graph.nodes if n.op == "call_function" and "attnreg" in str(n.target)]
        for piece in pieces
    ]
    # one op per layer, alone in its piece, and compute between them
    assert sorted(map(len, called)) == [0] * (len(pieces) - 2) + [1] * 2
    assert len(pieces) > 2


def cached(make: Make) -> tuple[Attention, KVCache, BatchMetadata]:
    layer = make(name="opcheck")
    cache = layer.new_kv_cache(1)
    for tensor in cache:
        tensor.zero_()
    table = torch.zeros(1, 1, dtype=torch.int32)
    return layer, cache, BatchMetadata.build([2], [2], block_table=table, slot_mapping=torch.tensor([0, 1]))


def test_the_schemas_say_what_the_ops_do(make: Make) -> None:
    layer, cache, batch = cached(make)
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    with ops.forward_context(batch):
        torch.library.opcheck(ops.unified_kv_cache_update.default, (k, v, *cache, layer.name))
        torch.library.opcheck(ops.unified_kv_cache_update.default, (k, v, *cache, layer.name), {"query": q})
        arguments = (q, *cache, torch.empty(2, 4, 16), layer.name)
        torch.library.opcheck(ops.unified_attention_with_output.default, arguments)
        both = (q, k, v, *cache, torch.empty(2, 4, 16), layer.name)
        torch.library.opcheck(ops.unified_kv_cache_update_and_attention.default, both)
    layer = make(name="opcheck.packed", features={"lse"})
    with ops.forward_context(BatchMetadata.build([2])):
        torch.library.opcheck(
            ops.unified_attention_with_output.default,
            (q, None, None, torch.empty(2, 4, 16), layer.name),
            {"key": k, "value": v, "lse": torch.empty(4, 2)},
        )


def test_the_ops_are_those_that_engines_split_on() -> None:
    names = (
        "unified_attention_with_output", "unified_kv_cache_update", "unified_kv_cache_update_and_attention",
        "unified_mla_attention_with_output",
    )  # fmt: skip
    assert tuple(f"attnreg::{name}" for name in names) == ops.SPLITTING_OPS
    for name in ops.SPLITTING_OPS:
        assert operator.attrgetter(name.replace("::", "."))(torch.ops) is getattr(ops, name.partition("::")[2])


def test_layers_are_found_by_name_while_they_live(make: Make) -> None:
    layer = make(name="alone")
    with pytest.raises(ValueError, match="there is a layer named 'alone' already"):
        make(name="alone")
    q, k = torch.randn(2, 4, 16), torch.randn(2, 2, 16)
    with pytest.raises(
        LookupError, match=r"no batch for layer 'alone': run the model inside `attnreg.ops.forward_context"
    ):
        ops.attention(layer, q, k, k)
    with ops.forward_context(layers={"other": BatchMetadata.build([2])}), pytest.raises(LookupError, match="no batch"):
        ops.attention(layer, q, k, k)
    with ops.forward_context(BatchMetadata.build([1]), layers={"alone": BatchMetadata.build([2])}):
        # its own batch goes before that of all
        torch.testing.assert_close(ops.attention(layer, q, k, k), layer(q, k, k, None, BatchMetadata.build([2])))
    with pytest.raises(ValueError, match="the ops find a layer by its name"):
        ops.attention(make(), q, k, k)
    other = make()
    with pytest.raises(ValueError, match="there is a layer named 'alone' already"):
        ops.register(other, "alone")
    assert other.name is None
    ops.register(other, "another")
    with ops.forward_context(BatchMetadata.build([2])):
        torch.testing.assert_close(ops.attention(other, q, k, k), ops.attention(layer, q, k, k))
    del layer
    gc.collect()
    with pytest.raises(LookupError, match="there is no attention layer named 'alone'"):
        ops.unified_attention_with_output(q, None, None, torch.empty(2, 4, 16), "alone", key=k, value=k)
    assert make(name="alone").name == "alone"


@pytest.mark.parametrize("name", [3, b"x", ["x"]])
def test_a_name_is_a_text(make: Make, name: Any) -> None:
    with pytest.raises(ValueError, match="a layer's name must be a string; got"):
        make(name=name)


@pytest.mark.parametrize("name", ["", "a\0", "a\nb", "\x1b[31mred", "\u202eright to left", "\ud800"])
def test_a_name_is_not_empty_and_has_no_control_characters(make: Make, name: str) -> None:
    layer = make()
    for named in (lambda: ops.register(layer, name), lambda: make(name=name)):
        with pytest.raises(ValueError, match="a layer's name must have printable characters alone, at least one"):
            named()
    ops.register(layer, "model.layers.0 ä")


def test_the_package_offers_them() -> None:
    assert attnreg.ops is ops
    assert attnreg.Attention is Attention
