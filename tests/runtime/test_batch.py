"""Batches: lengths that are none are refused with their names, and what is changed in place is seen."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import attnreg
from attnreg.kernels import reference
from attnreg.runtime.interface import BatchError, BatchMetadata, KVCache, SpecError
from attnreg.runtime.layer import Attention

Make = Callable[..., Attention]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"query_lens": [2**31]}, r"query_lens\[0\] is 2147483648; expected an integer from 0 to 1073741824"),
        ({"query_lens": ["3"]}, r"query_lens\[0\] is '3'; expected an integer"),
        ({"query_lens": [1, 1.5]}, r"query_lens\[1\] is 1.5; expected an integer"),
        ({"query_lens": [True]}, r"query_lens\[0\] is True; expected an integer"),
        ({"query_lens": [-1]}, r"query_lens\[0\] is -1; expected an integer"),
        ({"query_lens": 3}, "query_lens is 3; expected a sequence of integers"),
        ({"query_lens": None}, "query_lens is None; expected a sequence of integers"),
        ({"query_lens": [1], "seq_lens": [None]}, r"seq_lens\[0\] is None; expected an integer"),
        ({"query_lens": [1, 2], "seq_lens": [1]}, "query_lens has 2 requests and seq_lens 1"),
        ({"query_lens": [2**30, 2**30]}, "query_lens are 2147483648 tokens together; prefix sums hold up to"),
        ({"query_lens": torch.tensor([[1]])}, r"query_lens\[0\] is \[1\]; expected an integer"),
        (
            {"query_lens": [1], "causal": 1},
            r"causal is 1; expected True, False, or a tensor \[num_reqs\] bool",
        ),
        ({"query_lens": [1], "causal": None}, "causal is None; expected True, False, or a tensor"),
        ({"query_lens": [1], "block_table": [[0]]}, r"block_table is \[\[0\]\]; expected a tensor"),
        ({"query_lens": [1], "mm_prefix": torch.eye(2).to_sparse()}, "mm_prefix is .*; expected a tensor with strides"),
    ],
)
def test_lengths_that_are_none_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        BatchMetadata.build(**given)


@pytest.mark.parametrize("bound", ["3", 2.0, -1, True, None, 2**31])
def test_bounds_are_integers(bound: Any) -> None:
    with pytest.raises(BatchError, match=r"max_query_len is .*; expected an integer from 0 to 1073741824"):
        replace(BatchMetadata.build([1]), max_query_len=bound)


def test_lengths_may_be_tensors_or_any_integers() -> None:
    batch = BatchMetadata.build(torch.tensor([2, 1]), iter(torch.tensor([5, 1])))  # type: ignore[arg-type]
    assert batch.query_start_loc.tolist() == [0, 2, 3]
    assert batch.seq_lens.tolist() == [5, 1]
    assert batch.key_start_loc is not None
    assert batch.key_start_loc.tolist() == [0, 5, 6]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sliding_window": 2.5}, "sliding_window is 2.5; expected an integer"),
        ({"sliding_window": True}, "sliding_window is True; expected an integer"),
        ({"sliding_window": "128"}, r"sliding_window is '128'; expected an integer or \(left, right\)"),
        ({"sliding_window": (1, 2, 3)}, r"sliding_window is \(1, 2, 3\); expected \(left, right\), two integers"),
        ({"sliding_window": (127, 0.5)}, r"sliding_window is \(127, 0.5\); expected \(left, right\), two integers"),
        ({"sliding_window": (-2, 0)}, r"sliding_window is \(-2, 0\); expected keys before and after a query"),
        ({"chunk": 0}, "chunk is 0; expected more than 0"),
        ({"chunk": 8192.0}, "chunk is 8192.0; expected an integer"),
        ({"sliding_window": 2**40}, "sliding_window is 1099511627776; expected up to 2147483648"),
        ({"sliding_window": 0}, "sliding_window is 0; expected more than 0"),
        ({"softcap": "2"}, "softcap is '2'; expected a number"),
        ({"softcap": float("nan")}, "softcap is nan; expected more than 0"),
        ({"softmax_scale": torch.tensor(0.1)}, "softmax_scale is tensor.*; expected a number"),
        ({"softmax_scale": "x"}, "softmax_scale is 'x'; expected a number"),
    ],
)
def test_numbers_of_a_layer_are_numbers(make: Make, given: dict[str, Any], message: str) -> None:
    features = {name for name in ("sliding_window", "chunk", "softcap") if name in given}
    with pytest.raises(SpecError, match=message):
        make(features=features, **given)


def test_whole_numbers_are_compiled_as_the_floats_that_they_equal(make: Make) -> None:
    spec = make(features={"softcap"}, softcap=30, softmax_scale=1).spec
    assert (type(spec.softcap), type(spec.softmax_scale)) == (float, float)


def test_calls_with_what_is_no_argument(make: Make) -> None:
    layer, q, k = make(), torch.zeros(2, 4, 16), torch.zeros(2, 2, 16)
    packed = BatchMetadata.build([2])
    paged = BatchMetadata.build(
        [2], block_table=torch.zeros(1, 1, dtype=torch.int32), slot_mapping=torch.tensor([0, 1])
    )
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((q, k, k, None, {"query_lens": [2]}), r"batch is \{'query_lens': \[2\]\}; expected BatchMetadata"),
        ((q, k, k, None, None), "batch is None; expected BatchMetadata"),
        ((None, k, k, None, packed), r"query is None; expected \[tokens, 4, 16\]"),
        ((torch.tensor(1.0), k, k, None, packed), r"query is \[\] float32; expected"),
        ((q, k, k, torch.zeros(2, 2, 2), paged), "kv_cache is .*; expected KVCache"),
        ((q, k, k, (k,), paged), "kv_cache is .*; expected KVCache"),
        ((q, k, k, (k, None), paged), "kv_cache.value is None; expected a tensor"),
        ((q, 3, k, None, packed), "key is 3; expected a tensor"),
        ((q, k, k, None, packed, "out"), "output is 'out'; expected a tensor"),
    ]
    for arguments, message in wrong:
        with pytest.raises(BatchError, match=message):
            layer.forward(*arguments)
    with pytest.raises(BatchError, match="output is None; expected the tensor to write to"):
        layer.attend(q, None, packed, None, key=k, value=k)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="is None; expected key and value, or neither"):
        layer.write_kv(None, k, layer.new_kv_cache(1), paged)  # type: ignore[arg-type]


def test_memory_that_rows_share_is_not_written(make: Make) -> None:
    layer, q, k = make(), torch.zeros(2, 4, 16), torch.zeros(2, 2, 16)
    batch = BatchMetadata.build(
        [2], block_table=torch.zeros(1, 1, dtype=torch.int32), slot_mapping=torch.tensor([0, 1])
    )
    block = torch.zeros(1, 4, 2, 16)
    shared = KVCache(block.expand(3, 4, 2, 16), block.expand(3, 4, 2, 16))
    with pytest.raises(BatchError, match=r"output has strides \[0, 16, 1\], by which several of its elements are one"):
        layer.forward(q, k, k, layer.new_kv_cache(1), batch, torch.zeros(1, 4, 16).expand(2, 4, 16))
    with pytest.raises(
        BatchError, match=r"kv_cache.key has strides .*, by which several of its elements are one memory"
    ):
        layer.write_kv(k, k, shared, batch)
    # to read them is no harm
    layer.attend(q, shared, batch, torch.empty(2, 4, 16))


def places(blocks: list[list[int]], slots: list[int]) -> BatchMetadata:
    return BatchMetadata.build(
        [2, 1], [6, 1], block_table=torch.tensor(blocks, dtype=torch.int32), slot_mapping=torch.tensor(slots)
    )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (places([[0, 62500], [2, 9]], [4, 5, 8]), "block_table of request 0 names block 62500; the cache has 3"),
        (places([[0, 1], [-1, 9]], [4, 5, 8]), "block_table of request 1 names block -1; the cache has 3"),
        (places([[0, 1], [2, 9]], [4, 5, 12]), "slot_mapping names slot 12; the cache has 12"),
        (places([[0, 1], [2, 9]], [4, 4, 8]), "slot_mapping writes slot 4 twice"),
    ],
)
def test_places_outside_the_cache_are_refused_before_anything_is_written(
    make: Make, batch: BatchMetadata, message: str
) -> None:
    layer, q, k = make(), torch.ones(3, 4, 16), torch.ones(3, 2, 16)
    cache = KVCache(torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 2, 16))
    with pytest.raises(BatchError, match=message):
        layer.forward(q, k, k, cache, batch)
    assert not cache.key.any()


def test_a_cache_without_blocks_holds_no_key(make: Make) -> None:
    layer, table, output = make(), torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 4, 16), 7.0)
    empty, query = KVCache(torch.zeros(0, 4, 2, 16), torch.zeros(0, 4, 2, 16)), torch.ones(1, 4, 16)
    with pytest.raises(BatchError, match="block_table of request 0 names block 0; the cache has 0"):
        layer.attend(query, empty, BatchMetadata.build([1], [3], block_table=table), output)
    assert (output == 7).all()
    # padding sees no key
    layer.attend(query, empty, BatchMetadata.build([1], [0], block_table=table), output)
    assert not output.any()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("by_array", [False, True])
def test_what_is_changed_in_place_is_seen(make: Make, by_array: bool, inference: bool) -> None:
    layer = make()
    torch.manual_seed(0)
    with torch.inference_mode(inference):
        cache = KVCache(torch.randn(3, 4, 2, 16), torch.randn(3, 4, 2, 16))
        table = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)
        batch = BatchMetadata.build([1, 1], [7, 4], block_table=table)
        q, output = torch.randn(2, 4, 16), torch.empty(2, 4, 16)

        def right() -> bool:
            layer.attend(q, cache, batch, output)
            return torch.allclose(
                output.double(), reference.attention(layer.spec, batch, q, cache).output, atol=1e-5, rtol=1e-4
            )

        assert right()
        for tensor, place, value in ((batch.seq_lens, (0,), 3), (batch.block_table, (0, 0), 2)):
            assert tensor is not None
            (tensor.numpy() if by_array else tensor)[place] = value
            assert right()


def test_a_capture_is_for_those_that_follow_the_device(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, q, k = make(), torch.zeros(2, 4, 16), torch.zeros(2, 2, 16)
    batch, output = BatchMetadata.build([2]), torch.ones(2, 4, 16)
    layer.plan(batch)
    assert layer._captured == []
    monkeypatch.setattr("attnreg.runtime.layer.is_captured", lambda tensor: True)
    with pytest.raises(
        BatchError, match="a CUDA graph is being captured, and CPU_ATTN computes from the host's lengths"
    ):
        layer.forward(q, k, k, None, batch, output)
    assert (output == 1).all()
    # what a captured graph reads lives as long as the layer
    monkeypatch.setattr(layer.module, "CAPTURABLE", True, raising=False)
    layer.forward(q, k, k, None, batch, output)
    (kept,) = layer._captured
    assert kept is layer.plan(batch)


@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_SDPA"])
def test_padding_has_queries_and_no_keys(make: Make, backend: str) -> None:
    layer = make(backend)
    cache = KVCache(torch.full((3, 4, 2, 16), torch.nan), torch.full((3, 4, 2, 16), torch.nan))
    for tensor in cache:
        tensor[1] = 1.0
    table = torch.tensor([[2**30, -1], [1, 2**30]], dtype=torch.int32)
    batch = BatchMetadata.build([2, 1], [0, 4], block_table=table)
    output = layer.new_output(torch.empty(3, 4, 16))
    layer.attend(torch.ones(3, 4, 16), cache, batch, output)
    assert (output[:2] == 0).all()
    assert (output[2] == 1).all()
    with pytest.raises(attnreg.BatchError, match="request 0 has seq_len 1 and 2 queries"):
        layer.plan(BatchMetadata.build([2, 1], [1, 4], block_table=table))


def on_a_device(table: torch.Tensor) -> BatchMetadata:
    return BatchMetadata.build([1, 1], [7, 4], device="meta", block_table=table)


def table_of() -> torch.Tensor:
    return torch.zeros(2, 2, dtype=torch.int32, device="meta")


@pytest.mark.parametrize("follows", [False, True], ids=["plans from content", "follows the device"])
def test_changes_on_a_device_are_seen_by_plans_made_from_content(
    make: Make, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    layer = make()
    monkeypatch.setattr(layer.module, "CAPTURABLE", follows, raising=False)
    monkeypatch.setattr(layer.module, "plan", lambda spec, batch: object())

    def kept(batch: BatchMetadata, change: Callable[[], object] = lambda: None) -> bool:
        planned = layer.plan(batch)
        change()
        return layer.plan(batch) is planned

    table = table_of()
    batch = on_a_device(table)
    others = torch.zeros(3, 2, 2, dtype=torch.int32, device="meta")
    assert kept(batch)
    assert kept(batch, lambda: table.add_(1)) is follows
    with torch.inference_mode():
        assert kept(batch)
        assert kept(batch, lambda: table.add_(1)) is follows
        # of a tensor made in this mode PyTorch counts no changes
        assert kept(on_a_device(table_of())) is follows
        # but what `build` makes is none
        assert kept(on_a_device(table))

    def put_in_its_place() -> None:
        table.data = others[1]

    assert kept(batch, put_in_its_place) is follows


def test_debugging_sees_changes_on_a_device(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make()
    monkeypatch.setattr(layer.module, "CAPTURABLE", True, raising=False)
    monkeypatch.setattr("attnreg.runtime.validation.debugging", lambda: True)
    monkeypatch.setattr("attnreg.runtime.validation._content_problems", lambda spec, batch: [])
    monkeypatch.setattr("attnreg.runtime.validation._places", lambda spec, batch: "read")
    monkeypatch.setattr("attnreg.runtime.validation.content", lambda tensor: bytes(12))
    table = table_of()
    batch = on_a_device(table)
    first = layer.plan(batch)
    assert layer.plan(batch) is first
    table.add_(1)
    assert layer.plan(batch) is not first


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_batch_that_was_planned_is_copied_without_its_plans(make: Make, copied: Callable[[Any], Any]) -> None:
    layer = make(features={"causal_by_request"})
    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    batch = BatchMetadata.build([2, 3], causal=[True, False])
    expected = layer(q, k, k, None, batch)
    # a plan may hold what has no copy, such as a kernel
    batch.plans["kept"] = (x for x in ())
    other = copied(batch)
    assert not other.plans
    assert torch.equal(layer(q, k, k, None, other), expected)
    if copied is not copy.copy:
        other.query_start_loc[1] = other.query_start_loc_cpu[1] = 3
        with pytest.raises(BatchError, match="key_start_loc is None"):
            layer(q, k, k, None, other)
    assert torch.equal(layer(q, k, k, None, batch), expected)


def test_a_view_of_a_larger_buffer_is_compared_by_its_own_numbers(make: Make) -> None:
    # an engine's block table is a corner of a buffer for the most requests and the longest
    layer, buffer = make(), torch.zeros(4, 5000, dtype=torch.int32)
    table = buffer[:2, :2]
    table.copy_(torch.tensor([[0, 1], [2, 0]]))
    batch = BatchMetadata.build([1, 1], [7, 4], block_table=table)
    plan = layer.plan(batch)
    assert sum(len(x[1] if isinstance(x, tuple) else x) for x in batch.state()) == sum(x.nbytes for x in batch.given)
    buffer[:, 2:] = 9
    assert layer.plan(batch) is plan
    buffer[1, 0] = 1
    assert layer.plan(batch) is not plan
