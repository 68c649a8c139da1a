"""HOPPER_ATTN on a machine without a GPU: its kernel compiled, and what its plans make of tensors' strides."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from support.compilers import spills
from support.compilers.compiler import Compiler
from support.suite.examples import some
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attnreg import AttentionRequest, Platform, Registry
from attnreg.kernels.hopper import attention as hopper_attn
from attnreg.kernels.hopper.prompts import counters
from attnreg.kernels.hopper.prompts.choices import BUILDS, SIZES, WIDE, beside_of, code_of, groups_of, mixes
from attnreg.kernels.hopper.prompts.plans import PromptLaunch, Spaced, rows_of, spacing
from attnreg.kernels.hopper.prompts.shared import Code
from attnreg.kernels.hopper.prompts.widened import _KEYS, _PLACE, MOST_MEMORY, PlaceCode
from attnreg.kernels.triton.planned.arguments import AttentionTensors, BatchNumbers
from attnreg.kernels.triton.schedule import Launch
from attnreg.kernels.triton.target import target_for
from attnreg.kernels.triton.tiles import Config
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, SpecError
from attnreg.selection.selector import evaluate


def spec(**changes: object) -> AttentionSpec:
    facts = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "head_size_v": 128, "dtype": torch.bfloat16,
             "softmax_scale": 0.1, "block_size": 16}  # fmt: skip
    return AttentionSpec(**facts | changes)  # type: ignore[arg-type]


# products: those of the first block and of a loop's step with keys, and of the step and of the last block with values,
# by two warpgroups. loads: of queries by two, and of keys and values by boxes, each in parts of 64 columns. stores: of
# two warpgroups, each a part of the output. Where a block is several boxes, one copy brings all columns of keys of 128,
# and of values of 128 and 256
@pytest.mark.parametrize(
    ("name", "products", "loads", "stores"),
    some(
        [
            ("paged", 2 * (2 * 8 + 2 * 8), 2 * 2 + 8 + 8, 2),
            ("pages of 128", 2 * (2 * 8 + 2 * 8), 2 * (2 + 1 + 1), 2),
            ("packed", 2 * (2 * 8 + 2 * 8), 2 * (2 + 1 + 1), 2),
            ("full", 2 * (2 * 8 + 2 * 8), 2 * (2 + 1 + 1), 2),
            # what is widened is packed
            ("fp8", 2 * (2 * 8 + 2 * 8), 2 * (2 + 1 + 1), 2),
            # parts are stored by the warps
            ("split", 2 * (2 * 8 + 2 * 8), 2 * 2 + 8 + 8, 0),
            ("split, 64", 2 * (2 * 4 + 2 * 8), 2 + 8 + 8, 0),
            ("split, 96", 2 * (2 * (4 + 2) + 2 * 2 * 8), 2 * (2 + 8 + 8), 0),
            ("split, 192", 2 * (2 * 12 + 2 * 3 * 4), 3 * (2 + 4 + 4), 0),
            ("split, 256", 2 * (2 * 16 + 2 * 4), 4 * 2 + 4 * 4 + 4, 0),
            ("mixed", 2 * (2 * 8 + 2 * 8), 2 * 2 + 8 + 8, 2),
            ("mixed in a graph", 2 * (2 * 8 + 2 * 8), 2 * 2 + 8 + 8, 2),
            # one warpgroup, of which a multiprocessor holds several; or three
            ("window of 64", 2 * 4 + 2 * 4, 1 + 4 + 4, 1),
            ("64", 3 * (2 * 4 + 2 * 8), 3 + 1 + 1, 3),
            ("paged, 64", 3 * (2 * 4 + 2 * 8), 3 + 8 + 8, 3),
            ("256, softcap", 2 * (2 * 16 + 2 * 4), 4 * 2 + 4 * 4 + 4, 2),
            # the second part has fewer columns; products with values are two
            ("80", 2 * (2 * (4 + 1) + 2 * 2 * 8), 2 * (2 + 1 + 1), 4),
            ("96", 2 * (2 * (4 + 2) + 2 * 2 * 8), 2 * (2 + 8 + 8), 4),
            ("192", 2 * (2 * 12 + 2 * 3 * 4), 3 * (2 + 4 + 4), 6),
            ("192, values of 128", 2 * (2 * 12 + 2 * 2 * 8), 3 * (2 + 1) + 2, 4),
        ],
        8,
    ),
)
def test_the_kernel_keeps_its_products_in_flight(
    compiler: Compiler, name: str, products: int, loads: int, stores: int
) -> None:
    kernel = compiler.call("hopper_attn", "compiled", name)
    assert kernel.spills == spills.bytes_of("sm90", name, "prompts in Gluon", triton.__version__)
    assert not kernel.serialised
    assert kernel.shared <= 232448
    assert (kernel.products, kernel.loads, kernel.stores) == (products, loads, stores)
    # of each thread when the kernel starts; the warpgroups then share all registers out
    assert kernel.registers <= 168


@pytest.mark.parametrize("name", ["split, 192", "split, 256", "192", "256, softcap"])
def test_memory_that_threads_wrote_is_fenced_before_it_is_the_copy_engines(compiler: Compiler, name: str) -> None:
    # outputs went through the queries' memory: each thread's fence, then all threads, then one that says so
    handed_back = ["fence.proxy.async", "bulk.wait_group.read", "bar.sync", "mbarrier.arrive.shared"]
    assert compiler.call("hopper_attn", "handed_back", name) == [handed_back] * 2


def test_a_merge_without_rows_waits_for_the_kernel_before_it(compiler: Compiler) -> None:
    # of a row, and of the first program where it has none: whose memory is used again after the merge
    assert compiler.call("hopper_attn", "waits_of_merge", "split") == [2]


def test_a_graph_may_compute_few_queries_beside_prompts(compiler: Compiler) -> None:
    kernels = compiler.call("hopper_attn", "compiled_in_graph", [1] * 20 + [2048] * 2, [4000] * 20 + [4096] * 2)
    assert [name for name, *_ in kernels] == ["_attention_kernel", "_merge_shares_kernel", "prefill_kernel"]
    spilled = spills.bytes_of("sm90", "mixed in a graph", "prompts in Gluon", triton.__version__)
    assert [bytes_ for *_, bytes_ in kernels] == [0, 0, spilled]


def test_short_queries_are_those_of_triton_attn(compiler: Compiler) -> None:
    def launched(queries: list[int], keys: list[int], **facts: object) -> list[str]:
        names: list[str] = compiler.call("hopper_attn", "launched_for", queries, keys, facts)
        return names

    assert launched([2048, 1], [4096, 4095]) == ["_attention_kernel", "_merge_splits_kernel", "prefill_kernel"]
    # nine keys count as 256, like those of the batches to come
    assert launched([2048, 1], [4096, 9]) == ["_attention_kernel", "_merge_splits_kernel", "prefill_kernel"]
    assert launched([16, 1], [700, 9]) == ["_attention_kernel", "_merge_splits_kernel"]
    # tiles that would leave multiprocessors idle share their keys out
    assert launched([32], [8192]) == ["prefill_kernel", "_merge_splits_kernel"]
    assert launched([512] * 8, [8192] * 8) == ["prefill_kernel"]
    assert launched([512] * 2, [8192] * 2) == ["prefill_kernel", "_merge_splits_kernel"]
    # in a narrow window a tile is soon done: each multiprocessor has to have several, or one result whatever the batch
    assert "prefill_kernel" not in launched([2048], [2048], window=128)
    assert launched([2048] * 8, [2048] * 8, window=128) == ["prefill_kernel"]
    assert launched([2048], [2048], window=300) == ["prefill_kernel"]
    invariant = frozenset({"batch_invariant"})
    assert launched([300], [300], window=128, features=invariant)[-1] == "prefill_kernel"
    # requests of another batch may differ in causality, which TRITON_ATTN's kernel computes
    by_request = frozenset({"causal_by_request"})
    assert "prefill_kernel" in launched([300], [300], features=by_request)
    assert "prefill_kernel" not in launched([300], [300], features=by_request | invariant)


def test_prompts_over_8_bits_are_widened_where_that_takes_less_time(compiler: Compiler) -> None:
    def launched(queries: list[int], keys: list[int], **facts: object) -> list[str]:
        names: list[str] = compiler.call("hopper_attn", "launched_for", queries, keys, {"kv_dtype": "fp8", **facts})
        return names

    own = ["_widen_kernel", "prefill_kernel"]
    assert launched([512] * 8, [8192] * 8) == ["_place_kernel", *own]
    # 134,217 rows of a head of 2: the heads one after the other
    assert launched([2048] * 8, [60000] * 8) == ["_place_kernel", *own * 2]
    # keys that no window sees take no memory
    assert launched([2048] * 8, [60000] * 8, window=1000) == ["_place_kernel", *own]
    assert "prefill_kernel" not in launched([2048] * 9, [60000] * 9)
    # two tiles a request, three are enough
    assert "prefill_kernel" not in launched([64] * 80, [2000] * 80)
    assert launched([96] * 80, [2000] * 80) == ["_place_kernel", *own]
    assert "prefill_kernel" not in launched([512] * 8, [8192] * 8, features=frozenset({"batch_invariant"}))


def test_a_graph_over_8_bits_captures_both_kernels_of_prompts(compiler: Compiler) -> None:
    def launched(queries: list[int], keys: list[int], **facts: object) -> list[str]:
        facts = {"kv_dtype": "fp8", "heads": (8, 4), **facts}
        names: list[str] = compiler.call("hopper_attn", "launched_for", queries, keys, facts, True)
        return names

    own = ["_widen_kernel", "prefill_kernel"]
    both = ["_place_kernel", *own, "_attention_kernel"]
    # 131,072 rows of 4 heads fit, or 262,144 of 2; what may need more is divided on the device
    assert launched([512] * 8, [16000] * 8) == ["_place_kernel", *own]
    assert launched([512] * 8, [30000] * 8) == ["_place_kernel", *own * 2]
    assert launched([512] * 8, [33000] * 8) == both
    assert launched([512] * 8, [33000] * 8, window=1000) == ["_place_kernel", *own]


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("left", [-1, 0, 30])
@given(data=st.data())
def test_keys_are_placed_if_the_rows_suffice(left: int, divides: bool, data: st.DataObject) -> None:
    lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 190)), min_size=1, max_size=9)
    # more than a program reads at once
    pairs = data.draw(lengths) * data.draw(st.sampled_from([1, 60]))
    locs = torch.tensor([0, *accumulate(q for q, _ in pairs)], dtype=torch.int32)
    keys = torch.tensor([n for _, n in pairs], dtype=torch.int32)
    firsts = [0 if left < 0 else max(n - q - left, 0) for q, n in pairs]
    own = [-(-(n - first) // _KEYS) * _KEYS if 2 <= q <= 30 else 0 for (q, n), first in zip(pairs, firsts, strict=True)]
    fits = data.draw(st.booleans())
    rows = sum(own) - (not fits)
    found = [torch.full_like(locs, -1) for _ in range(4)]
    names = "ends_ptr", "starts_ptr", "wide_loc_ptr", "other_loc_ptr"
    _PLACE.variant(torch.device("cpu"), PlaceCode(left, divides)).launch(
        None, (1, 1, 1), query_start_loc_ptr=locs, seq_lens_ptr=keys, num_reqs=len(pairs), min_query_len=2,
        max_query_len=30, rows=rows, **dict(zip(names, found, strict=True)),
    )  # fmt: skip
    ends = [*accumulate(own)]
    starts = [end - mine - first for end, mine, first in zip(ends, own, firsts, strict=True)]
    nothing = [0] * len(pairs)
    assert found[0][:-1].tolist() == (ends if fits else nothing)
    assert found[1][:-1].tolist() == (starts if fits else nothing)
    if divides:
        assert torch.equal(found[2], locs if fits else torch.zeros_like(locs))
        assert torch.equal(found[3], torch.zeros_like(locs) if fits else locs)
    else:
        assert found[2].eq(-1).all()
        assert found[3].eq(-1).all()


MANY = Launch(Config(128, 64, 8, 2), 2, 2048, 4, False, 1, 256, 1)


@pytest.mark.parametrize(
    ("mixed", "queries", "keys", "facts"),
    [
        (True, [1] * 60 + [2048] * 2, [8192] * 60 + [2048] * 2, {}),
        (True, [2048, *[1] * 60, 2048], [2048, *[8192] * 60, 2048], {}),
        (True, [1] * 128 + [2048], [2048] * 128 + [8192], {}),
        # one request would be computed long after all others
        (False, [1] * 60 + [2048] * 2, [8192] * 59 + [65536] + [2048] * 2, {}),
        (False, [1] * 8 + [2048] * 2, [32768] * 8 + [2048] * 2, {}),
        # nothing to go side by side with
        (False, [1] * 4 + [2048] * 8, [2048] * 4 + [8192] * 8, {}),
        (False, [1] * 60 + [2048] * 2, [8192] * 60 + [2048] * 2, {"window": 1000}),
        # a request is several tiles, or its keys would be loaded by several
        (False, [1] * 60 + [2048] * 2, [8192] * 60 + [2048] * 2, {"num_heads": 56}),
        (False, [1] * 60 + [2048] * 2, [8192] * 60 + [2048] * 2, {"features": frozenset({"batch_invariant"})}),
    ],
)
def test_few_queries_are_computed_beside_prompts(
    mixed: bool, queries: list[int], keys: list[int], facts: dict[str, object]
) -> None:
    window = facts.pop("window", None)
    if window is not None:
        facts |= {"sliding_window": window, "features": frozenset({"sliding_window"})}
    layer = spec(**{"num_heads": 32, "num_kv_heads": 8, **facts})
    beside = beside_of(layer, True, MANY, queries, max(keys), 132)
    assert (beside is not None and mixes(beside, MANY.min_query_len, queries, keys)) is mixed


def test_the_row_states_the_memory_of_widened_keys(default: Registry) -> None:
    request = AttentionRequest(head_size=128, num_heads=8, num_kv_heads=2, block_size=16, kv_dtype="fp8")
    chosen = evaluate(request, Platform(platform="cuda", arch="sm90"), default, "HOPPER_ATTN")
    assert [(x.kind, x.value) for x in chosen.consequences] == [("workspace", MOST_MEMORY)]


def test_another_target_is_refused_before_anything_is_compiled() -> None:
    batch = BatchMetadata.build([32], [32])
    with pytest.raises(SpecError, match=r"the device is cpu; these kernels are compiled for .* 9\.0 alone"):
        hopper_attn.plan(spec(block_size=None, attn_type="decoder"), batch)


def address(rows: object, block: int, head: int, token: int) -> int:
    """Where an element's row of the matrix begins, in elements: `Places` of the kernel."""
    return (block * rows.block + head * rows.head + token) * rows.stride + head * rows.column  # type: ignore[attr-defined]


def layouts() -> list[tuple[str, Tensor]]:
    fused = torch.empty(5, 2, 32, 3, 64)
    interleaved = torch.empty(5, 32, 3, 128)
    return [
        ("NHD", torch.empty(5, 32, 3, 64)),
        ("HND", torch.empty(5, 3, 32, 64)),
        ("NHD", fused[:, 1]),
        ("NHD", interleaved[..., 64:]),
        ("HND", interleaved.transpose(1, 2)[..., :64]),
        ("NHD", torch.empty(5, 3, 32, 64).transpose(1, 2)),
        ("NHD", torch.empty(1, 32, 3, 64)),
        ("HND", torch.empty(5, 1, 32, 64)),
        ("packed", torch.empty(77, 3, 64)),
        ("packed", torch.empty(77, 9, 64)[:, 3:6]),
        ("packed", torch.empty(3, 100, 64).transpose(0, 1)[:77]),
    ]


@pytest.mark.parametrize(("layout", "tensor"), layouts())
def test_keys_are_rows_of_a_matrix(layout: str, tensor: Tensor) -> None:
    rows = rows_of(tensor.shape, tensor.stride(), layout)
    assert rows is not None
    pages = tensor[None] if layout == "packed" else tensor if layout == "NHD" else tensor.transpose(1, 2)
    blocks, tokens, heads, size = pages.shape
    for block in range(blocks):
        for head in range(heads):
            for token in range(tokens):
                begin = address(rows, block, head, token)
                assert begin == sum(i * s for i, s in zip((block, token, head), pages.stride(), strict=False))
                row = block * rows.block + head * rows.head + token
                assert row < rows.shape[0]
                assert head * rows.column + size <= rows.shape[1] <= rows.stride


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((5, 32, 3, 64), (32 * 200 + 8, 200, 64, 1)),  # blocks that begin between rows
        ((5, 32, 3, 64), (32 * 196, 196, 64, 1)),  # rows of no multiple of 16 bytes
        ((5, 32, 3, 64), (0, 192, 64, 1)),  # one block seen five times
        ((77, 3, 64), (0, 64, 1)),  # one token seen often
        ((77, 3, 64), (64, 32, 1)),  # heads that overlap
        ((0, 3, 64), (192, 64, 1)),
    ],
)
def test_other_keys_are_left_to_triton_attn(shape: Sequence[int], strides: Sequence[int]) -> None:
    rows = rows_of(shape, strides, "NHD")
    # a block stride of 0 is one that can be walked
    assert rows is None or (strides[0] == 0 and rows.block == 0 and len(shape) == 4)


@pytest.mark.parametrize(
    ("shape", "strides", "walked"),
    [
        ((77, 8, 64), (512, 64, 1), (512, 64, 1)),
        ((77, 8, 64), (1024, 128, 1), (1024, 128, 1)),
        ((77, 8, 64), (64, 77 * 64, 1), (64, 77 * 64, 1)),
        ((77, 1, 64), (64, 3, 1), (64, 64, 1)),
        ((77, 8, 64), (516, 64, 1), None),
        ((77, 8, 64), (512, 60, 1), None),
        ((77, 8, 64), (0, 64, 1), None),
        ((77, 8, 64), (512, 0, 1), None),
        ((77, 8, 64), (256, 64, 1), None),
        ((0, 8, 64), (512, 64, 1), None),
    ],
)
def test_queries_and_outputs_by_their_strides(
    shape: Sequence[int], strides: Sequence[int], walked: tuple[int, ...] | None
) -> None:
    assert spacing(shape, strides) == walked


def memory_of(code: Code) -> int:
    """The bytes of a block of threads' queries, keys, values and outputs."""
    columns, columns_v = (part * -(-n // part) for n, part in ((code.size, code.part), (code.size_v, code.part_v)))
    rows = 64 * code.groups * columns * code.q_stages + code.stages * code.block_n * (code.size + code.size_v)
    return 2 * (rows if code.output_in_query else rows + 64 * code.groups * columns_v)


@pytest.mark.parametrize("values", SIZES)
@pytest.mark.parametrize("size", SIZES)
def test_every_pair_of_sizes_fits_into_shared_memory(size: int, values: int) -> None:
    code = code_of(spec(head_size=size, head_size_v=values), True, 16)
    columns, columns_v = (part * -(-n // part) for n, part in ((size, code.part), (values, code.part_v)))
    assert columns_v <= 256
    assert columns >= size
    assert columns_v >= values
    if code.output_in_query:
        assert columns_v <= columns
        assert code.part_v <= code.part or columns_v == columns
    # barriers and facts take less than 1 KiB
    assert memory_of(code) <= 232448 - 1024


def test_warpgroups_and_blocks_of_threads_of_small_heads_fit() -> None:
    small = {"head_size": 64, "head_size_v": 64}
    three = code_of(spec(**small), True, 16, groups=3)
    narrow = spec(**small, sliding_window=128, features=frozenset({"sliding_window"}))
    single = code_of(narrow, True, 16, groups=1)
    assert (three.groups, three.programs, single.groups, single.programs) == (3, 1, 1, 3)
    for code in (three, single):
        # each block takes 1 KiB more
        assert code.programs * (memory_of(code) + 2048) <= 228 * 1024
    # the registers of four warps of each group, and of the loading warp, whose group of four is whole
    for groups, build in [*BUILDS.items(), (2, WIDE)]:
        assert build.programs * 128 * (groups * build.registers + build.loading) <= 65536


@pytest.mark.parametrize(
    ("groups", "queries", "facts"),
    [
        (3, [4096] * 5, {}),
        # 4 tiles of each of 132 multiprocessors, of 64 queries of 2 heads, 3 of them
        (3, [64 * 11] * 24, {}),
        (2, [64 * 11] * 23, {}),
        (1, [4096] * 4, {"window": 128}),
        (2, [4096] * 4, {"window": 1000}),
        (2, [4096] * 4, {"head_size": 128, "head_size_v": 128}),
        (2, [4096] * 4, {"head_size_v": 80}),
        (2, [4096] * 4, {"features": frozenset({"batch_invariant"})}),
    ],
)
def test_warpgroups_by_heads_and_tiles(groups: int, queries: list[int], facts: dict[str, object]) -> None:
    window = facts.pop("window", None)
    if window is not None:
        facts |= {"sliding_window": window, "features": frozenset({"sliding_window"})}
    layer = spec(**{"num_heads": 4, "head_size": 64, "head_size_v": 64, **facts})
    assert groups_of(layer, True, MANY._replace(max_query_len=max(queries)), queries, 132) == groups


def test_columns_are_copied_together_over_small_pages() -> None:
    def together(block_size: int, size: int = 128, size_v: int | None = None) -> bool:
        return code_of(spec(head_size=size, head_size_v=size_v or size), True, block_size).in_groups

    assert together(16)
    assert together(48)
    # one box holds a block of keys
    assert not together(128)
    assert not together(0)
    assert together(16, 256)
    assert not together(64, 256)
    assert not any(together(16, size) for size in (64, 80, 96, 192))
    assert not together(16, 192, 128)


def test_a_cache_whose_blocks_begin_at_no_group_of_rows() -> None:
    memory = torch.zeros(200, 2, 128, dtype=torch.bfloat16)
    # blocks of 16 tokens, 16 and 20 tokens apart
    even, odd = (memory.as_strided((4, 16, 2, 128), (apart * 256, 256, 128, 1)) for apart in (16, 20))
    rows = [rows_of(x.shape, x.stride(), "NHD") for x in (even, odd)]
    assert [x and x.in_groups for x in rows] == [True, False]
    # a head that begins at no part of 64 columns
    wide = torch.zeros(4, 16, 2, 136, dtype=torch.bfloat16)[..., :128]
    found = rows_of(wide.shape, wide.stride(), "NHD")
    assert found is not None
    assert not found.in_groups


def test_a_repeated_call_is_described_as_the_first_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is repeated on tensors of other dimensions, whose memory is spaced alike."""
    monkeypatch.setattr("attnreg.kernels.hopper.prompts.plans.target_of", lambda device: target_for("cuda", 90, 132))
    q, k, v, out = (torch.empty(heads, 32, 128, dtype=torch.bfloat16).transpose(0, 1) for heads in (8, 2, 2, 8))
    tensors = AttentionTensors(q, k, v, out)
    spaced = Spaced.of(tensors, "NHD")
    code = code_of(spec(block_size=None), True, 0)
    launch = Launch(Config(64, 64, 4, 2), 17, 32, 4, False, 1, 256, 1)
    assert spaced is not None
    prompts = PromptLaunch(spec(), code, launch, spaced, BatchNumbers(1, 0, 0, 0, 0, 0), tensors)
    described = [x and x[1:] for x in prompts.descriptors(q, k, v, out)]
    again = [x[None].transpose(1, 2) for x in (q, k, v, out)]
    assert [x and x[1:] for x in prompts.descriptors(*again)] == described


@pytest.mark.parametrize(("heads", "pack"), [((8, 8), 1), ((32, 8), 4), ((28, 4), 1), ((24, 2), 4), ((128, 1), 64)])
def test_heads_of_a_tile_divide_the_group(heads: tuple[int, int], pack: int) -> None:
    code = code_of(spec(num_heads=heads[0], num_kv_heads=heads[1]), True, 48)
    assert code.pack == pack
    assert code.group % code.pack == 0
    # a box lies in one block
    assert code.box == 16


def test_a_launch_has_numbers_of_its_own_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "UNDER_WAY", 3)
    monkeypatch.setattr(counters, "CAPTURED", 2)
    places = counters.Counters(torch.device("cpu"))
    assert places.numbers.shape == (5, counters.NUMBERS)
    # what is not captured goes round; what a graph holds, it holds for good
    assert [places.next_place(False) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert [places.next_place(True) for _ in range(4)] == [3, 4, None, None]
    assert places.next_place(False) == 2


def test_numbers_that_a_capture_makes_are_kept_by_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(counters, "_counters", {})
    monkeypatch.setattr(counters, "is_captured", lambda device: True)
    assert counters.taken(device).tolist() == [0] * counters.NUMBERS
    assert not counters._counters
    monkeypatch.setattr(counters, "is_captured", lambda device: False)
    first, second = counters.taken(device), counters.taken(device)
    assert second.data_ptr() == first.data_ptr() + 4 * counters.NUMBERS
    monkeypatch.setattr(counters, "is_captured", lambda device: True)
    assert counters.taken(device).data_ptr() == first.data_ptr() + 16 * counters.UNDER_WAY


def test_numbers_are_made_outside_of_a_caller_s_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_counters", {})
    with torch.inference_mode(), FakeTensorMode():
        places = counters.Counters(torch.device("cpu"))
    assert type(places.numbers) is Tensor
    assert not places.numbers.is_inference()
    assert not places.numbers.any()


def test_numbers_are_written_before_any_stream_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream than that of the first launch does not wait for what that one has still to do."""
    done: list[str] = []

    class Event:
        def record(self) -> None:
            done.append("record")

        def query(self) -> bool:
            done.append("query")
            return len(done) > 4

    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream of its own")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: done.append(stream) or nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "zeros", lambda shape, dtype, device: done.append("zeros") or zeros(1, dtype=dtype))
    counters.Counters(torch.device("cuda", 0))
    assert done == ["a stream of its own", "zeros", "record", "query", "query"]
