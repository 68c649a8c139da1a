"""`attnreg.ops.merge_attn_states` and `merge_states`: arguments, refusals, and what a compiler sees of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.layers.states import DEVICE, merged, states_of
from torch import Tensor
from torch.autograd import forward_ad

from attnreg import BatchError, ops

TOKENS, HEADS, SIZE = 6, 3, 32


def arguments(**changes: Any) -> dict[str, Any]:
    """Arguments of merge_attn_states that fit, with changes."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(2, TOKENS, HEADS, SIZE, generator=generator).to(DEVICE)
    lses = torch.randn(2, HEADS, TOKENS, generator=generator).to(DEVICE)
    return {
        "output": torch.full((TOKENS, HEADS, SIZE), torch.nan, device=DEVICE), "prefix_output": states[0],
        "prefix_lse": lses[0], "suffix_output": states[1], "suffix_lse": lses[1],
        "output_lse": torch.full((HEADS, TOKENS), torch.nan, device=DEVICE), **changes,
    }  # fmt: skip


def expected(given: dict[str, Any], n: int | None = None) -> tuple[Tensor, Tensor]:
    states = torch.stack([given["prefix_output"], given["suffix_output"]])
    return merged(states, torch.stack([given["prefix_lse"], given["suffix_lse"]]), n)


@pytest.mark.parametrize("n", [None, 0, 2, TOKENS])
@pytest.mark.parametrize("lse", [True, False])
def test_two_states_are_merged(n: int | None, lse: bool) -> None:
    given = arguments(prefill_tokens_with_context=n)
    output, output_lse = given["output"], given["output_lse"]
    exact, exact_lse = expected(given, n)
    if not lse:
        del given["output_lse"]
    assert ops.merge_attn_states(**given) is None
    torch.testing.assert_close(output.double(), exact, rtol=2e-6, atol=2e-6)
    if lse:
        torch.testing.assert_close(output_lse.double(), exact_lse, rtol=2e-6, atol=2e-6)


def test_arguments_may_be_given_by_place() -> None:
    given = arguments()
    factor = torch.tensor(0.5, device=DEVICE)
    output = torch.empty(TOKENS, HEADS, SIZE, dtype=torch.float8_e4m3fn, device=DEVICE)
    ops.merge_attn_states(output, *[*given.values()][1:], 4, factor)
    ops.merge_attn_states(**given | {"prefill_tokens_with_context": 4})
    assert torch.equal(output.float(), (given["output"] / factor).to(torch.float8_e4m3fn).float())


def test_k_states_are_merged_and_rounded_once() -> None:
    states, lses = states_of(5, 20, 3, 48)
    exact, exact_lse = merged(states, lses)
    output, lse = torch.empty(20, 3, 48, dtype=torch.float16, device=DEVICE), torch.empty(3, 20, device=DEVICE)
    ops.merge_states(output, states, lses, lse)
    torch.testing.assert_close(output.double(), exact, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-6, atol=2e-6)
    # one by one is the same
    both = states[0].clone(), lses[0].clone()
    for state, one in zip(states[1:], lses[1:], strict=True):
        ops.merge_attn_states(both[0], both[0], both[1], state, one, both[1])
    torch.testing.assert_close(both[0].double(), exact, rtol=1e-5, atol=1e-5)


def test_no_tokens_and_no_heads_are_nothing_to_do() -> None:
    for tokens, heads in ((0, 3), (3, 0), (0, 0)):
        states, lses = torch.empty(2, tokens, heads, 16, device=DEVICE), torch.empty(2, heads, tokens, device=DEVICE)
        ops.merge_states(torch.empty_like(states[0]), states, lses, torch.empty_like(lses[0]))
        ops.merge_attn_states(torch.empty_like(states[0]), states[0], lses[0], states[1], lses[1], None, 0)


def half(x: Tensor) -> Tensor:
    return x.half()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"output": None}, "output is None; expected a tensor"),
        ({"prefix_lse": [1.0]}, r"prefix_lse is \[1.0\]; expected a tensor"),
        ({"output_scale": 1.0, "output_lse": 3}, "output_lse is 3; expected a tensor\noutput_scale is 1.0"),
        ({"output": torch.empty(18, 32)}, r"output is \[18, 32\] float32; expected \[num_tokens, num_heads"),
        ({"output": torch.empty(6, 3, 32).int()}, r"output is \[6, 3, 32\] int32"),
        ({"output": torch.empty(6, 3, 0)}, "expected a head_size of at least 1"),
        ({"prefix_output": half}, r"prefix_output is \[6, 3, 32\] float16; expected \[6, 3, 32\] float32"),
        ({"suffix_output": half}, r"suffix_output is \[6, 3, 32\] float16; expected \[6, 3, 32\] float32"),
        ({"prefix_output": lambda x: x[:5]}, r"prefix_output is \[5, 3, 32\] float32; expected \[6, 3, 32\]"),
        ({"suffix_output": lambda x: x[..., :31]}, r"suffix_output is \[6, 3, 31\] float32; expected \[6, 3, 32\]"),
        ({"prefix_lse": lambda x: x.T}, r"prefix_lse is \[6, 3\] float32; expected \[3, 6\] float32"),
        ({"suffix_lse": lambda x: x.double()}, r"suffix_lse is \[3, 6\] float64; expected \[3, 6\] float32"),
        ({"output_lse": lambda x: x[:2]}, r"output_lse is \[2, 6\] float32; expected \[3, 6\] float32"),
        ({"output_lse": lambda x: x[:1].expand(3, 6)}, r"output_lse has strides \[0, 1\], by which several"),
        ({"output": lambda x: x[:1].expand(6, 3, 32)}, r"output has strides \[0, 32, 1\], by which several"),
        ({"suffix_lse": lambda x: x.to_sparse()}, "expected a tensor with strides"),
        ({"suffix_lse": lambda x: x.to("meta")}, "suffix_lse is on meta, output on"),
        ({"prefill_tokens_with_context": -1}, "prefill_tokens_with_context is -1; expected an integer from 0 to 6"),
        ({"prefill_tokens_with_context": 7}, "prefill_tokens_with_context is 7; expected an integer from 0 to 6"),
        ({"prefill_tokens_with_context": 2.0}, "prefill_tokens_with_context is 2.0; expected an integer in host"),
        ({"prefill_tokens_with_context": True}, "prefill_tokens_with_context is True; expected an integer in host"),
        ({"prefill_tokens_with_context": torch.tensor(2)}, r"prefill_tokens_with_context is \[\] int64; expected an"),
        ({"output_scale": torch.ones(1)}, "with an output_scale; an output of 8 bits has one, no other has"),
        ({"output": lambda x: x.to(torch.float8_e4m3fn)}, "without an output_scale"),
        ({"output": lambda x: x.to(torch.float8_e5m2), "output_scale": torch.ones(1)}, "float8_e5m2; expected"),
        (
            {"output": lambda x: x.to(torch.float8_e4m3fn), "output_scale": torch.ones(3)},
            r"output_scale is \[3\] float32; expected \[1\] float32",
        ),
        ({"prefix_output": lambda x: x.to(torch.float8_e4m3fn)}, "prefix_output is .* float8_e4m3fn; expected"),
        (
            {"suffix_output": lambda x: x.requires_grad_()},
            "suffix_output requires a gradient",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(changes: dict[str, Any], problem: str) -> None:
    given = arguments()
    before = {name: x for name, x in given.items() if name.startswith("output")}
    for name, change in changes.items():
        new = change(given[name]) if callable(change) else change
        given[name] = new.to(DEVICE) if isinstance(new, Tensor) and new.device.type != "meta" else new
    with pytest.raises(BatchError, match=problem):
        ops.merge_attn_states(**given)
    assert all(x.isnan().all() for x in before.values())


@pytest.mark.parametrize(
    ("states", "lses", "problem"),
    [
        (torch.zeros(6, 3, 32), torch.zeros(3, 6), r"states is \[6, 3, 32\] float32; expected \[any, 6, 3, 32\]"),
        (torch.zeros(0, 6, 3, 32), torch.zeros(0, 3, 6), "states has no state; expected one at least"),
        (torch.zeros(2, 6, 3, 32), torch.zeros(3, 3, 6), r"lses is \[3, 3, 6\] float32; expected \[2, 3, 6\]"),
        (torch.zeros(2, 6, 3, 32).int(), torch.zeros(2, 3, 6), "states is .* int32; expected float16"),
        ([torch.zeros(6, 3, 32)], torch.zeros(1, 3, 6), "states is list; expected a tensor"),
    ],
)
def test_states_that_do_not_fit_are_refused(states: Any, lses: Any, problem: str) -> None:
    with pytest.raises(BatchError, match=problem):
        ops.merge_states(
            torch.empty(6, 3, 32, device=DEVICE), states.to(DEVICE) if isinstance(states, Tensor) else states,
            lses.to(DEVICE),
        )  # fmt: skip


def test_memory_that_is_written_while_it_is_read() -> None:
    memory = torch.zeros(2 * TOKENS, HEADS, 2 * SIZE, device=DEVICE)
    given = arguments(output_lse=None)
    for output, prefix, fits in (
        # the same, two columns, two rows, every other row
        (memory[:TOKENS, :, :SIZE], memory[:TOKENS, :, :SIZE], True),
        (memory[:TOKENS, :, :SIZE], memory[:TOKENS, :, SIZE:], True),
        (memory[:TOKENS, :, :SIZE], memory[TOKENS:, :, :SIZE], True),
        (memory[::2, :, :SIZE], memory[1::2, :, :SIZE], True),
        # one element, one row, all in another order
        (memory[:TOKENS, :, :SIZE], memory[:TOKENS, :, SIZE - 1 : -1], False),
        (memory[:TOKENS, :, :SIZE], memory[TOKENS - 1 : -1, :, :SIZE], False),
        (memory[:TOKENS, :, :SIZE], memory[1 : TOKENS + 1, :, :SIZE], False),
        (memory[:TOKENS, :, :SIZE], memory[:TOKENS, :, : 2 * SIZE : 2], False),
        (memory[:TOKENS, :, :SIZE], memory[:1, :, :SIZE].expand(TOKENS, HEADS, SIZE), False),
    ):
        for name in ("prefix_output", "suffix_output"):
            arguments_ = {**given, "output": output, name: prefix}
            if fits:
                ops.merge_attn_states(**arguments_)
                continue
            with pytest.raises(BatchError, match=f"output overlaps {name} in memory"):
                ops.merge_attn_states(**arguments_)
    lses = torch.zeros(HEADS, 2 * TOKENS, device=DEVICE)
    ops.merge_attn_states(**{**given, "output_lse": lses[:, :TOKENS], "prefix_lse": lses[:, :TOKENS]})
    ops.merge_attn_states(**{**given, "output_lse": lses[:, ::2], "prefix_lse": lses[:, 1::2]})
    with pytest.raises(BatchError, match="output_lse overlaps suffix_lse in memory"):
        ops.merge_attn_states(**{**given, "output_lse": lses[:, :TOKENS], "suffix_lse": lses[:, 1 : TOKENS + 1]})
    with pytest.raises(BatchError, match="output overlaps output_lse in memory"):
        ops.merge_attn_states(**{**given, "output": memory[:TOKENS, :, :SIZE], "output_lse": memory[0, :, :TOKENS]})
    stack, many = torch.zeros(3, TOKENS, HEADS, SIZE, device=DEVICE), torch.zeros(3, HEADS, TOKENS, device=DEVICE)
    ops.merge_states(stack[1], stack, many, many[2])
    with pytest.raises(BatchError, match="output overlaps states in memory"):
        ops.merge_states(stack.view(-1, HEADS, SIZE)[3 : 3 + TOKENS], stack, many)


def test_tangents_are_refused() -> None:
    given = arguments()
    with forward_ad.dual_level():
        given["suffix_lse"] = forward_ad.make_dual(given["suffix_lse"], torch.ones_like(given["suffix_lse"]))
        with pytest.raises(BatchError, match="suffix_lse has a tangent"):
            ops.merge_attn_states(**given)
    assert given["output"].isnan().all()


def test_the_schemas_say_what_the_ops_do() -> None:
    given = arguments()
    torch.library.opcheck(torch.ops.attnreg.merge_attn_states.default, (*given.values(), 3, None))
    states, lses = torch.zeros(2, TOKENS, HEADS, SIZE, device=DEVICE), torch.zeros(2, HEADS, TOKENS, device=DEVICE)
    torch.library.opcheck(
        torch.ops.attnreg.merge_states.default, (given["output"], states, lses, given["output_lse"], None)
    )


def test_the_op_refuses_a_tensor_without_data_beside_others() -> None:
    given = [*arguments().values()]
    with pytest.raises(BatchError, match=r"output is on .*, another argument on meta"):
        torch.ops.attnreg.merge_attn_states(*given[:4], given[4].to("meta"), None, None, None)
    assert given[0].isnan().all()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_function_merges(backend: str, in_place: bool) -> None:
    def step(prefix: Tensor, prefix_lse: Tensor, suffix: Tensor, suffix_lse: Tensor) -> Tensor:
        suffix = suffix * 2
        output = suffix if in_place else torch.empty_like(suffix)
        lse = torch.empty_like(prefix_lse)
        ops.merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, lse, prefix.shape[0] // 2)
        return output + lse.T[..., None]

    given = [*arguments().values()][1:5]
    with torch.inference_mode():
        exact = step(*given)
        torch.testing.assert_close(torch.compile(step, backend=backend, fullgraph=True)(*given), exact)


def test_importing_the_ops_imports_no_kernel() -> None:
    import subprocess
    import sys

    code = "import sys, attnreg; attnreg.ops.merge_attn_states; print([m for m in sys.modules if 'kernels' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "attnreg.kernels" not in found.stdout
