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
from attnreg.analysis.timings.samples import Samples, SamplesError, kernel_hash, read_samples
from attnreg.compile.inputs.bundled import registry_root
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
            if not allow_outside and (why := outside(file, _folder(order, file))):
                message = f"{shown(file)}, the evidence of {order.title}, {why}"
                yield Finding("missing evidence", order.measured.where, message, f"move it; or {ALLOW}")
                continue
            yield from _stale(registry, order, order.measured, here)
            yield from contradictions(registry, order, order.measured, read)


def _stale(registry: Registry, order: Order, measured: Measured, here: Platform | None) -> Iterator[Finding]:
    def stale(why: str) -> Finding:
        return Finding("stale evidence", measured.where, f"the evidence of {order.title} is stale: {why}", _AGAIN)

    for name, then in measured.rows:
        if kernel_hash(registry, name) != then:
            yield stale(f"{name} has another kernel module, or other options, than on {measured.date}")
    # evidence from another machine, and attnreg's own, is not compared with this machine
    brought = _path(order, measured.file).resolve().is_relative_to(registry_root().resolve())
    if here is None or brought or order.platform != here.platform or not _is_about(order, here):
        return
    then_device = registry.vocabulary.device(measured.device)
    if then_device != here.device:
        yield stale(f"it was measured on {measured.device}, and this is {here.device or 'another device'}")
    installed = {**dict(here.packages or ()), OWN_PACKAGE: __version__}
    for package, version in measured.packages:
        now = installed.get(package)
        if now != version:
            yield stale(f"{package} was {version}, and here it is {now or 'not installed'}")


def _is_about(order: Order, here: Platform) -> bool:
    """Whether an order may decide on a machine."""
    known = {"platform": here.platform, "arch": here.arch, "device": here.device}
    return order.when.decided(known) is not False


def contradictions(
    registry: Registry, order: Order, measured: Measured, read: Callable[[Path, str], Samples] = read_samples
) -> Iterator[Finding]:
    """The findings of samples that contradict an order. read: the function that reads the file of samples."""
    try:
        samples = read(_path(order, measured.file), measured.file)
    except SamplesError as e:
        problem = e.problems[0]
        message = f"{measured.file}, the evidence of {order.title}: {problem.message}"
        yield Finding("missing evidence", measured.where, message, problem.help or _AGAIN)
        return
    if why := impossible(samples, registry.vocabulary):
        yield Finding(
            "missing evidence", measured.where, f"{measured.file}, the evidence of {order.title}: {why}", _AGAIN
        )
        return
    if (samples.machine["device"], samples.date) != (measured.device, measured.date):
        theirs = f"{samples.machine['device']}, {samples.date}"
        message = f"{order.title} says {measured.device}, {measured.date}, and its samples {theirs}"
        yield Finding("contradicted order", measured.where, message, _AGAIN)
        return
    try:
        cells = _cells(registry, order, samples)
    except RequestError as e:
        message = f"the samples of {order.title} are of no request that the registry knows: {e.message}"
        yield Finding("missing evidence", measured.where, message, _AGAIN)
        return
    if not any(rankable(samples, [cell], [e.backend for e in order.entries]) for cell in cells):
        message = f"no sample in {measured.file} is of a request that {order.title} takes"
        yield Finding("missing evidence", measured.where, message, _AGAIN)
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
    yield Finding("contradicted order", measured.where, message, "state what its samples show, or " + _AGAIN)


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
                yield Finding("contradicted order", order.where, message, "order them as they were measured")


def _wrong(order: Order, samples: Samples, cells: list[int]) -> Iterator[Finding]:
    for (cell, name), problem in samples.problems.items():
        if cell in cells and name in [entry.backend for entry in order.entries] and problem.startswith("wrong"):
            message = f"{order.title} ranks {name}, whose output was wrong: {problem}"
            yield Finding("contradicted order", order.where, message, f"remove {name}, and report it")


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
    return _folder(order, file) / file


def _folder(order: Order, file: str) -> Path:
    """The directory with an order's file and its samples; a bundled one is below the root of the data."""
    beside = Path(order.where.file).parent
    bundled = registry_root().parent / beside
    return bundled if not (beside / file).exists() and (bundled / file).exists() else beside
