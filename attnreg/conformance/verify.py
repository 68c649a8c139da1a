"""verify(): every claim of every backend that runs here, proven or refuted, and the evidence of it on record."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import attnreg
from attnreg.conformance.claims import Claims, Size
from attnreg.conformance.proof import Outcome, prove
from attnreg.conformance.refusals import refusals
from attnreg.conformance.trial import Case
from attnreg.errors import RequestError
from attnreg.loader import load_kernel
from attnreg.platforms import Platform

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnreg.registry import Registry

_FACETS = ("attn_type", "dtype", "kv_dtype", "block_size", "head_size", "head_size_v")


@dataclass
class Tally:
    """What the cases that hold one claimed value came to: how many, and the worst error of an output."""

    cases: int = 0
    error: float = 0.0
    share: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.cases += 1
        self.error, self.share = max(self.error, outcome.error), max(self.share, outcome.share)


@dataclass
class Evidence:
    """What is known of one backend on one device.

    platform: what it was selected for; its kernels may have run on another device than that has. claims: facet ->
    claimed value -> tally; features are a facet. problems: what was refuted, case by case. unproven: claimed features
    that no run on one device can prove; claimed values that this device could not try.
    """

    backend: str
    platform: Platform
    size: Size
    claims: dict[str, dict[str, Tally]] = field(default_factory=dict)
    cases: int = 0
    refused: int = 0
    problems: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        """Whether nothing was refuted and nothing left out."""
        return not self.problems and not self.unproven

    def add(self, case: Case, outcome: Outcome) -> None:
        self.cases += 1
        if outcome.problem:
            self.problems.append(f"{case.name}: {outcome.problem}")
        values = [(facet, getattr(case.request, facet)) for facet in _FACETS]
        for facet, value in [*values, *(("features", f) for f in sorted(case.request.features))]:
            if value is not None:
                self.claims.setdefault(facet, {}).setdefault(str(value), Tally()).add(outcome)

    def lines(self) -> Iterator[str]:
        """What was found, for a person: one line, and one more for each problem and each gap."""
        worst = max((t.share for tallies in self.claims.values() for t in tallies.values()), default=0.0)
        verdict = "proven" if self.proven else "REFUTED" if self.problems else "proven in part"
        counts = f"{self.cases} cases, {self.refused} refusals"
        yield f"{self.backend}: {verdict}; {counts}, worst error {worst:.0%} of its bound"
        yield from (f"  {problem}" for problem in self.problems)
        yield from (f"  not proven here: {word}" for word in self.unproven)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, with the versions that they were found with."""
        claims = {
            facet: {
                value: {"cases": t.cases, "error": float(f"{t.error:.3g}"), "share": float(f"{t.share:.3g}")}
                for value, t in sorted(tallies.items(), key=lambda item: (len(item[0]), item[0]))
            }
            for facet, tallies in sorted(self.claims.items())
        }
        return {
            "versions": {"attnreg": attnreg.__version__, "torch": torch.__version__, "triton": _version("triton")},
            "for": f"{self.platform.platform} {self.platform.arch}",
            "size": self.size,
            "cases": self.cases,
            "refused": self.refused,
            "unproven": self.unproven,
            "claims": claims,
        }


def verify(
    backends: Iterable[str] = (),
    *,
    registry: Registry | None = None,
    platform: Platform | None = None,
    device: torch.device | str | None = None,
    size: Size = "pairs",
    record: str | os.PathLike[str] | None = None,
    jobs: int = 1,
    report: Callable[[str, Case, Outcome], None] | None = None,
) -> list[Evidence]:
    """The evidence for backends' claims on a device; all that have a kernel module for its platform, if none is named.

    platform: what the backends are selected for; this machine's, if None. device: where they run; the platform's, if
    None. A GPU's backend on the device ``cpu`` is its logic alone; Triton's kernels need ``TRITON_INTERPRET=1`` there,
    and the interpreter has no bfloat16. size: see `Claims.cases`. record: a file, or a directory for ``<device>.json``;
    what was refuted is struck from it. jobs: processes that try cases side by side, for backends that compile long.
    report: called after every case.

    Raises `RequestError` for an unknown backend, and for one without a kernel module for the platform.
    """
    if registry is None:
        from attnreg.loader import default_registry

        registry = default_registry()
    platform = platform or Platform.detect(registry.vocabulary)
    device = torch.device(device or {"cuda": "cuda", "rocm": "cuda", "xpu": "xpu"}.get(platform.platform, "cpu"))
    # the contract is for ordinary attention: latents have none yet
    rows = [b for b in registry.backends.values() if b.module and "mha" in b.attention]
    runnable = [b.name for b in rows if platform.platform in b.platforms]
    names = list(backends) or runnable
    for name in names:
        if name not in runnable:
            raise RequestError(f"{name} cannot be verified here; with a kernel module there are: {', '.join(runnable)}")
    with _one_thread(device):
        found = [_found(Claims(name, platform, registry), device, size, jobs, report) for name in names]
    if record is not None:
        _record(Path(record), found, device)
    return found


def _found(
    claims: Claims,
    device: torch.device,
    size: Size,
    jobs: int,
    report: Callable[[str, Case, Outcome], None] | None,
) -> Evidence:
    """The evidence of one backend; of one whose module cannot be imported here, that."""
    evidence = Evidence(claims.backend, claims.platform, size)
    try:
        load_kernel(claims.registry, claims.backend)
    except ImportError as e:
        evidence.unproven = [f"anything: {e}"]
        return evidence
    evidence.unproven = sorted(claims.unproven)
    cases = claims.cases(size)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and "triton" in _requirements(claims)
    if interpreted:
        left_out = [c for c in cases if "bfloat16" in (c.request.dtype, c.request.kv_dtype)]
        cases = [c for c in cases if c not in left_out]
        evidence.unproven += ["bfloat16"] if left_out else []
    for case, outcome in _outcomes(claims, cases, device, jobs):
        evidence.add(case, outcome)
        if report is not None:
            report(claims.backend, case, outcome)
    for _, problem in refusals(claims, device):
        evidence.refused += 1
        if problem:
            evidence.problems.append(problem)
    return evidence


def _outcomes(claims: Claims, cases: list[Case], device: torch.device, jobs: int) -> Iterator[tuple[Case, Outcome]]:
    """Each case with what came of it, in order."""
    prove_one = partial(_prove, claims, device)
    if jobs == 1:
        yield from zip(cases, map(prove_one, cases), strict=True)
        return
    # spawned: a process that was forked cannot use the GPU
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from zip(cases, pool.map(prove_one, cases), strict=True)


def _prove(claims: Claims, device: torch.device, case: Case) -> Outcome:
    try:
        # in a process of its own too
        with _one_thread(device):
            return prove(case, claims.select(case.request), device)
    # whatever a kernel raises refutes the claim, and is said
    except Exception as e:
        return Outcome(0.0, 0.0, f"{type(e).__name__}: {e}")


def _requirements(claims: Claims) -> set[str]:
    variants = claims.registry.backends[claims.backend].variants
    clauses = [c for v in variants for c in v.requires.clauses if c.facet == "packages"]
    return {requirement.package for c in clauses for requirement in c.matcher.mentions}


def _record(place: Path, found: list[Evidence], device: torch.device) -> None:
    title = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    file = place / f"{re.sub('[^a-z0-9]+', '_', title.lower())}.json" if place.is_dir() else place
    backends: dict[str, Any] = json.loads(file.read_text())["backends"] if file.exists() else {}
    for evidence in found:
        backends.pop(evidence.backend, None)
        if not evidence.problems:
            backends[evidence.backend] = evidence.to_dict()
    # PyTorch for ROCm calls its devices cuda too
    machine = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    data = {"device": title, "platform": machine}
    text = json.dumps({**data, "backends": dict(sorted(backends.items()))}, indent=2)
    # a line for each claimed value: what a change of evidence is read by
    file.write_text(re.sub(r"\{[^{}]*\}", lambda m: " ".join(m[0].split()), text) + "\n")


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """The tensors of a case are too small to share: on a processor threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if device.type == "cpu" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
