"""verify(): runs the cases of backends' claims on this machine, and returns the evidence."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

import torch

from attnreg import loader
from attnreg.conformance.claims import Claims, Size, form_of
from attnreg.conformance.devices import torch_name, usable
from attnreg.conformance.evidence import Evidence, read_record, record_file, save
from attnreg.conformance.proof import CaseOutcome, prove
from attnreg.conformance.refusals import refusals
from attnreg.conformance.shrink import explains, shrunk
from attnreg.conformance.tools import is_of_a_tool
from attnreg.conformance.trial import LENGTHS, ON_GPU, Case
from attnreg.conformance.workers import Ended, Workers
from attnreg.errors import RequestError, did_you_mean, in_words
from attnreg.files import held, require_directory
from attnreg.loader import default_registry
from attnreg.machine.detect import detect
from attnreg.machine.probe import probe
from attnreg.machine.worker import WorkerError
from attnreg.packages.kernel_code import kernel_digest
from attnreg.platforms import Platform
from attnreg.runtime.interface import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnreg.registry import Registry

# each crash costs the start of a new process, which imports torch
_MOST_CRASHES = 5
# the most refuted cases that are shrunk; a case with the features of a shrunk one is not
_MOST_SHRUNK = 3


def verify(
    backends: Iterable[str] = (),
    *,
    registry: Registry | None = None,
    platform: Platform | None = None,
    device: torch.device | str | None = None,
    size: Size = "pairs",
    record: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    report: Callable[[str, Case, CaseOutcome], None] | None = None,
    progress: Callable[[int, str, int], None] | None = None,
) -> list[Evidence]:
    """The evidence for the claims of backends on a device.

    - backends: names; by default all backends with a kernel module for the platform.
    - platform: the platform for which backends are selected; by default this machine's.
    - device: the device that runs the kernels; by default the platform's. The device ``cpu`` verifies only the logic of
      a GPU's backend. Triton's kernels need ``TRITON_INTERPRET=1`` there, and the interpreter has no bfloat16.
    - size: ``claims`` runs each value of each facet and each pair of features, ``pairs`` each pair of values.
    - record: a file, or a directory for ``<device>.json``; a refuted backend is removed from it.
    - jobs: the number of processes that run cases. A case that ends its process, such as a segmentation fault, is then
      refuted. The processes import no main module, so a script needs no guard for them. None: the cases run in this
      process.
    - report: called after every decided case.
    - progress: called after every case with the number of cases that a backend has done, its name, and their total.

    A case that a compiler or Triton's interpreter fails to run is not refuted; it is ``undecided`` in the evidence.

    Raises `RequestError` for an unknown backend, and for one that cannot be verified, with the reason. Raises it also
    for a device that PyTorch cannot use, for an unknown size, for a wrong number of jobs, and if no process starts.
    Raises `attnreg.files.FileError` for a record that cannot be written, or that another run holds.
    """
    require_directory()
    if size not in get_args(Size):
        raise RequestError(f"unknown size {size!r}", f"sizes: {', '.join(get_args(Size))}")
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise RequestError(f"jobs is {jobs!r}; expected an integer of at least 1, or None")
    registry = registry or default_registry()
    platform = platform or detect(registry.vocabulary)
    verifiable = [name for name in registry.backends if _unverifiable(name, platform, registry) is None]
    names = list(dict.fromkeys(backends)) or verifiable
    for name in names:
        if registry.row(name) is None:
            titles = [f"{row.name}/{v}" for row in registry.backends.values() for v in row.variant_names]
            raise RequestError(
                f"unknown backend {name!r}", did_you_mean(name, [*registry.backends, *titles], 3) + registry.missed
            )
        if (reason := _unverifiable(name, platform, registry)) is not None:
            help_ = f"these can: {', '.join(verifiable)}" if verifiable else "no backend of this platform can"
            raise RequestError(f"{name} cannot be verified: {reason}", help_)
    if not names:
        raise RequestError(f"nothing can be verified: no row of {registry.title} for {platform.platform} has a module")
    device = _device(device, platform)
    lengths = LENGTHS if device.type == "cpu" else ON_GPU
    with _held(record, device):
        evidence = _every(names, registry, platform, device, lengths, size, jobs, _Hooks(report, progress))
        if record is not None:
            save(evidence, Path(record), device)
    return evidence


@contextmanager
def _held(record: str | os.PathLike[str] | None, device: torch.device) -> Iterator[None]:
    """Locks the file of records. An unwritable file is refused before anything runs."""
    if record is None:
        yield
        return
    # reading first gives a better message for a missing directory
    read_record(Path(record), device)
    with held(record_file(Path(record), device)):
        yield


def _every(
    names: list[str],
    registry: Registry,
    platform: Platform,
    device: torch.device,
    lengths: tuple[str, ...],
    size: Size,
    jobs: int | None,
    hooks: _Hooks,
) -> list[Evidence]:
    """The evidence of several verifiable backends."""
    rows = {name: registry.row(name) for name in names}
    modules = {name: row.modules if row else () for name, row in rows.items()}
    unfit = probe([module for several in modules.values() for module in several if module not in sys.modules])
    with _one_thread(device):
        return [
            _failure(Evidence(name, platform, size), f"cannot be run: {unfit[modules[name][0]]}")
            if all(unfit.get(module) for module in modules[name])
            else _verify(Claims(name, platform, registry, lengths), device, size, jobs, hooks)
            for name in names
        ]


def _unverifiable(name: str, platform: Platform, registry: Registry) -> str | None:
    """The reason why the claims of a backend cannot be verified on a platform; None if they can."""
    row = registry.row(name)
    assert row is not None, name
    if not registry.imports:
        return f"{registry.title} describes another engine, whose modules are not imported"
    if not row.modules:
        return "the row is knowledge only, attnreg has no kernel module for it"
    if form_of(row) is None:
        return f"its attention is {', '.join(sorted(row.attention))}, and no cases are made of that form yet"
    if platform.platform not in row.platforms:
        return f"it runs on {', '.join(sorted(row.platforms))}, not on {platform.platform}; name a platform with --arch"
    return None


def _device(device: torch.device | str | None, platform: Platform) -> torch.device:
    """The device to run on. Raises `RequestError` for a device that PyTorch does not know or cannot use here."""
    help_ = "name another with --device; on cpu the logic of a GPU's backend is verified"
    return usable(str(device or torch_name(platform)), help_)


def _failure(evidence: Evidence, reason: str) -> Evidence:
    """The evidence of a backend without a single run."""
    evidence.problems = [reason]
    return evidence


def _verify(
    claims: Claims,
    device: torch.device,
    size: Size,
    jobs: int | None,
    hooks: _Hooks,
) -> Evidence:
    """The evidence of one backend. If no case can run, the reason is the only problem."""
    evidence = Evidence(claims.backend, claims.platform, size)
    try:
        selected = claims.select(claims.plain.request).backend
        assert selected is not None
        loader.load_kernel(claims.registry, selected.title)
        evidence.kernel = kernel_digest(claims.registry, claims.backend)
    # the row accepts no request here
    except LookupError as e:
        return _failure(evidence, str(e))
    # the import of a module may raise anything
    except Exception as e:
        return _failure(evidence, f"cannot be run: {in_words(e)}")
    try:
        cases = claims.cases(size)
    except LookupError as e:
        return _failure(evidence, str(e))
    evidence.unproven = sorted(claims.unproven)
    needs = _requirements(claims) - {"torch", "triton"}
    evidence.packages = {name: version for name, version in claims.platform.packages or () if name in needs}
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and "triton" in _requirements(claims)
    if interpreted:
        skipped = [c for c in cases if "bfloat16" in (c.request.dtype, c.request.kv_dtype)]
        cases = [c for c in cases if c not in skipped]
        evidence.unproven += ["bfloat16"] if skipped else []
        if not cases:
            return _failure(evidence, "all that it claims is bfloat16, which Triton's interpreter does not have")
    workers = Workers(jobs, claims, device)
    try:
        with workers:
            return _ran(evidence, workers, claims, cases, hooks)
    except WorkerError as e:
        message = f"no process that runs the cases of {claims.backend} stays alive: {e}"
        help_ = "see what it printed; attnreg.verify(jobs=None) runs them in this process"
        raise RequestError(message, help_) from None
    finally:
        evidence.ended = workers.ended


def _ran(
    evidence: Evidence,
    workers: Workers,
    claims: Claims,
    cases: list[Case],
    hooks: _Hooks,
) -> Evidence:
    """The evidence, with the outcomes of the cases."""
    crashes, elsewhere, refuted = 0, list[DeviceError](), list[Case]()
    for number, (case, outcome) in enumerate(workers.map(_prove, cases), 1):
        if hooks.progress is not None:
            hooks.progress(number, evidence.backend, len(cases))
        if isinstance(outcome, DeviceError):
            elsewhere.append(outcome)
            continue
        if isinstance(outcome, _Undecided):
            evidence.undecided.append(f"{case.words}: {outcome.reason}")
            continue
        crashes += isinstance(outcome, Ended)
        found = CaseOutcome(0.0, 0.0, outcome.how) if isinstance(outcome, Ended) else outcome
        evidence.add(case, found)
        refuted += [case] if found.problem else []
        if hooks.report is not None:
            hooks.report(evidence.backend, case, found)
        if crashes == _MOST_CRASHES:
            evidence.problems.append(f"{crashes} cases ended their process: those after them were not run")
            return evidence
    evidence.smallest = list(_smallest(refuted, claims, workers))
    if elsewhere and not evidence.cases and not evidence.undecided:
        return _failure(evidence, f"cannot be run: {elsewhere[0]}")
    evidence.unproven += ["variants"] if elsewhere else []
    for _, refused in workers.map(_refuse, [None]):
        tried = _Refused(0, [_untried(refused.how)], []) if isinstance(refused, Ended) else refused
        evidence.refused = tried.tried
        evidence.problems += tried.problems
        evidence.undecided += tried.undecided
    return evidence


def _smallest(refuted: list[Case], claims: Claims, workers: Workers) -> Iterator[str]:
    """The smallest cases that fail as refuted ones do, each with its problem."""
    problems: dict[Case, str] = {}
    crashes = 0

    def fails(case: Case) -> bool:
        nonlocal crashes
        if crashes == _MOST_CRASHES:
            return False
        ((_, outcome),) = workers.map(_prove, [case])
        crashes += isinstance(outcome, Ended)
        problem = outcome.how if isinstance(outcome, Ended) else getattr(outcome, "problem", None)
        if problem is not None:
            problems[case] = problem
        return problem is not None

    found: list[Case] = []
    for case in refuted:
        if len(found) < _MOST_SHRUNK and not any(explains(smallest, case) for smallest in found):
            found.append(shrunk(case, claims, fails))
    # a case that cannot be shrunk has its problem in the evidence already
    yield from (f"{case.words}: {problems[case]}" for case in found if case in problems)


class _Hooks(NamedTuple):
    """The functions that a caller of `verify` wants called."""

    report: Callable[[str, Case, CaseOutcome], None] | None
    progress: Callable[[int, str, int], None] | None


class _Undecided(NamedTuple):
    """The reason for an undecided case: the error of a compiler or an interpreter."""

    reason: str


def _prove(claims: Claims, device: torch.device, case: Case) -> CaseOutcome | _Undecided | DeviceError:
    """The outcome of a case; `DeviceError` of kernels for another device neither proves nor refutes a claim."""
    try:
        # a process of the pool has its own number of threads
        with _one_thread(device):
            return prove(case, claims.select(case.request), device)
    except DeviceError as e:
        return e
    # an exception of a kernel refutes the claim, and becomes the problem
    except (Exception, SystemExit) as e:
        return _Undecided(in_words(e)) if is_of_a_tool(e) else CaseOutcome(0.0, 0.0, in_words(e))


class _Refused(NamedTuple):
    """The number of unclaimed requests that were tried, and the problems of those that were not refused properly.

    undecided: why the other unclaimed requests were not tried.
    """

    tried: int
    problems: list[str]
    undecided: list[str]


def _refuse(claims: Claims, device: torch.device, nothing: None) -> _Refused:
    """The outcome of unclaimed requests."""
    count, problems, undecided = 0, list[str](), list[str]()
    try:
        for _, problem in refusals(claims, device):
            count += 1
            problems += [problem] if problem else []
    # the plain layer is among the cases, too, so its exception is reported there
    except (Exception, SystemExit) as e:
        (undecided if is_of_a_tool(e) else problems).append(_untried(in_words(e)))
    return _Refused(count, problems, undecided)


def _untried(reason: str) -> str:
    return f"what is not claimed could not be tried: {reason}"


def _requirements(claims: Claims) -> set[str]:
    variants = claims.row.variants
    clauses = [c for v in variants for c in v.requires.walk() if c.facet == "packages"]
    return {requirement.package for c in clauses for requirement in c.matcher.mentions}


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Uses one thread on a processor: a case's tensors are so small that threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if device.type == "cpu" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
