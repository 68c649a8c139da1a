"""What only a GPU can show: claims on the device itself, CUDA graphs, and that no call waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnreg
from attnreg import AttentionRequest, BatchMetadata, Platform, Registry
from attnreg.conformance.claims import PROVABLE, Claims
from attnreg.conformance.proof import attend, prove
from attnreg.conformance.refusals import refusals
from attnreg.conformance.trial import ON_GPU, Trial, prepare
from attnreg.conformance.verify import verify
from attnreg.machine.detect import detect_all
from attnreg.runtime.layer import Attention

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use"),
    # what compilers have to say of a device is no fault of a backend
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def here(default: Registry) -> Platform:
    """The GPU of this machine. PyTorch for ROCm calls its devices cuda too."""
    return next(p for p in detect_all(default.vocabulary) if p.platform in ("cuda", "rocm"))


BACKENDS = ["FLEX_ATTENTION", "ROCM_ATTN", "TORCH_SDPA", "TRITON_ATTN"]
# what an AMD GPU selects runs on others too: the kernels are the same
AMD = Platform(platform="rocm", arch="gfx942")


def platform_for(backend: str, default: Registry, here: Platform) -> Platform:
    """This GPU, or the one that the backend is for."""
    return here if here.platform in default.backends[backend].platforms else AMD


# the cases of a backend are compiled for longer than they run, so parts of them are tests of their own; those of
# FLEX_ATTENTION took more than a minute in four parts
PARTS = dict.fromkeys(BACKENDS, 4) | {"FLEX_ATTENTION": 12}


@pytest.mark.parametrize(("backend", "part"), [(b, part) for b in BACKENDS for part in range(PARTS[b])])
def test_rows_claim_what_their_backends_do(default: Registry, here: Platform, backend: str, part: int) -> None:
    claims = Claims(backend, platform_for(backend, default, here), default, ON_GPU)
    cases = claims.cases("claims")[part :: PARTS[backend]]
    outcomes = {case.words: prove(case, claims.select(case.request), "cuda") for case in cases}
    assert {words: one.problem for words, one in outcomes.items() if one.problem} == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_rows_do_not_claim_is_refused(default: Registry, here: Platform, backend: str) -> None:
    claims = Claims(backend, platform_for(backend, default, here), default)
    assert claims.unproven == frozenset()
    assert [problem for _, problem in refusals(claims, "cuda") if problem] == []


@pytest.mark.parametrize("backend", ["FLEX_ATTENTION", "TRITON_ATTN"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_values_wider_than_keys(default: Registry, here: Platform, backend: str, dtype: str) -> None:
    # what compilers choose tiles by is the width of keys alone
    claims = Claims(backend, here, default)
    case = claims._case({**claims._base, "dtype": dtype, "head_size": 64, "head_size_v": 192})
    assert case is not None
    assert prove(case, claims.select(case.request), "cuda").problem is None


def test_verify_gathers_the_evidence(default: Registry, here: Platform) -> None:
    (evidence,) = verify(["TORCH_SDPA"], registry=default, platform=here, device="cuda", size="claims")
    assert evidence.proven


@pytest.fixture(params=[(b, f) for b in BACKENDS for f in ("plain", "featured")], ids="-".join)
def trial(request: Any, default: Registry, here: Platform) -> Trial:
    """A mixed batch in bfloat16, its cache filled: plain attention, or with every feature of the backend."""
    backend, kind = request.param
    claims = Claims(backend, platform_for(backend, default, here), default)
    settings: dict[str, Any] = {
        **claims._base,
        "dtype": "bfloat16",
        "kv_dtype": "fp8" if kind == "featured" else "auto",
    }
    served = default.backends[backend].variants[0].served & PROVABLE - {"lse"}
    for feature in sorted(served) if kind == "featured" else ():
        # some exclude each other
        if claims._case({**settings, feature: True}) is not None:
            settings[feature] = True
    case = claims._case(settings)
    assert case is not None
    made = prepare(case, claims.select(case.request), torch.device("cuda"), causal=True)
    made.layer.write_kv(made.key, made.value, made.cache, made.batch)
    return made


def test_a_replayed_graph_gives_what_the_call_gives(trial: Trial) -> None:
    if not getattr(trial.layer.module, "CAPTURABLE", False):
        pytest.skip("refuses to be captured: tests/support/layers/engine_conditions.py")
    expected, _ = attend(trial, trial.batch, trial.query)
    output = torch.empty_like(expected)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            trial.layer.attend(trial.query, trial.cache, trial.batch, output)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
        trial.layer.attend(trial.query, trial.cache, trial.batch, output)
    output.fill_(torch.nan)
    graph.replay()
    tokens = trial.batch.num_tokens
    gives(trial, output[:tokens], expected[:tokens])
    # other queries, in the memory that the graph knows
    trial.query[:tokens] = trial.query[:tokens].flip(0)
    graph.replay()
    again, _ = attend(trial, trial.batch, trial.query)
    gives(trial, output[:tokens], again[:tokens])


def gives(trial: Any, output: Tensor, expected: Tensor) -> None:
    """Asserts that a replay gave what a call gives: its bits, but where a graph's launches share keys out otherwise."""
    plan = trial.layer.plan(trial.batch)
    if not hasattr(getattr(plan, "attention", plan), "for_graphs"):
        assert torch.equal(output, expected)
        return
    # one step of the output's type
    step = 0.13 if output.itemsize == 1 else 0.016
    torch.testing.assert_close(output.float(), expected.float(), rtol=step, atol=2e-3)


def test_no_call_waits_for_the_device(trial: Trial) -> None:
    # once for what is compiled
    attend(trial, trial.batch, trial.query)
    output = torch.empty_like(attend(trial, trial.batch, trial.query)[0])
    trial.batch.plans.clear()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trial.layer.write_kv(trial.key, trial.value, trial.cache, trial.batch)
        trial.layer.attend(trial.query, trial.cache, trial.batch, output)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_is_on_another_device_is_refused(default: Registry, here: Platform) -> None:
    request = AttentionRequest(head_size=64, num_heads=2, num_kv_heads=2, dtype="float16")
    layer = Attention.from_selection(attnreg.select(request, here, default, "TORCH_SDPA"))
    q = torch.zeros(2, 2, 64, dtype=torch.float16)
    with pytest.raises(attnreg.BatchError, match="query is on cpu, the batch on cuda"):
        layer.forward(q, q, q, None, BatchMetadata.build([2], device="cuda"))
