"""verify(): runs the cases of backends' claims on this machine, and returns the evidence."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attnreg.conformance.claims import Claims, Size
from attnreg.conformance.evidence import Evidence, save
from attnreg.conformance.proof import Outcome, prove
from attnreg.conformance.refusals import refusals
from attnreg.conformance.trial import Case
from attnreg.errors import RequestError
from attnreg.loader import default_registry, load_kernel
from attnreg.platforms import Platform

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnreg.registry import Registry


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
    """The evidence for the claims of backends on a device.

    backends: names; if empty, all with a kernel module for the platform. platform: the one that backends are selected
    for; this machine's, if None. device: the one that runs the kernels; the platform's, if None. On the device ``cpu``
    only the logic of a GPU's backend is verified; Triton's kernels need ``TRITON_INTERPRET=1`` there, and the
    interpreter has no bfloat16. size: see `Claims.cases`. record: a file, or a directory for ``<device>.json``; a
    refuted backend is removed from it. jobs: the number of processes, for backends that compile long. report: called
    after every case.

    Raises `RequestError` for an unknown backend, and for one without a kernel module for the platform.
    """
    registry = registry or default_registry()
    platform = platform or Platform.detect(registry.vocabulary)
    device = torch.device(device or {"cuda": "cuda", "rocm": "cuda", "xpu": "xpu"}.get(platform.platform, "cpu"))
    # the contract covers mha only
    rows = [b for b in registry.backends.values() if b.module and "mha" in b.attention]
    runnable = [b.name for b in rows if platform.platform in b.platforms]
    names = list(backends) or runnable
    for name in names:
        if name not in runnable:
            raise RequestError(f"{name} cannot be verified here; with a kernel module there are: {', '.join(runnable)}")
    with _one_thread(device):
        evidence = [_verify(Claims(name, platform, registry), device, size, jobs, report) for name in names]
    if record is not None:
        save(evidence, Path(record), device)
    return evidence


def _verify(
    claims: Claims,
    device: torch.device,
    size: Size,
    jobs: int,
    report: Callable[[str, Case, Outcome], None] | None,
) -> Evidence:
    """The evidence of one backend. If its module cannot be imported, the error is the evidence's only entry."""
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
        skipped = [c for c in cases if "bfloat16" in (c.request.dtype, c.request.kv_dtype)]
        cases = [c for c in cases if c not in skipped]
        evidence.unproven += ["bfloat16"] if skipped else []
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
    """Each case with its outcome, in order."""
    prove_one = partial(_prove, claims, device)
    if jobs == 1:
        yield from zip(cases, map(prove_one, cases), strict=True)
        return
    # spawned, because a forked process cannot use the GPU
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from zip(cases, pool.map(prove_one, cases), strict=True)


def _prove(claims: Claims, device: torch.device, case: Case) -> Outcome:
    try:
        # this may be a process of the pool, which has a thread count of its own
        with _one_thread(device):
            return prove(case, claims.select(case.request), device)
    # an exception of a kernel refutes the claim, and becomes the problem
    except Exception as e:
        return Outcome(0.0, 0.0, f"{type(e).__name__}: {e}")


def _requirements(claims: Claims) -> set[str]:
    variants = claims.registry.backends[claims.backend].variants
    clauses = [c for v in variants for c in v.requires.clauses if c.facet == "packages"]
    return {requirement.package for c in clauses for requirement in c.matcher.mentions}


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Sets one thread on a processor: a case's tensors are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if device.type == "cpu" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
