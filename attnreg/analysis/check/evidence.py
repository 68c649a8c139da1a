"""Findings about the evidence of orders: samples that are missing, stale, or contradict the order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attnreg.analysis.check.finding import Finding
from attnreg.analysis.timings.machines import impossible
from attnreg.analysis.timings.ranking import compared, rankable
from attnreg.analysis.timings.samples import Samples, SamplesError, is_own, kernel_hash, read_samples
from attnreg.compile.inputs.bundled import registry_root
from attnreg.compile.inputs.measured import folder_of
from attnreg.contract import OWN_PACKAGE
from attnreg.errors import RequestError, shown
from attnreg.files import ALLOW, outside
from attnreg.language.measured import LEAST
from attnreg.platforms import Platform
from attnreg.selection.point import point_of
from attnreg.version import __version__

if TYPE_CHECKING:
    from attnreg.language.measured import Measured
    from attnreg.registry import Order, Registry
    from attnreg.request import AttentionRequest

_AGAIN = "measure again with `attnreg tune`"


def evidence(registry: Registry, here: Platform | None, allow_outside: bool = False) -> Iterator[Finding]:
    """The findings about every order with a measurement. here: this machine, or None for no comparison with it.

    allow_outside: samples may be outside the directory of the file that names them.
    """
    # several orders may share one file of samples
    read = functools.cache(read_samples)
    for order in (order for orders in registry.orders.values() for order in orders):
        if order.measured is not None:
            file = order.measured.file
            if not allow_outside and (why := outside(file, folder_of(order.where.file, file))):
                message = f"{shown(file)}, the evidence of {order.title}, {why}"
                yield Finding("missing-evidence", (order.title,), order.measured.where, message, f"move it; or {ALLOW}")
                continue
            yield from contradictions(registry, order, order.measured, read, here)


def _stale(
    registry: Registry, order: Order, measured: Measured, samples: Samples, here: Platform | None
) -> Iterator[Finding]:
    def stale(changed: str, why: str) -> Finding:
        message = f"the evidence of {order.title} is stale: {why}"
        return Finding("stale-evidence", (order.title, changed), measured.where, message, _AGAIN)

    ranked = {measured.of, measured.over, *(entry.backend for entry in order.entries)}
    for name, then in samples.rows.items():
        if name in ranked and kernel_hash(registry, name) != then:
            yield stale(name, f"{name} has another kernel module, or other options, than on {samples.date}")
    # what was measured elsewhere is evidence for that machine, as is all that attnreg brings along
    brought = _path(order, measured.file).resolve().is_relative_to(registry_root().resolve())
    if here is None or brought or order.platform != here.platform or not _is_about(order, here):
        return
    device = samples.machine["device"]
    if registry.vocabulary.device(device) != here.device:
        yield stale("device", f"it was measured on {device}, and this is {here.device or 'another device'}")
    installed = {**dict(here.packages or ()), OWN_PACKAGE: __version__}
    own = any(is_own(registry, name) for name in ranked)
    for package, version in samples.machine["packages"].items():
        # the version of attnreg counts where a kernel of its own was timed
        if not (own if package == OWN_PACKAGE else package in registry.vocabulary.packages):
            continue
        now = installed.get(package)
        if now != version:
            yield stale(package, f"{package} was {version}, and here it is {now or 'not installed'}")


def _is_about(order: Order, here: Platform) -> bool:
    """Whether an order may decide on a machine."""
    known = {"platform": here.platform, "arch": here.arch, "device": here.device}
    return order.when.decided(known) is not False


def contradictions(
    registry: Registry,
    order: Order,
    measured: Measured,
    read: Callable[[Path, str], Samples] = read_samples,
    here: Platform | None = None,
) -> Iterator[Finding]:
    """What the samples of a measurement, which ``read`` reads, say against an order. here: as of `evidence`."""

    def missing(message: str, help_: str = _AGAIN) -> Finding:
        return Finding("missing-evidence", (order.title,), measured.where, message, help_)

    try:
        samples = read(_path(order, measured.file), measured.file)
    except SamplesError as e:
        problem = e.problems[0]
        yield missing(f"{measured.file}, the evidence of {order.title}: {problem.message}", problem.help or _AGAIN)
        return
    if why := impossible(samples, registry.vocabulary):
        yield missing(f"{measured.file}, the evidence of {order.title}: {why}")
        return
    yield from _stale(registry, order, measured, samples, here)
    try:
        cells = _cells(registry, order, samples)
    except RequestError as e:
        yield missing(f"the samples of {order.title} are of no request that the registry knows: {e.message}")
        return
    if not any(rankable(samples, [cell], [e.backend for e in order.entries]) for cell in cells):
        yield missing(f"no sample in {measured.file} is of a request that {order.title} takes")
    yield from _misstated(order, measured, samples, cells)
    yield from _misranked(order, samples, cells)
    yield from _wrong(order, samples, cells)


def _misstated(order: Order, measured: Measured, samples: Samples, cells: list[int]) -> Iterator[Finding]:
    """A finding if the samples show another ratio, or if they lack one of the two backends."""
    names = [measured.of, measured.over]
    both = [cell for cell in cells if len(rankable(samples, [cell], names)) == 2]
    if not both:
        says = f"in no sample of a request that it takes were {measured.of} and {measured.over} timed side by side"
    else:
        found = compared(samples, both, *names).ratio
        if abs(found / measured.ratio - 1) < LEAST:
            return
        says = (
            f"its samples show {measured.of} to be {found:.2f}x as fast as {measured.over}, not {measured.ratio:.2f}x"
        )
    message = f"{order.title} says what was not measured: {says}"
    subject, help_ = (order.title, measured.of, measured.over), "state what its samples show, or " + _AGAIN
    yield Finding("misstated-measurement", subject, measured.where, message, help_)


def _misranked(order: Order, samples: Samples, cells: list[int]) -> Iterator[Finding]:
    """A finding for each two entries of an order whose later one is faster in the cells with times of both."""
    names = [entry.backend for entry in order.entries]
    for i, slow in enumerate(names):
        for fast in names[i + 1 :]:
            both = [cell for cell in cells if len(rankable(samples, [cell], [slow, fast])) == 2]
            found = compared(samples, both, fast, slow) if both else None
            if found is not None and found.differs:
                message = (
                    f"{order.title} ranks {slow} before {fast}, which its samples show to be {found.ratio:.2f}x as fast"
                )
                subject, help_ = (order.title, slow, fast), "order them as they were measured"
                yield Finding("contradicted-order", subject, order.where, message, help_)


def _wrong(order: Order, samples: Samples, cells: list[int]) -> Iterator[Finding]:
    for (cell, name), problem in samples.problems.items():
        if cell in cells and name in [entry.backend for entry in order.entries] and problem.startswith("wrong"):
            message = f"{order.title} ranks {name}, whose output was wrong: {problem}"
            yield Finding("wrong-output", (order.title, name), order.where, message, f"remove {name}, and report it")


def _cells(registry: Registry, order: Order, samples: Samples) -> list[int]:
    """The cells whose request, in its timed phase, is for this order on the machine of the samples."""
    machine = samples.machine
    device = registry.vocabulary.device(machine["device"])
    packages = tuple((n, v) for n, v in machine["packages"].items() if n in registry.vocabulary.packages)
    platform = Platform(platform=machine["platform"], arch=machine["arch"], packages=packages, device=device)
    out = []
    for i, cell in enumerate(samples.cells):
        phases = [cell.request.phase, cell.phase] if cell.request.phase == "any" else [cell.request.phase]
        points = [point_of(_in_phase(cell.request, phase), platform, registry) for phase in phases]
        if any(order.when.holds(point) for point in points):
            out.append(i)
    return out


def _in_phase(request: AttentionRequest, phase: str) -> AttentionRequest:
    return replace(request, phase=phase)


def _path(order: Order, file: str) -> Path:
    return folder_of(order.where.file, file) / file
