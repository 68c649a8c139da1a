"""Triton's interpreter has no bfloat16: launches there compute in float32, and round what they write."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from attnreg import AttentionRequest, Platform, Registry
from attnreg.conformance.proof import prove
from attnreg.conformance.trial import Case
from attnreg.kernels.interpreter.interpret import interpret
from attnreg.kernels.triton.launch import Kernel
from attnreg.selection.selector import evaluate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
SM89 = Platform(platform="cuda", arch="sm89", packages={"torch": "2.11", "triton": "3.7"})
BACKENDS = [
    ("TRITON_ATTN", {"features": {"sinks", "lse"}}, "chunked", "NHD"),
    ("TRITON_ATTN", {"kv_dtype": "fp8"}, "decode", "NHD"),
    ("TURBOQUANT", {"kv_dtype": "turboquant_4bit_ub", "head_size": 40}, "decode", "NHD"),
    ("TURBOQUANT", {"kv_dtype": "turboquant_3bit_ls", "features": {"lse"}}, "chunked", "fused"),
    ("TRITON_PREFILL", {"attention": "mla", "phase": "prefill", "head_size": 24, "head_size_v": 16, "num_kv_heads": 4,
                        "block_size": None}, "prefill", "packed"),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "changes", "lengths", "storage"), BACKENDS)
def test_bfloat16_is_as_near_the_reference_as_on_a_gpu(
    default: Registry, backend: str, changes: dict[str, Any], lengths: str, storage: Any
) -> None:
    facts: dict[str, Any] = {"head_size": 32, "num_heads": 4, "num_kv_heads": 2, "block_size": 16, **changes}
    request = AttentionRequest(**facts, dtype="bfloat16")
    case = Case(request=request, lengths=lengths, storage=storage)
    outcome = prove(case, evaluate(request, SM89, default, backend))
    assert outcome.problem is None
    assert 0 < outcome.share < 1


@triton.jit
def _sum_kernel(target_ptr, source_ptr, stride, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    offs = tl.arange(0, N)
    x = tl.load(target_ptr + offs * stride) + tl.load(source_ptr + offs * 0)
    tl.store(target_ptr + offs * stride, x, mask=offs % 2 == 0)


class _Code:
    options: dict[str, int] = {}  # noqa: RUF012

    def constants(self, key: tuple[Any, ...]) -> dict[str, Any]:
        return {"N": 8}


def test_only_what_a_kernel_wrote_is_written_and_it_is_rounded() -> None:
    # every bit of a bfloat16 that is not a number, and of what lies between the elements, stays
    memory = torch.full((24,), 0x7FC5, dtype=torch.int16).view(torch.bfloat16)
    target = memory[1:23:3]
    target[::2] = 1.0
    # one element, seen as eight
    source = torch.tensor([2.0**-8 + 2.0**-7]).bfloat16().expand(8)
    variant = Kernel(_sum_kernel).variant(memory.device, _Code())  # type: ignore[arg-type]
    variant.launch((), (1, 1, 1), target_ptr=target, source_ptr=source, stride=3)
    # to the nearest even: 1 + 3 * 2**-8 lies between 1 + 2**-7 and 1 + 2**-6
    assert target[::2].tolist() == [1.0 + 2.0**-6] * 4
    rest = torch.ones(24, dtype=torch.bool)
    rest[1:23:6] = False
    assert (memory.view(torch.int16)[rest] == 0x7FC5).all()


@triton.jit
def _masked_kernel(target_ptr, source_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    offs = tl.arange(0, N)
    x = tl.load(source_ptr + offs)
    y = (x.to(tl.float16) * 0.0 + x / 0.0).to(tl.int32).to(tl.float32) + tl.max(x + float("nan"), 0)
    tl.store(target_ptr + offs, tl.where(x == 1.0, x, y), mask=x == 1.0)


def test_nothing_warns_of_numbers_that_a_mask_drops() -> None:
    # warnings are errors in this suite
    target = torch.zeros(4)
    interpret(_masked_kernel, (1, 1, 1), (target, torch.tensor([3e38, 1.0, torch.nan, -torch.inf])), (4,))
    assert target.tolist() == [0.0, 1.0, 0.0, 0.0]


@triton.jit
def _spread(x, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    return x[:, None] * tl.full((N,), 3, tl.int32)[None, :]


@triton.jit
def _last_above(a, a_at, b, b_at):  # type: ignore[no-untyped-def]
    # associative, and of which operand stands first
    later = b > 0.5
    return tl.where(later, b, a), tl.where(later, b_at, a_at)


@triton.jit
def _mixed_kernel(target_ptr, source_ptr, size, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    rows = tl.program_id(0) * N + tl.arange(0, N)
    table = _spread(rows - 2, N) + tl.arange(0, N)
    # int32 wraps; integers of 64 bits, halves and bools promote as they do elsewhere
    wide = (table * 0x7FFFFFF) * 2 + rows[:, None].to(tl.int64) % 3
    x = tl.load(source_ptr + table % size, mask=(table >= 0) & (table < size), other=-1.0)
    y = tl.where((wide > 0) & (x < 1), x * 0.5, wide / 7) - x.to(tl.float16)
    tl.store(target_ptr + rows * 4, tl.sum(y, axis=1) / size)
    tl.store(target_ptr + rows * 4 + 1, tl.max(y * 2, axis=1))
    last, at = tl.reduce((x, wide), 1, _last_above)
    first, _ = tl.reduce((x, wide), 0, _last_above)
    tl.store(target_ptr + rows * 4 + 2, last + 4)
    tl.store(target_ptr + rows * 4 + 3, first + at % 1000 + 4)


@triton.jit
def _alike_kernel(target_ptr, source_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    x = tl.load(source_ptr + tl.arange(0, N))
    # functions given one operand twice and then two of the same types, numbers of two types, and of two values
    product = x * x
    product += x * (x + 1)
    both = tl.where(x > 1, x, x) + tl.where(x > 1, product, x)
    tl.store(target_ptr + tl.arange(0, N), both * 1 + both * 1.5 + both * True + both * 2)


def test_its_shorter_ways_change_no_bits_and_are_gone_afterwards() -> None:
    source = torch.linspace(-3.0, 3.0, 64)
    plain, quick = torch.zeros(64), torch.zeros(64)
    before = tl.block_type.__init__, tl.tensor.__init__, tl.dtype.__eq__
    _mixed_kernel[(2, 1, 1)](plain, source, 64, 8)
    interpret(_mixed_kernel, (2, 1, 1), (quick, source, 64), (8,))
    assert plain.abs().min() > 0
    assert torch.equal(plain, quick)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="incompatible dimensions"):
        interpret(_refused_kernel, (1, 1, 1), (quick,), (8,))
    assert (tl.block_type.__init__, tl.tensor.__init__, tl.dtype.__eq__) == before


def test_operands_that_differ_are_told_apart() -> None:
    source = torch.linspace(0.5, 2.0, 8)
    both = torch.where(source > 1, source + source * source + source * (source + 1), source + source)
    # the first launch records what the next one repeats
    for scale in (1, 2, 3):
        found = torch.zeros(8)
        interpret(_alike_kernel, (1, 1, 1), (found, source * scale), (8,))
        if scale == 1:
            torch.testing.assert_close(found, both * 1 + both * 1.5 + both + both * 2)
        plain = torch.zeros(8)
        _alike_kernel[(1, 1, 1)](plain, source * scale, 8)
        assert torch.equal(found, plain)


def test_threads_launch_one_after_the_other() -> None:
    source = torch.linspace(-3.0, 3.0, 64)
    expected = torch.zeros(64)
    interpret(_mixed_kernel, (2, 1, 1), (expected, source, 64), (8,))

    def launch(_: int) -> torch.Tensor:
        found = torch.zeros(64)
        interpret(_mixed_kernel, (2, 1, 1), (found, source, 64), (8,))
        return found

    # the interpreter keeps for the process which program runs: threads would store for one another
    with ThreadPoolExecutor(4) as threads:
        assert all(torch.equal(found, expected) for found in threads.map(launch, range(12)))


@triton.jit
def _shared_kernel(target_ptr, size, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    # the interpreter keeps the answer about a size as an integer, and that about a block as truth values
    counted = ((rows > 2) + (size > 3)).to(tl.int32)
    # it gives the operands of a shift other arrays, and what is in columns lies there in rows
    turned = tl.trans(rows * 5 + columns)
    shifted = turned >> 1
    tl.store(target_ptr + rows * N + columns, counted + shifted * 10 + (turned + rows) * 1000)


def test_operations_get_the_arrays_that_the_interpreter_gives_them() -> None:
    for size in (2, 4, 8):
        found, plain = (torch.zeros(64, dtype=torch.int32) for _ in range(2))
        interpret(_shared_kernel, (1, 1, 1), (found, size), (8,))
        _shared_kernel[(1, 1, 1)](plain, size, 8)
        assert torch.equal(found, plain)


# what releases of Triton's interpreter compute in other ways, of blocks of numbers, integers and truth values --------


@triton.jit
def _one_bit(x, n, b, c):  # type: ignore[no-untyped-def]
    return (b + c).to(tl.float32) + (b * c).to(tl.float32) * 2 + (b ^ c).to(tl.float32) * 4


@triton.jit
def _one_bit_scalars(x, n, b, c):  # type: ignore[no-untyped-def]
    some, others = tl.max(n, 0) > 3, tl.min(n, 0) > 3
    return n * (some + some) + n * 2 * (some + others) + n * 4 * (b + some) + n * 8 * (b & some)


@triton.jit
def _one_bit_difference(x, n, b, c):  # type: ignore[no-untyped-def]
    # NumPy refuses it, and so does Triton's interpreter up to 3.8
    return (b - c).to(tl.float32)


@triton.jit
def _truth_compared(x, n, b, c):  # type: ignore[no-untyped-def]
    return (b == c).to(tl.int32) + (b < c).to(tl.int32) * 2 + (b != c).to(tl.int32) * 4 + (b | c).to(tl.int32) * 8


@triton.jit
def _greater(x, n, b, c):  # type: ignore[no-untyped-def]
    return tl.maximum(x, n - 2.0)


@triton.jit
def _less_or_nan(x, n, b, c):  # type: ignore[no-untyped-def]
    return tl.minimum(x, n - 2.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _clamped(x, n, b, c):  # type: ignore[no-untyped-def]
    return tl.clamp(x, -1.0, 1.5)


@triton.jit
def _clamped_or_nan(x, n, b, c):  # type: ignore[no-untyped-def]
    return tl.clamp(x, -1.0, 1.5, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _fused(x, n, b, c):  # type: ignore[no-untyped-def]
    y = 1 + x * 0.000244140625
    return tl.fma(y, y, -1.0 - x * 0.00048828125)


@triton.jit
def _extremes(x, n, b, c):  # type: ignore[no-untyped-def]
    return x * 0 + tl.max(x, 0) + 2 * tl.min(x, 0) + tl.argmax(x, 0) * 16 + tl.argmin(x, 0) * 256


@triton.jit
def _first_or_more(a, b):  # type: ignore[no-untyped-def]
    return tl.where(b > a, b, a)


@triton.jit
def _reduced(x, n, b, c):  # type: ignore[no-untyped-def]
    return n + tl.reduce(x, 0, _first_or_more)


@triton.jit
def _counted(x, n, b, c):  # type: ignore[no-untyped-def]
    return tl.histogram(n, 8)


@triton.jit
def _divided(x, n, b, c):  # type: ignore[no-untyped-def]
    return (n - 5) // 3 + ((n - 5) % 3) * 16 + ((n - 5) >> 1) * 256 + tl.umulhi(n - 5, n + 0x7FFFFFF0) * 4096


@triton.jit
def _narrowed(x, n, b, c):  # type: ignore[no-untyped-def]
    return x.to(tl.float16).to(tl.float32) + x.to(tl.float8e5).to(tl.float32) + (n - 5).to(tl.int8).to(tl.uint32)


@triton.jit
def _summed(x, n, b, c):  # type: ignore[no-untyped-def]
    return tl.cumsum(n * 0.1, 0) + tl.sum(b.to(tl.int32), 0) + tl.exp2(x) * tl.sigmoid(-x)


IN_OTHER_WAYS = [
    _one_bit, _one_bit_scalars, _one_bit_difference, _truth_compared, _greater, _less_or_nan, _clamped, _clamped_or_nan,
    _fused, _extremes, _reduced, _counted, _divided, _narrowed, _summed,
]  # fmt: skip


@triton.jit
def _apply_kernel(target_ptr, source_ptr, N: tl.constexpr, OF: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    n = tl.arange(0, N)
    x = tl.load(source_ptr + n)
    tl.store(target_ptr + n, OF(x, n, x > 0.5, n % 4 > 1).to(tl.float32))


@pytest.mark.parametrize("function", IN_OTHER_WAYS, ids=lambda function: function.__name__)
def test_it_computes_what_the_interpreter_of_the_installed_triton_does(function: Any) -> None:
    def result(launch: Any, source: torch.Tensor) -> Any:
        target = torch.full((8,), -77.0)
        try:
            launch(target, source)
        except triton.runtime.errors.InterpreterError as e:
            return str(e)
        return target.view(torch.int32).tolist()

    # the first launch records what the next ones repeat
    for scale in (1.0, 2.0, -3.0):
        source = torch.tensor([torch.nan, 1.5, -0.0, 2.0, -torch.inf, torch.inf, 0.3, torch.nan]) * scale
        with warnings.catch_warnings(action="ignore"):
            expected = result(lambda *of: _apply_kernel[(1, 1, 1)](*of, 8, function), source)
        assert result(lambda *of: interpret(_apply_kernel, (1, 1, 1), of, (8, function)), source) == expected


@triton.jit
def _scalar_mask_kernel(target_ptr, source_ptr, size, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    n = tl.arange(0, N)
    # a comparison of two numbers, which the interpreter keeps as an integer
    some = (size > 3) & (n < size)
    x = tl.load(source_ptr + n, mask=some, other=-1.0)
    tl.store(target_ptr + n, x, mask=(tl.max(n, 0) > 0) & (n < 6))
    # as the interpreter loads and stores where nothing can be repeated
    tl.store(target_ptr + n + N, tl.load(source_ptr + n, mask=some, volatile=True), mask=size > 2)
    tl.store(target_ptr + 2 * N, 7.0, mask=size > 4)


def test_a_comparison_of_numbers_is_a_mask() -> None:
    source = torch.arange(1.0, 9.0)
    for size in (2, 4, 8):
        found = torch.zeros(17)
        interpret(_scalar_mask_kernel, (1, 1, 1), (found, source, size), (8,))
        some = (torch.arange(8) < size) & (size > 3)
        first = [*torch.where(some, source, -1.0)[:6].tolist(), 0.0, 0.0]
        assert found.tolist() == [*first, *(some * source * (size > 2)).tolist(), 7.0 * (size > 4)]


@triton.jit
def _refused_kernel(target_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    tl.store(target_ptr + tl.arange(0, N), tl.arange(0, N) + tl.arange(0, 2 * N))
