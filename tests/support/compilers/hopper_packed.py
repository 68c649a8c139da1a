"""The kernel of TURBOQUANT for SM 9.0, compiled as its plans would launch it, on a machine without a GPU.

It is imported by a process that compiles alone (compiler.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from attnreg.conformance.proof import attend
from attnreg.kernels.hopper.packed import attention as hopper_turboquant
from attnreg.kernels.hopper.packed import plans as packed_plans
from attnreg.kernels.triton import plans
from attnreg.kernels.triton.launch import Bound
from attnreg.kernels.triton.planned.arguments import AttentionTensors
from attnreg.kernels.turboquant import store as storing
from support.compilers.hopper_attn import CompiledDecode, on_hopper, used_by
from support.layers.kernel_trials import Case, in_graphs, trial_of

PLACES = [(hopper_turboquant, "require"), (packed_plans, "target_of"), (storing, "target_of")]
TOKENS = Case(
    [1] * 8, [3000] * 8, heads=(32, 8), head_size=128, dtype=torch.bfloat16, kv_dtype="turboquant_4bit_nc"
)  # fmt: skip
DECODES = {
    "4bit_nc": TOKENS,
    "4bit_nc, 16 rows": replace(TOKENS, queries=[4] * 8, block_size=64),
    "k8v4, window, sinks": replace(TOKENS, kv_dtype="turboquant_k8v4", window=100, features=frozenset({"sinks"})),
    "4bit_ub of 80, softcap": replace(TOKENS, kv_dtype="turboquant_4bit_ub", head_size=80, softcap=20.0),
    "heads of 64": replace(TOKENS, head_size=64),
    "k8v4, heads of 64, 16 rows": replace(TOKENS, kv_dtype="turboquant_k8v4", head_size=64, queries=[4] * 8),
    "4bit_ls, heads of 64": replace(TOKENS, kv_dtype="turboquant_4bit_ls", head_size=64),
    "3bit_nc": replace(TOKENS, kv_dtype="turboquant_3bit_nc"),
    "k3v4_nc, window": replace(TOKENS, kv_dtype="turboquant_k3v4_nc", window=100, block_size=64),
    "3bit_ub of 80, softcap": replace(TOKENS, kv_dtype="turboquant_3bit_ub", head_size=80, softcap=20.0),
    "3bit_ls, 16 rows": replace(TOKENS, kv_dtype="turboquant_3bit_ls", queries=[4] * 8),
    "3bit_nc, heads of 64": replace(TOKENS, kv_dtype="turboquant_3bit_nc", head_size=64),
    "3bit_nc, heads of 64, 16 rows": replace(TOKENS, kv_dtype="turboquant_3bit_nc", head_size=64, queries=[4] * 8),
    "k3v4_nc, heads of 64": replace(TOKENS, kv_dtype="turboquant_k3v4_nc", head_size=64),
    "3bit_ls, heads of 64": replace(TOKENS, kv_dtype="turboquant_3bit_ls", head_size=64),
}


def compiled_decode(name: str, in_graph: bool = False) -> CompiledDecode:
    """What the kernel uses that a case of `DECODES` launches, in a graph for any lengths."""
    kernels = packed_plans._DECODE
    kernels._variants.clear()
    plans._launches.cache_clear()
    with on_hopper(PLACES):
        module = in_graphs(hopper_turboquant) if in_graph else hopper_turboquant
        trial = trial_of(DECODES[name], "cpu", module=module)
        attend(trial, trial.batch, trial.query)
    return used_by(kernels)


def launched_for(queries: list[int], keys: list[int], facts: dict[str, Any]) -> tuple[list[tuple[int, int, int]], bool]:
    """The rows, the splits and the unrotated elements of each launch of the kernel in a batch of such lengths, and
    whether launches rotate queries."""
    seen: list[tuple[int, int, int]] = []
    launch = packed_plans.FewQueries.launch

    def recorded(few: Any, chosen: Any, kernel: Any, code: Any, shares: Any) -> Any:
        seen.append((code.rows, chosen.splits, code.unrotated))
        return launch(few, chosen, kernel, code, shares)

    plans._launches.cache_clear()
    packed_plans.FewQueries.launch = recorded  # type: ignore[method-assign]
    try:
        with on_hopper(PLACES):
            trial = trial_of(replace(TOKENS, queries=queries, keys=keys, **facts), "cpu", module=hopper_turboquant)
            plan = trial.layer.plan(trial.batch).attention
            plan._bind(AttentionTensors(trial.query, *trial.cache, trial.query))
    finally:
        packed_plans.FewQueries.launch = launch  # type: ignore[method-assign]
    return seen, plan.rotates


def launched_at(offset: int, head_size: int = 128, apart: int = 0) -> list[str]:
    """The kernels that many tokens launch whose queries begin so many bytes past a multiple of 16.

    apart: elements between the tokens. Portable kernels have to be launched with the strides that their queries have.
    """
    names: list[str] = []

    def record(bound: Any, tensors: Sequence[torch.Tensor], *_: Any) -> None:
        names.append(bound.variant.function.__name__)
        if names[-1] == "_attention_kernel":
            strides = bound.variant.code.constants(bound.key)["Q"]
            assert tensors[0].stride() == (strides.token, strides.head, 1), (tensors[0].stride(), strides)

    plans._launches.cache_clear()
    launching = Bound.launch
    Bound.launch = record  # type: ignore[assignment, method-assign]
    try:
        with on_hopper(PLACES):
            many = replace(TOKENS, queries=[1] * 70, keys=[90] * 70, head_size=head_size)
            trial = trial_of(many, "cpu", module=hopper_turboquant)
            tokens, heads, size = trial.query.shape
            token = heads * size + apart
            memory = torch.zeros(tokens * token + 8, dtype=trial.query.dtype)
            first = (offset - memory.data_ptr()) % 16 // 2
            query = memory[first:].as_strided((tokens, heads, size), (token, size, 1))
            names.clear()
            attend(trial, trial.batch, query)
    finally:
        Bound.launch = launching  # type: ignore[method-assign]
    return [name for name in names if name not in ("_store_kernel", "_merge_splits_kernel")]
