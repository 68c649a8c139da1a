"""TURBOQUANT's kernel for SM 9.0 on a machine without a GPU: compiled, and for which launches it is planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.compilers.compiler import Compiler
from support.suite.examples import some

from attnreg import AttentionRequest, Platform, Registry, select
from attnreg.kernels.hopper.packed.plans import CodeKind, kind_of, polynomial
from attnreg.language.packed import Packed, Side, packed_formats
from attnreg.runtime.turboquant.codebooks import codebook


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.close()


# a product is of 16 keys, or columns, by 16 columns, or keys, by 8 rows; a load is of 16 bytes a lane: those of values,
# of scales, of codes of 3 bits and of heads of 64, but for keys of 8 bits, are smaller and are not counted
@pytest.mark.parametrize(
    ("name", "products", "loads", "registers"),
    some(
        [
            # two pages a warp; two programs a multiprocessor have 255 registers, three 168, four 128
            ("4bit_nc", 2 * (8 + 8), 2 * 2, 168),
            ("4bit_nc, 16 rows", 2 * (8 + 8), 2, 255),
            ("k8v4, window, sinks", 2 * (8 + 8), 2 * 4, 168),
            ("4bit_ub of 80, softcap", 2 * (8 + 8), 2 * 2, 168),
            ("heads of 64", 2 * (4 + 4), 0, 128),
            ("k8v4, heads of 64, 16 rows", 2 * 2 * (4 + 4), 2 * 2, 168),
            ("4bit_ls, heads of 64", 2 * (4 + 4), 0, 128),
            ("3bit_nc", 2 * (8 + 8), 0, 168),
            ("k3v4_nc, window", 2 * (8 + 8), 0, 168),
            ("3bit_ub of 80, softcap", 2 * (8 + 8), 0, 168),
            ("3bit_ls, 16 rows", 2 * 2 * (8 + 8), 0, 255),
            ("3bit_nc, heads of 64", 2 * (4 + 4), 0, 128),
            ("3bit_nc, heads of 64, 16 rows", 2 * 2 * (4 + 4), 0, 255),
            ("k3v4_nc, heads of 64", 2 * (4 + 4), 0, 128),
            ("3bit_ls, heads of 64", 2 * (4 + 4), 0, 128),
        ],
        6,
    ),
)
def test_the_loop_waits_for_no_other_warp(
    compiler: Compiler, name: str, products: int, loads: int, registers: int
) -> None:
    kernel = compiler.call("hopper_packed", "compiled_decode", name)
    assert not kernel.spills
    assert (kernel.products, kernel.loads, kernel.barriers) == (products, loads, 0)
    assert kernel.registers <= registers


@pytest.mark.parametrize(
    ("name", "registers"),
    [("4bit_nc", 168), ("heads of 64", 128), ("3bit_ub of 80, softcap", 168)],
)
def test_sharing_keys_out_leaves_the_loop_as_it_is(compiler: Compiler, name: str, registers: int) -> None:
    alone, shared = (compiler.call("hopper_packed", "compiled_decode", name, in_graph) for in_graph in (False, True))
    assert not shared.spills
    assert (shared.products, shared.loads, shared.barriers) == (alone.products, alone.loads, 0)
    assert shared.registers <= registers


def test_all_presets_are_read(default: Registry) -> None:
    formats = packed_formats(default.vocabulary.words["kv_dtypes"])
    kinds = {name.removeprefix("turboquant_"): kind_of(packed) for name, packed in formats.items()}
    assert kinds == {
        "k8v4": CodeKind(8, 4, "uniform"), "4bit_nc": CodeKind(4, 4, "uniform"), "k3v4_nc": CodeKind(3, 4, "uniform"),
        "3bit_nc": CodeKind(3, 3, "uniform"), "4bit_ub": CodeKind(4, 4, "levels"), "3bit_ub": CodeKind(3, 3, "levels"),
        "4bit_ls": CodeKind(4, 4, "levels"), "3bit_ls": CodeKind(3, 3, "levels"),
    }  # fmt: skip


UNIFORM, LEVELS, FP8 = Side(4), Side(4, "hadamard", "norm"), Side(8)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (UNIFORM, UNIFORM), (LEVELS, Side(4, group=32)), (FP8, FP8), (FP8, LEVELS), (LEVELS, FP8),
        (Side(2, "hadamard", "norm"), UNIFORM), (LEVELS, Side(3)), (LEVELS, Side(3, "hadamard", "norm")),
    ],
)  # fmt: skip
def test_formats_that_are_not_read(keys: Side, values: Side) -> None:
    assert kind_of(Packed("ours", keys, values)) is None


@pytest.mark.parametrize(
    ("arch", "triton", "variant"),
    [
        ("sm90", "3.6.0", "Hopper"),
        ("sm90", "3.7.1", "Hopper"),
        ("sm90", "3.8", "Hopper"),
        ("sm90", "3.9.0", "Hopper"),
        ("sm80", "3.9.0", "Triton"),
    ],
)
def test_it_is_chosen_on_hopper_with_every_triton_that_the_kernels_know(
    default: Registry, arch: str, triton: str, variant: str
) -> None:
    platform = Platform(platform="cuda", arch=arch, packages={"torch": "2.11", "triton": triton})
    request = AttentionRequest(head_size=128, block_size=16, dtype="bfloat16", kv_dtype="turboquant_4bit_nc")
    assert select(request, platform, default).chosen.title == f"TURBOQUANT/{variant}"


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("bits", [3, 4])
def test_the_polynomial_gives_the_levels_of_the_codebook(bits: int, columns: int) -> None:
    *words, unit = polynomial(bits, columns)
    inner, outer = (float16(x) for x in words)
    for code, level in enumerate(codebook(bits, columns).levels):
        x = (code + 0.5) / 2**bits - 0.5
        factor = (x * x + inner) ** 2 + outer if bits == 4 else x * x + inner
        assert unit * x * factor == pytest.approx(level, rel=3e-4)


def float16(bits: int) -> float:
    """A normal number of float16, of its bits."""
    return float((1 + (bits & 0x3FF) / 1024) * 2.0 ** ((bits >> 10) - 15))


UNROTATED, ROTATED = 128, 0
# queries, keys, facts of the layer; the rows and the unrotated elements of each launch of the kernel, and whether
# launches rotate
CASES: list[tuple[str, list[int], list[int], dict[str, Any], list[tuple[int, int]], bool]] = [
    ("tokens", [1, 1], [900, 9], {}, [(8, UNROTATED)], True),
    ("tokens of many requests", [1] * 70, [900] * 70, {}, [(8, UNROTATED)], True),
    ("two queries of groups of 8", [2, 2], [900, 9], {"heads": (16, 2)}, [(16, UNROTATED)], True),
    ("padded heads", [1], [900], {"kv_dtype": "turboquant_4bit_ub", "head_size": 80}, [(8, 80)], True),
    ("keys of 8 bits", [1], [900], {"kv_dtype": "turboquant_k8v4"}, [(8, 0)], False),
    # a prompt's queries are rotated by a launch before it, and so are all of the batch
    ("tokens beside a prompt", [1, 300], [900, 300], {}, [(8, ROTATED)], False),
    ("prompts alone", [300], [300], {}, [], False),
    ("more rows than a tile has", [5, 1], [900, 9], {}, [], False),
    ("uniform values of another width", [1], [900], {"head_size": 80}, [], True),
    ("codes of 3 bits", [1], [900], {"kv_dtype": "turboquant_3bit_nc"}, [(8, UNROTATED)], True),
    ("wide heads", [1], [900], {"head_size": 256}, [], True),
    ("requests that differ in causality", [1, 1], [900, 9], {"causal": [True, False]}, [], True),
    ("slopes, which the kernel does not add", [1], [900], {"features": frozenset({"alibi"})}, [], True),
    # another request must not change how queries are rotated; of the class of several queries the largest has 16
    ("batch invariant", [1, 2], [900, 9], {"features": frozenset({"batch_invariant"})}, [(8, ROTATED)], False),
    # nor what computes a request, which a batch with others of another causality would have to leave to TRITON_ATTN
    ("batch invariant, causal by request", [1], [900],
     {"features": frozenset({"batch_invariant", "causal_by_request"})}, [], False),
]  # fmt: skip


@pytest.mark.parametrize(("queries", "keys", "facts", "rows", "rotate"), [case[1:] for case in CASES],
                         ids=[case[0] for case in CASES])  # fmt: skip
def test_launches_of_the_kernel(
    compiler: Compiler, queries: list[int], keys: list[int], facts: dict[str, Any], rows: list[tuple[int, int]],
    rotate: bool,
) -> None:  # fmt: skip
    launches, rotates = compiler.call("hopper_packed", "launched_for", queries, keys, facts)
    assert [(of, unrotated) for of, _, unrotated in launches] == rows
    assert rotates is rotate


def test_queries_are_rotated_for_a_launch_that_reads_memory_by_halves(compiler: Compiler) -> None:
    assert compiler.call("hopper_packed", "launched_at", 0) == ["packed_decode_kernel"]
    # TRITON_ATTN's kernel rotates those of few requests alone
    assert compiler.call("hopper_packed", "launched_at", 2) == ["_rotate_kernel", "_attention_kernel"]


@pytest.mark.parametrize(("head_size", "apart"), [(80, 0), (128, 64), (112, 256)])
def test_rotated_queries_are_read_by_their_own_strides(compiler: Compiler, head_size: int, apart: int) -> None:
    launched = compiler.call("hopper_packed", "launched_at", 2, head_size, apart)
    assert launched == ["_rotate_kernel", "_attention_kernel"]
