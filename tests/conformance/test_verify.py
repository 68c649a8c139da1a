"""The claims of every row that runs here hold, and what cannot be verified is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from support.layers.altered import altered, burst
from support.registries.plugins import CPU, UNFIT, Install, install
from support.suite.examples import FULL

import attnreg
from attnreg import Platform, Registry, RequestError, loader
from attnreg.compile.inputs.bundled import registry_root
from attnreg.conformance.evidence import Evidence
from attnreg.conformance.verify import verify
from attnreg.kernels import cpu_attn
from attnreg.kernels.interpreter.interpret import interpret
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, DeviceError

__all__ = ["install"]

HOPPER = Platform(platform="cuda", arch="sm90")


# with the claims that take several ranks
@pytest.mark.parametrize(
    ("backend", "unproven"),
    [
        ("CPU_ATTN", []), ("TORCH_SDPA", []), ("TORCH_MLA", ["dcp"]), ("TORCH_MLA_SPARSE", []),
        ("TORCH_PREFILL", []),
    ],
)  # fmt: skip
def test_what_runs_on_a_processor_does_what_its_row_claims(
    default: Registry, cpu: Platform, backend: str, unproven: list[str]
) -> None:
    (evidence,) = verify([backend], registry=default, platform=cpu, size="pairs" if FULL else "claims")
    assert (evidence.problems, evidence.undecided) == ([], [])
    assert evidence.unproven == unproven
    assert all("dcp; ranks of a group share the cache" in line for line in [*evidence.lines()][1:])
    # of TORCH_SDPA the one for processors
    row = default.backends[backend].variants[-1]
    for facet, key in (("dtype", "dtypes"), ("kv_dtype", "kv_dtypes"), ("attn_type", "attn_types")):
        (claim,) = (c for c in row.claims if c.key == key)
        words = {w for w in default.vocabulary.words[key] if claim.matcher.matches(w)}
        assert evidence.claims[facet].keys() == words or facet in unproven
    assert evidence.claims["features"].keys() == row.served - {*unproven}


def test_the_logic_of_flex_attention(default: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    # on a processor it runs without Triton, so nothing of it is interpreted
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (evidence,) = verify(["FLEX_ATTENTION"], registry=default, platform=HOPPER, device="cpu", size="claims")
    assert (evidence.problems, evidence.undecided, evidence.unproven) == ([], [], [])


def test_what_a_kernel_raises_refutes_the_claim(
    default: Registry, cpu: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "load_kernel", lambda registry, backend: altered(after=burst))
    (evidence,) = verify(["CPU_ATTN"], registry=default, platform=cpu, size="claims")
    assert len(evidence.problems) == evidence.cases
    assert evidence.problems[0].endswith("RuntimeError: out of shared memory")


@triton.jit
def _bad_kernel(target_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    tl.store(target_ptr + tl.arange(0, N), tl.arange(0, N) + tl.arange(0, 2 * N))


def _interpret(*_: Any) -> None:
    interpret(_bad_kernel, (1, 1, 1), (torch.zeros(8),), (8,))


def _raised_by_triton(error: Exception, function: str) -> Callable[..., None]:
    """A function that raises an error where Triton's module of compilers would, in a function of this name."""
    space: dict[str, Any] = {"__name__": "triton.compiler.compiler", "error": error}
    exec(f"def {function}(*_):\n    raise error", space)
    return space[function]  # type: ignore[no-any-return]


class CompileTimeAssertionFailure(Exception):  # noqa: N818
    """As Triton names the error of a kernel's ``tl.static_assert``."""


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (_interpret, "InterpreterError: ValueError("),
        (
            _raised_by_triton(RuntimeError("PassManager::run failed"), "compile"),
            "RuntimeError: PassManager::run failed",
        ),
    ],
)
def test_what_a_compiler_or_an_interpreter_raises_decides_nothing(
    default: Registry, cpu: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Any, words: str
) -> None:
    file = tmp_path / "cpu.json"
    file.write_bytes((registry_root() / "evidence/cpu.json").read_bytes())
    before = json.loads(file.read_text())["backends"]
    monkeypatch.setattr(loader, "load_kernel", lambda registry, backend: altered(after=fails))
    (evidence,) = verify(["CPU_ATTN"], registry=default, platform=cpu, size="claims", record=file)
    assert (evidence.problems, evidence.cases, evidence.claims, evidence.proven) == ([], 0, {}, False)
    assert all(f": {words}" in case for case in evidence.undecided)
    lines = [*evidence.lines()]
    assert lines[0].startswith(f"CPU_ATTN: NOT DECIDED; 0 cases, {evidence.refused} refusals, ")
    assert lines[1] == f"  not decided: {evidence.undecided[0]}"
    # what was proven before stays on record
    assert json.loads(file.read_text())["backends"] == before


@pytest.mark.parametrize(
    "fails",
    [
        # more than the GPU has, of which is known once a kernel is compiled
        _raised_by_triton(RuntimeError("out of resource: shared memory"), "_init_handles"),
        _raised_by_triton(CompileTimeAssertionFailure("the head is too wide"), "compile"),
    ],
)
def test_what_a_kernel_asks_for_or_asserts_refutes_the_claim(
    default: Registry, cpu: Platform, monkeypatch: pytest.MonkeyPatch, fails: Any
) -> None:
    monkeypatch.setattr(loader, "load_kernel", lambda registry, backend: altered(after=fails))
    (evidence,) = verify(["CPU_ATTN"], registry=default, platform=cpu, size="claims")
    assert (len(evidence.problems), evidence.undecided) == (evidence.cases, [])


BAD_KERNELS = {
    "no shape": (
        "from attnreg.kernels.cpu_attn import forward, plan, write_kv\nkv_cache_shape = print\n",
        "AttributeError",
    ),
    "an old signature": (
        "from attnreg.kernels.cpu_attn import kv_cache_shape, plan, write_kv\ndef forward(spec, plan, q, out): ...\n",
        "TypeError: forward() missing 1 required positional argument: 'out'",
    ),
    "an exit": (
        "import sys\nfrom attnreg.kernels.cpu_attn import kv_cache_shape, plan, write_kv\nforward = sys.exit\n",
        "TypeError: exit expected at most 1 argument, got 3",
    ),
    "an end": (
        "from attnreg.kernels.cpu_attn import forward, kv_cache_shape, write_kv\ndef plan(*_): raise SystemExit(3)\n",
        "SystemExit: 3",
    ),
}


@pytest.mark.parametrize(("text", "problem"), BAD_KERNELS.values(), ids=BAD_KERNELS)
def test_a_module_that_does_not_keep_the_contract_is_refuted(
    text: str, problem: str, install: Install, cpu: Platform
) -> None:
    claims = {"dtypes": ["float32"], "kv_dtypes": ["auto"], "head_sizes": [64], "attn_types": ["decoder"]}
    claims |= {"block_sizes": [16], "num_heads": [4], "num_kv_heads": [2]}  # type: ignore[dict-item]
    install(files=CPU | {"acme_attn/kernels.py": text})
    registry = attnreg.load_registry("default", {"backends": {"ACME_ATTN": {"capabilities": claims}}})
    (evidence,) = verify(["ACME_ATTN"], registry=registry, platform=cpu, size="claims")
    assert evidence.cases
    assert any(problem in line for line in evidence.problems)
    assert next(evidence.lines()).startswith("ACME_ATTN: REFUTED; ")


# what cannot be verified ---------------------------------------------------------------------------------------------

XPU = Platform(platform="xpu", arch="xe2")
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "FLASHINFER_MLA_SPARSE",
        {},
        (
            "FLASHINFER_MLA_SPARSE cannot be verified: the row is knowledge only, attnreg has no kernel module for it; "
            "these can: CPU_ATTN, TORCH_MLA, TORCH_MLA_SPARSE, TORCH_PREFILL, TORCH_SDPA"
        ),
    ),
    ("TRITON_ATN", {}, "unknown backend 'TRITON_ATN'; did you mean `TRITON_ATTN`?"),
    (
        "TRITON_ATTN",
        {},
        (
            "TRITON_ATTN cannot be verified: it runs on cuda, rocm, not on cpu; name a platform with --arch; "
            "these can: CPU_ATTN, TORCH_MLA, TORCH_MLA_SPARSE, TORCH_PREFILL, TORCH_SDPA"
        ),
    ),
    ("CPU_ATTN", {"device": "nonsense"}, "PyTorch cannot use the device 'nonsense' here: Expected one of cpu, cuda, "),
    ("CPU_ATTN", {"device": "meta"}, "PyTorch cannot use the device 'meta' here: "),
    ("CPU_ATTN", {"device": "cpu:x"}, "PyTorch cannot use the device 'cpu:x' here: "),
    ("CPU_ATTN", {"device": "hpu"}, "PyTorch cannot use the device 'hpu' here: "),
    ("CPU_ATTN", {"device": "cuda:97"}, "PyTorch cannot use the device 'cuda:97' here: "),
]


@pytest.mark.parametrize(("backend", "arguments", "message"), REFUSED)
def test_what_cannot_be_verified_says_why(
    backend: str, arguments: dict[str, Any], message: str, default: Registry, cpu: Platform
) -> None:
    with pytest.raises(RequestError) as e:
        verify([backend], registry=default, **{"platform": cpu, **arguments})
    assert str(e.value).startswith(message)
    if "device" in arguments:
        assert str(e.value).endswith("; name another with --device; on cpu the logic of a GPU's backend is verified")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"size": "all"}, "unknown size 'all'"), ({"jobs": 0}, "jobs is 0; expected an integer of at least 1, or None")],
)
def test_other_sizes_and_numbers_of_jobs_are_refused(arguments: Any, message: str, cpu: Platform) -> None:
    with pytest.raises(RequestError, match=message):
        verify(["CPU_ATTN"], platform=cpu, **arguments)


def test_rows_of_engines_cannot_be_verified(cpu: Platform) -> None:
    registry = attnreg.load_registry("vllm-0.33.0")
    with pytest.raises(RequestError, match=r"^CPU_ATTN cannot be verified: vllm-0.33.0@.* describes another engine, "):
        verify(["CPU_ATTN"], registry=registry, platform=cpu)
    with pytest.raises(RequestError, match=r"^nothing can be verified: no row of vllm-0.33.0@\w+ for cpu has a mod"):
        verify(registry=registry, platform=cpu)


def line_of(evidence: Evidence) -> str:
    """The only line of evidence of which nothing was run."""
    (line,) = evidence.lines()
    assert (evidence.cases, evidence.proven, len(evidence.problems)) == (0, False, 1)
    return line


@pytest.mark.parametrize(("text", "reason"), UNFIT.values(), ids=UNFIT)
def test_a_module_that_cannot_be_run_fails(text: str | None, reason: str, install: Install, cpu: Platform) -> None:
    files = {name: body for name, body in CPU.items() if name != "acme_attn/kernels.py"}
    install(files=files | ({} if text is None else {"acme_attn/kernels.py": text}))
    (evidence,) = verify(["ACME_ATTN"], registry=attnreg.load_registry("default"), platform=cpu)
    assert line_of(evidence) == f"ACME_ATTN: NOT VERIFIED; cannot be run: {reason}"


def test_kernels_for_another_device_refute_nothing(default: Registry) -> None:
    (evidence,) = verify(["HOPPER_ATTN"], registry=default, platform=HOPPER, device="cpu", size="claims")
    assert line_of(evidence) == (
        "HOPPER_ATTN: NOT VERIFIED; cannot be run: the device is cpu; these kernels are compiled for NVIDIA GPUs of "
        "compute capability 9.0 alone"
    )


def test_variants_whose_kernels_are_for_another_device_are_unproven(
    monkeypatch: pytest.MonkeyPatch, default: Registry, cpu: Platform
) -> None:
    plan = cpu_attn.plan

    def some(spec: AttentionSpec, batch: BatchMetadata) -> Any:
        if spec.sliding_window:
            raise DeviceError("for another device")
        return plan(spec, batch)

    monkeypatch.setattr(cpu_attn, "plan", some)
    (evidence,) = verify(["CPU_ATTN"], registry=default, platform=cpu, size="claims")
    assert evidence.cases
    assert (evidence.problems, evidence.undecided) == ([], [])
    assert "  not proven here: variants; the kernels of some are for another device" in evidence.lines()


def test_a_row_that_accepts_nothing_fails(cpu: Platform) -> None:
    overlay = {"backends": {"CPU_ATTN": {"requires": {"packages": ["vllm>=1"]}}}}
    registry = attnreg.load_registry("default", overlay)
    here = Platform(platform="cpu", arch="x86_64", packages=[("torch", "2.13.0")])
    (evidence,) = verify(["CPU_ATTN"], registry=registry, platform=here)
    assert line_of(evidence) == (
        "CPU_ATTN: NOT VERIFIED; it accepts no plain request on cpu x86_64: package vllm is not installed; needs >=1"
    )


def test_a_row_without_a_case_fails(monkeypatch: pytest.MonkeyPatch, default: Registry) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    overlay = {"backends": {"FLEX_ATTENTION": {"capabilities": {"dtypes": ["bfloat16"]}}}}
    overlay["backends"]["FLEX_ATTENTION"]["requires"] = {"packages": ["triton"]}  # type: ignore[assignment]
    registry = attnreg.load_registry("default", overlay)
    (evidence,) = verify(["FLEX_ATTENTION"], registry=registry, platform=HOPPER, device="cpu", size="claims")
    assert line_of(evidence) == (
        "FLEX_ATTENTION: NOT VERIFIED; all that it claims is bfloat16, which Triton's interpreter does not have"
    )
