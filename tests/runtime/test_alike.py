"""Calls and batches like earlier ones are recognised, and a fact that changed is seen, in place or by other tensors."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.layers import walk
from torch import Tensor

import attnreg
from attnreg import AttentionRequest, BatchMetadata, Registry
from attnreg.kernels.triton import cache, plans
from attnreg.runtime import tensors, validation
from attnreg.runtime.interface import BatchError, KVCache
from attnreg.runtime.layer import Attention
from attnreg.runtime.tensors import Kinds, Remembered, comparison, signatures

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="where there is a GPU, Triton compiles, and the CPU's memory is refused"
    ),
]


def forget() -> None:
    """Leaves nothing remembered of earlier calls and batches but what a batch holds."""
    validation._LIKE.clear()
    cache._writes.clear()
    cache._kinds._known.clear()
    plans._launches.cache_clear()


@pytest.fixture(params=["torch's comparison", "its stand-in"])
def compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors are compared by PyTorch, or by what stands in for it where PyTorch has no such comparison."""
    if request.param == "its stand-in":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    forget()
    yield
    forget()


class Held:
    """A layer, a batch and the tensors of a call, which stay while the tensors change."""

    def __init__(self, backend: str, registry: Registry, given: dict[str, Any]) -> None:
        features = {"alibi"} if "alibi_slopes" in given else set()
        features |= {name for name in ("sinks", "lse", "mm_prefix", "tree_mask") if name in given}
        features |= {"causal_by_request"} if "causal" in given else set()
        request = AttentionRequest(
            head_size=walk.SIZE, num_heads=walk.HEADS, num_kv_heads=walk.KV_HEADS, dtype="float32",
            block_size=walk.BLOCK, features=features,
        )  # fmt: skip
        params = {name: given[name] for name in walk.LAYER if name in given}
        selection = attnreg.select(request, walk.PLATFORMS[backend], registry, backend)
        self.layer = Attention.from_selection(selection, **params)
        batch = {name: given[name] for name in walk.BATCH if name in given}
        self.batch = BatchMetadata(max_query_len=3, max_seq_len=20, **batch)
        self.given = given

    def outcome(self) -> tuple[str, Any]:
        """The refusal as text, or nothing; and the output with the lse."""
        given = self.given
        kv_cache = KVCache(given["key_cache"], given["value_cache"]) if "key_cache" in given else None
        query, key, value, output = (given[name] for name in ("query", "key", "value", "output"))
        for x in (output, given.get("lse")):
            if isinstance(x, Tensor) and not x.is_meta and x.dtype == torch.float32 and 0 not in x.stride():
                x.fill_(7.0)
        lse = {"lse": given["lse"]} if "lse" in given else {}
        try:
            self.layer.forward(query, key, value, kv_cache, self.batch, output, **lse)
        except walk.REFUSALS as refusal:
            return str(refusal), None
        return "", [x.clone() for x in (output, *lse.values())]


def same(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    if one[0] != other[0] or one[1] is None:
        return one[0] == other[0]
    return all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def anew(backend: str, registry: Registry, given: dict[str, Any]) -> tuple[str, Any]:
    """The outcome where nothing is remembered."""
    forget()
    try:
        return Held(backend, registry, given).outcome()
    except walk.REFUSALS as refusal:
        return str(refusal), None


NAMES = [*walk.CALL, *walk.BATCH, "sinks", "alibi_slopes"]
# a kernel in the interpreter takes as long as many calls of CPU_ATTN: there only tensors that launches read by strides
WALKS = [("CPU_ATTN", name) for name in NAMES]
WALKS += [("TRITON_ATTN", name) for name in ("query", "key", "key_cache", "output", "block_table", "seq_lens", "sinks")]
FORMS = ("from element 1", "every other", "expanded", "as torch", "one row less")


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "packed"])
@pytest.mark.parametrize(("backend", "name"), WALKS)
def test_a_tensor_whose_facts_change_is_seen(
    default: Registry, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, backend: str, name: str,
    paged: bool,
) -> None:  # fmt: skip
    """After a call that fitted, each form of a tensor has the outcome that it has where nothing is remembered."""
    monkeypatch.setattr(BatchMetadata, "on_host", False)
    quick = backend == "CPU_ATTN"
    if not quick and "stand-in" in request.node.name:
        pytest.skip("launches do not depend on what compares")
    features = walk.FEATURES[backend] - {"fp8_query"} if quick else {"sinks"}
    given = walk.tensors(features, quantised=False, paged=paged)
    if name not in given:
        pytest.skip("not of this call")
    held = Held(backend, default, given)
    right = held.outcome()
    assert right[0] == ""
    tensor, seen = given[name], 0
    memory = tensor.data
    for words, odd in walk.oddities(memory.clone()):
        if not isinstance(odd, Tensor) or not (quick or any(form in words for form in FORMS)):
            continue
        # what is remembered last is the call that fits
        assert same(held.outcome(), right)
        changed = []
        if name in walk.CALL:
            held.given = given | {name: odd}
            changed.append(held.outcome())
            held.given = given
        try:
            tensor.data = odd
            changed.append(held.outcome())
        except (RuntimeError, TypeError):
            # a tensor cannot become one of another kind
            assert tensor.data_ptr() == memory.data_ptr()
        expected = anew(backend, default, given | {name: odd})
        for outcome in changed:
            assert same(outcome, expected), (words, outcome, expected)
            seen += 1
        tensor.data = memory
    assert seen > 3
    assert same(held.outcome(), right)


@pytest.mark.usefixtures("compared")
def test_keys_and_values_in_one_memory_are_refused_after_a_call_with_two(default: Registry) -> None:
    given = walk.tensors({"sinks"}, quantised=False, paged=True)
    held = Held("CPU_ATTN", default, given)
    assert held.outcome()[0] == ""
    for same_memory in (given["key_cache"], given["key_cache"].view(-1).view(given["key_cache"].shape)):
        held.given = given | {"value_cache": same_memory}
        before = given["key_cache"].clone()
        assert held.outcome()[0].startswith("kv_cache.value is the memory of kv_cache.key")
        assert torch.equal(given["key_cache"], before)
    held.given = given
    assert held.outcome()[0] == ""


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("missing", [("key",), ("value",), ("query",), ("key", "value")])
def test_a_call_that_lacks_a_tensor_is_another_call(default: Registry, missing: tuple[str, ...]) -> None:
    given = walk.tensors({"sinks", "lse"}, quantised=False, paged=True)
    held = Held("CPU_ATTN", default, given)
    assert held.outcome()[0] == ""
    held.given = given | dict.fromkeys(missing)
    for _ in range(2):
        assert same(held.outcome(), anew("CPU_ATTN", default, held.given))
    if missing != ("key", "value"):
        assert held.outcome()[0]


def test_a_batch_changed_in_place_is_planned_anew(default: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchMetadata, "on_host", False)
    given = walk.tensors({"sinks"}, quantised=False, paged=True)
    held = Held("CPU_ATTN", default, given)
    batch, plan = held.batch, held.layer.plan
    first = plan(batch)
    assert plan(batch) is first
    batch.slot_mapping.resize_(3)  # type: ignore[union-attr]
    assert plan(batch) is not first
    batch.query_start_loc_cpu.resize_(3)
    with pytest.raises(BatchError, match="query_start_loc_cpu has 3 elements"):
        plan(batch)
    batch.query_start_loc_cpu.resize_(4)
    second = plan(batch)
    assert plan(batch) is second
    batch.block_table.as_strided_((3, 2), (0, 1))  # type: ignore[union-attr]
    assert plan(batch) is not second
    with torch.inference_mode():
        third = plan(batch)
        assert plan(batch) is third
    assert plan(batch) is plan(batch)


def test_memory_that_grew_in_place_is_watched_whole(default: Registry) -> None:
    # one kind of layer plans while the table is narrow, another once it is wide again, at the same address
    given = walk.tensors({"sinks"}, quantised=False, paged=True)
    held = Held("CPU_ATTN", default, given)
    selection, sinks = held.layer.selection, given["sinks"]
    other = Attention.from_selection(selection, softmax_scale=0.5, sinks=sinks)
    batch, table = held.batch, given["block_table"]
    rows, columns = table.shape
    lengths = [x.clone() for x in (batch.seq_lens, batch.seq_lens_cpu)]
    numbers = table.clone()
    for first, second in ((held.layer, other), (other, held.layer)):
        table.resize_(rows, columns - 1)
        for x in (batch.seq_lens, batch.seq_lens_cpu):
            x.clamp_(max=(columns - 1) * walk.BLOCK)
        first.plan(batch)
        table.resize_(rows, columns).copy_(numbers)
        for x, length in zip((batch.seq_lens, batch.seq_lens_cpu), lengths, strict=True):
            x.copy_(length)
        second.plan(batch)
        planned = second.plan(batch)
        table[-1, -1] += 1
        assert second.plan(batch) is not planned
        table[-1, -1] -= 1


def test_only_run_is_told_which_calls_are_alike(default: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    # others may put tensors of their own into a call, as ROCM_ATTN does for sinks
    held = Held("CPU_ATTN", default, walk.tensors({"sinks"}, quantised=False, paged=True))
    told: list[object] = []
    forward = held.layer.module.forward
    monkeypatch.setattr(
        held.layer.module, "forward", lambda spec, plan, call: told.append(call.alike) or forward(spec, plan, call)
    )
    assert held.outcome()[0] == ""
    assert told == [None]


VARIANTS = {
    "itself": lambda x: x,
    "a copy": lambda x: x.clone(),
    "of another shape": lambda x: x.view(4, 6),
    "transposed": lambda x: x.clone().T.contiguous().T,
    "of another type": lambda x: x.to(torch.float64),
    "of as wide a type": lambda x: x.view(torch.int32),
    "negated": lambda x: torch._neg_view(x),
    "elsewhere": lambda x: x.to("meta"),
    "expanded": lambda x: x[:1].expand(6, 4),
    "sparse": lambda x: x.to_sparse(),
    "with a stride of 0 in both dimensions": lambda x: x[:1, :1].expand(6, 4),
    "a subclass": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "with a gradient": lambda x: x.clone().requires_grad_(),
    "not a tensor": lambda x: [1, 2],
    "nothing": lambda x: None,
}


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("first", [name for name in VARIANTS if name not in ("not a tensor", "nothing")])
def test_only_tensors_with_the_same_facts_are_alike(first: str) -> None:
    tensor, beside = VARIANTS[first](torch.ones(6, 4)), torch.ones(3)
    alike = comparison([tensor, beside])
    assert alike(tensor, beside)
    for name, variant in VARIANTS.items():
        other = variant(torch.ones(6, 4))
        try:
            facts = signatures([other]) == signatures([tensor])
        except (AttributeError, RuntimeError, TypeError):
            facts = False
        # a subclass may have no memory
        assert not alike(other, beside) or (facts and type(other) is type(tensor)), name
        assert not alike(beside, other)


@pytest.mark.usefixtures("compared")
def test_what_is_remembered_of_tensors_is_found_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "MOST_REMEMBERED", 8)
    remembered: Remembered[int] = Remembered()
    draw = torch.Generator().manual_seed(3)
    for _ in range(300):
        rows = int(torch.randint(1, 20, (), generator=draw))
        some = [torch.empty(rows, 2), torch.empty(3)]
        known = remembered.find(some)
        assert known is None or known[1] == rows
        if known is None:
            remembered.put(some, rows)
        assert len(remembered._values) <= 8
        assert len(remembered._recent) <= tensors.MOST_RECENT
    one = torch.empty(5, 2)
    # one tensor may be given twice
    remembered.put([one, one], 7)
    assert remembered.find([one, one]) is not None
    # a tensor without strides is not remembered
    assert remembered.put([one.to_sparse_csr(), one], 9)[1] == 9
    assert remembered.find([one.to_sparse_csr(), one]) is None


def test_kinds_tell_apart_which_tensors_are_given() -> None:
    kinds, x = Kinds(), torch.empty(2)
    assert kinds.of((False, True), [x]) is kinds.of((False, True), [torch.empty(2)])
    assert kinds.of((False, True), [x]) is not kinds.of((True, False), [x])


def test_threads_remember_at_once() -> None:
    remembered: Remembered[int] = Remembered()

    def work(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for _ in range(500):
            rows = int(torch.randint(1, 9, (), generator=draw))
            some = [torch.empty(rows, 2), torch.empty(rows)]
            known = remembered.find(some)
            assert (known or remembered.put(some, rows))[1] == rows

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_a_spec_of_another_process_has_the_hash_of_this_one(default: Registry) -> None:
    spec = Held("CPU_ATTN", default, walk.tensors({"sinks"}, quantised=False, paged=True)).layer.spec
    text = pickle.dumps(spec)
    expected = hash(spec)
    object.__setattr__(spec, "_hash", expected + 1)
    assert pickle.loads(text) == spec
    assert hash(pickle.loads(pickle.dumps(spec))) == expected
