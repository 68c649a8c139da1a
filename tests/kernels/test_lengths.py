"""Lengths that only the device knows: the host has upper bounds, and every backend computes with the device's."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from support.layers.kernel_trials import NOWHERE, Case, trial_of

from attnreg.conformance.proof import attend, compare, examine
from attnreg.kernels import cpu_attn, flex_attention, rocm_attn, torch_sdpa, triton_attn
from attnreg.runtime.interface import BatchMetadata, Call, KVCache
from attnreg.runtime.lengths import LONGEST

# numpy, in the interpreter, warns of the NaN that the tests plant in rows that are masked
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the processor stands for a device here"),
]
ALL = frozenset({"sinks", "alibi", "mm_prefix"})
RANGES = [[[10, 20], [33, 39]], [[0, 3], [100, 149]], [[-100, 9], [0, 0]], [[0, 4], [5, 9]], [[0, 0], [0, 0]]]
CASES: dict[str, Case] = {
    "plain": Case([1, 5, 20, 0, 1], [40, 150, 20, 7, 1], dtype=torch.float32),
    "window": Case([1, 5, 20, 0, 1], [40, 150, 20, 7, 1], dtype=torch.float32, window=9),
    "window, not causal": Case([1, 5, 20, 0, 1], [40, 150, 20, 7, 1], dtype=torch.float32, window=9, causal=False),
    "decode": Case([1] * 4, [40, 40, 40, 40], dtype=torch.float32),
    "not causal": Case([1, 5, 20, 0, 1], [40, 150, 20, 7, 1], dtype=torch.float32, causal=False),
    "cross": Case([1, 5, 2], [0, 3, 150], dtype=torch.float32, causal=False),
    "everything": Case(
        [1, 5, 20, 0, 1], [40, 150, 20, 7, 1], dtype=torch.float32, features=ALL, ranges=RANGES, window=30
    ),
}
SERVED: dict[ModuleType, list[str]] = {
    cpu_attn: list(CASES), flex_attention: list(CASES), triton_attn: list(CASES),
    torch_sdpa: [name for name in CASES if name != "everything"],
    rocm_attn: [name for name in CASES if name != "everything"],
}  # fmt: skip


class Layer:
    """A trial's layer, run by another kernel module."""

    def __init__(self, module: ModuleType, layer: Any) -> None:
        self.module, self.spec, self.params = module, layer.spec, layer.params
        self.write_kv = layer.write_kv
        if module in (torch_sdpa, rocm_attn):
            self.spec = replace(self.spec, features=self.spec.features - {"lse"})

    def attend(self, query: Any, kv_cache: Any, batch: BatchMetadata, output: Any, **more: Any) -> None:
        call = Call(query, kv_cache, output, params=self.params, **more)
        self.module.forward(self.spec, self.module.plan(self.spec, batch), call)


@pytest.mark.parametrize(
    ("on_host", "module", "name"), [(h, m, n) for m, names in SERVED.items() for n in names
     # those that read the lengths on the device do so wherever it is
     for h in ([False] if m in (triton_attn, rocm_attn) else [True, False])],
    ids=lambda x: x.__name__.rpartition(".")[2] if isinstance(x, ModuleType) else str(x),
)  # fmt: skip
def test_the_device_says_how_many_keys_there_are(
    on_host: bool, module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a whole number of blocks more, and a few keys
    more = 37
    trial = trial_of(CASES[name], "cpu")
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    if not on_host:
        # as of a GPU's memory, which cannot be read without waiting for it
        monkeypatch.setattr(BatchMetadata, "on_host", False)
    table = torch.full((len(CASES[name].keys), 40), NOWHERE, dtype=torch.int32)
    assert trial.batch.block_table is not None
    table[:, : trial.batch.block_table.shape[1]] = trial.batch.block_table
    batch = replace(
        trial.batch, block_table=table, seq_lens_cpu=trial.batch.seq_lens_cpu + more,
        max_seq_len=trial.batch.max_seq_len + more,
    )  # fmt: skip
    trial = replace(trial, layer=Layer(module, trial.layer), batch=batch)  # type: ignore[arg-type]
    assert compare(trial, *attend(trial, batch, trial.query)).problem is None


@pytest.mark.parametrize("module", [cpu_attn, torch_sdpa, triton_attn], ids=lambda m: m.__name__.rpartition(".")[2])
def test_the_bounds_of_others_change_no_bits(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_of(replace(CASES["plain"], features=frozenset({"batch_invariant"})), "cpu")
    monkeypatch.setattr(BatchMetadata, "on_host", False)
    known = trial.batch.seq_lens_cpu + torch.tensor([0, 1, 3, 40, 9], dtype=torch.int32)
    known = known.clamp(max=trial.batch.block_table.shape[1] * trial.layer.spec.block_size)
    batch = replace(trial.batch, seq_lens_cpu=known, max_seq_len=int(known.max()))
    # a trial of such a layer runs each request alone too, with the bound that it has
    bounded = replace(trial, layer=Layer(module, trial.layer), batch=batch)  # type: ignore[arg-type]
    assert examine(bounded).problem is None


@pytest.mark.parametrize("attn_type", ["decoder", "encoder_decoder"])
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("module", SERVED, ids=lambda m: m.__name__.rpartition(".")[2])
def test_padding_without_keys_gives_zeros(
    module: ModuleType, on_host: bool, sinks: bool, attn_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case([1, 2, 1, 3], [0, 30, 0, 0], dtype=torch.float32, features=frozenset({"sinks"} if sinks else ()))
    if module is torch_sdpa:
        case = replace(case, features=frozenset())
    trial = trial_of(replace(case, causal=False), "cpu")
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    trial.layer.spec = replace(trial.layer.spec, attn_type=attn_type)
    if not on_host:
        monkeypatch.setattr(BatchMetadata, "on_host", False)
    for causal in (False, True):
        for known in ([0, 30, 0, 0], [1, 30, 5, 3]):
            batch = replace(trial.batch, causal=causal, seq_lens_cpu=torch.tensor(known, dtype=torch.int32))
            padded = replace(trial, layer=Layer(module, trial.layer), batch=batch)  # type: ignore[arg-type]
            output, lse = attend(padded, batch, trial.query)
            assert compare(padded, output, lse).problem is None
            assert (output[[0, 3, 4, 5, 6]] == 0).all()


@pytest.mark.parametrize(
    "module", [m for m in SERVED if m is not torch_sdpa], ids=lambda m: m.__name__.rpartition(".")[2]
)
def test_a_sink_of_minus_infinity_is_none_and_one_of_infinity_takes_all(module: ModuleType) -> None:
    # the keys of the second request are split, those of the last are not, and the first, padding, has none
    trial = trial_of(Case([1, 1, 20], [0, 900, 33], dtype=torch.float32, features=frozenset({"sinks"})), "cpu")
    sinks = torch.tensor([-torch.inf, 0.5, torch.inf, 3.0])
    trial.layer.params = replace(trial.layer.params, sinks=sinks)
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    trial = replace(trial, layer=Layer(module, trial.layer))  # type: ignore[arg-type]
    output, lse = attend(trial, trial.batch, trial.query)
    assert compare(trial, output, lse).problem is None
    assert (output[0] == 0).all()
    tokens = trial.batch.num_tokens
    assert (output[:tokens, 2] == 0).all()
    if "lse" in trial.layer.spec.features:
        assert torch.equal(lse[:, 0], sinks)
        assert (lse[2, :tokens] == torch.inf).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("module", SERVED, ids=lambda m: m.__name__.rpartition(".")[2])
def test_the_widest_window_holds_every_key(module: ModuleType, causal: bool) -> None:
    case = Case([1, 5, 20], [40, 50, 20], dtype=torch.float32, window=2 * LONGEST, causal=causal)
    trial = trial_of(case, "cpu")
    trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
    trial = replace(trial, layer=Layer(module, trial.layer))  # type: ignore[arg-type]
    assert compare(trial, *attend(trial, trial.batch, trial.query)).problem is None


def test_the_last_query_of_the_longest_request_sees_its_window() -> None:
    # all blocks are one, and of them the window holds a few keys at the end
    block, left = 2**20, 15
    case = Case([1], [LONGEST], (1, 1), dtype=torch.float32, block_size=block, window=(left, LONGEST), causal=False)
    cache = KVCache(torch.randn(1, block, 1, 32), torch.randn(1, block, 1, 32))
    table = torch.zeros(1, LONGEST // block, dtype=torch.int32)
    batch = BatchMetadata.build([1], [LONGEST], block_table=table, causal=False)
    output, lse, query = torch.empty(1, 1, 32), torch.empty(1, 1), torch.randn(1, 1, 32)
    triton_attn.forward(case.spec, triton_attn.plan(case.spec, batch), Call(query, cache, output, lse=lse))
    key, value = (x[0, -left - 1 :, 0].double() for x in cache)
    scores = key @ query[0, 0].double() * case.spec.softmax_scale
    assert torch.allclose(output[0, 0].double(), scores.softmax(0) @ value, atol=1e-5)
    assert torch.allclose(lse[0, 0].double(), scores.logsumexp(0), atol=1e-5)
