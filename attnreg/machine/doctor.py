"""The report on this machine: its devices, the backends that are usable on each, and what the others lack."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attnreg.environment import FLAGS_VARIABLE, environment_problems
from attnreg.errors import escaped
from attnreg.language.conditions import Condition
from attnreg.machine.detect import Gpu, detect_all, gpus
from attnreg.machine.remembered import probe_and_remember, remembered
from attnreg.machine.triton_parts import missing_parts
from attnreg.packages.proven import unproven
from attnreg.selection.wording import readable, registry_words
from attnreg.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from attnreg.platforms import Platform
    from attnreg.registry import Backend, Registry, Variant


@dataclass(frozen=True)
class Usability:
    """One backend on one device: its missing requirements, its kernel module, and why the module cannot run.

    The module is probed if nothing is missing; it is None if the row has no module for attnreg. ``unproven`` has a
    sentence for each package whose version is newer than any in the backend's evidence.
    """

    backend: str
    missing: tuple[str, ...]
    module: str | None
    problem: str | None = None
    unproven: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        return not self.missing and self.problem is None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.backend,
            "usable": self.usable,
            "missing": list(self.missing),
            "module": self.module is not None,
            "problem": self.problem,
            "unproven": list(self.unproven),
        }


@dataclass(frozen=True)
class MachineReport:
    """The devices of this machine, the usability of each backend on them, and problems of the environment.

    remembered: whether the kernel modules were imported by an earlier run, and not by this one.
    """

    registry: Registry
    devices: tuple[tuple[Platform, tuple[Usability, ...]], ...]
    problems: tuple[str, ...]
    gpus: tuple[Gpu, ...] = ()
    remembered: bool = False

    def gpus_of(self, platform: Platform) -> list[Gpu]:
        """The GPUs of this machine that a platform stands for."""
        device = self.registry.vocabulary.device
        return [
            gpu
            for gpu in self.gpus
            if (gpu.platform, gpu.arch, device(gpu.name)) == (platform.platform, platform.arch, platform.device)
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "python": sys.version.split()[0],
            "registry": self.registry.title,
            "problems": list(self.problems),
            "remembered": self.remembered,
            "devices": [
                {
                    **platform.to_dict(),
                    "gpus": [
                        {"name": gpu.name, "memory": gpu.memory, "driver": gpu.driver} for gpu in self.gpus_of(platform)
                    ],
                    "backends": [u.to_dict() for u in usable],
                }
                for platform, usable in self.devices
            ],
        }


def examine(registry: Registry, *, fresh: bool = True) -> MachineReport:
    """The report on this machine. A second process imports the kernel modules of rows without missing requirements.

    fresh: import them although they could be imported before and nothing changed since.
    """
    problems = environment_problems(os.environ, registry.vocabulary)
    problems += [plugin.text for plugin in registry.left_out]
    devices: list[tuple[Platform, tuple[Usability, ...]]] = []
    for platform in detect_all(registry.vocabulary):
        unknown_flags = sorted(platform.flags - set(registry.vocabulary.flags))
        problems += [f"{FLAGS_VARIABLE} names {flag!r}, which {registry.title} does not know" for flag in unknown_flags]
        if platform.arch not in registry.vocabulary.architectures:
            problems.append(f"{platform.arch} is no architecture of {registry.title}: add it to its vocabulary.yaml")
            devices.append((platform, ()))
            continue
        rows = [r for r in registry.backends.values() if platform.platform in r.platforms]
        devices.append((platform, tuple(u for row in rows for u in _usabilities(row, platform, registry))))
    problems += missing_parts([platform.platform for platform, _ in devices])
    modules = [u.module for _, usable in devices for u in usable if u.module is not None and not u.missing]
    found = gpus(os.environ)
    known = None if fresh else remembered(modules, found)
    reasons = probe_and_remember(modules, found) if known is None else known
    probed = [
        (platform, tuple(u if u.missing else replace(u, problem=reasons.get(u.module or "")) for u in usable))
        for platform, usable in devices
    ]
    return MachineReport(registry, tuple(probed), tuple(dict.fromkeys(problems)), found, known is not None)


def _usabilities(row: Backend, platform: Platform, registry: Registry) -> Iterator[Usability]:
    """The requirements that a device cannot meet for any request, one result for each kernel module of the backend.

    A module counts by the variant with the fewest missing requirements. Variants for other devices are left out, unless
    the backend has no others.
    """
    missing = [(v, (*_missing(v.when, platform), *_missing(v.requires, platform))) for v in row.variants]
    if len({v.module for v in row.variants}) == 1 or not registry.imports:
        variant, lacks = min(missing, key=lambda pair: len(pair[1]))
        module = variant.module if registry.imports else None
        yield Usability(row.name, lacks, module, unproven=_unproven(registry, row, variant, platform))
        return
    here = [(v, lacks) for v, lacks in missing if not any(_missing(v.when, platform))] or missing[:1]
    for v, lacks in here:
        yield Usability(f"{row.name}/{v.name}", lacks, v.module, unproven=_unproven(registry, row, v, platform))


def _unproven(registry: Registry, row: Backend, variant: Variant, platform: Platform) -> tuple[str, ...]:
    return tuple(one.text for one in unproven(registry, row.name, variant, platform))


def _missing(condition: Condition, platform: Platform) -> Iterator[str]:
    """The parts of a condition that a platform fails, whatever the request."""
    refuted = condition.refuted(platform.facts())
    for clause in refuted.clauses:
        if clause.facet == "packages":
            yield from (
                f"package {r}" for r in sorted(clause.matcher.mentions, key=str) if not r.met_by(platform.packages)
            )
        elif clause.facet == "flags" and clause.matcher.form == "all":
            yield from (f"flag {flag}" for flag in sorted(clause.matcher.mentions - platform.flags))
        else:
            yield clause.describe()
    yield from (Condition(any_of=(group,)).describe() for group in refuted.any_of)
    yield from (Condition(none_of=(part,)).describe() for part in refuted.none_of)


def print_report(report: MachineReport, console: Console) -> None:
    """Print the report for a person."""
    from rich.text import Text

    registry = report.registry
    head = f"attnreg {__version__} · Python {sys.version.split()[0]} · {registry_words(registry)}"
    console.print(Text(head, style="bold"))
    for problem in report.problems:
        console.print(Text(f"! {problem}", style="yellow"))
    if report.remembered:
        sentence = "The kernel modules could be imported before, and nothing changed. --fresh imports them again."
        console.print(Text(sentence, style="dim"))
    for platform, usable in report.devices:
        arch = registry.vocabulary.architectures.get(platform.arch)
        console.print()
        console.print(
            Text(f"{platform.platform} {platform.arch}", style="bold").append(f"   {arch.family if arch else ''}")
        )
        for gpu, count in Counter(report.gpus_of(platform)).items():
            memory = "memory not known" if gpu.memory is None else readable(gpu.memory)
            named = f"{count} x {gpu.name or 'a GPU without a name'}"
            words = [named, memory, f"driver {gpu.driver or 'not known'}"]
            console.print(Text(f"  GPUs      {escaped(', '.join(words))}"))
        packages = [f"{name} {version}".strip() for name, version in platform.packages or ()]
        console.print(Text(f"  packages  {escaped(', '.join(packages)) or 'none that a backend needs'}"))
        console.print(
            Text(f"  flags     {escaped(', '.join(sorted(platform.flags))) or f'none (set {FLAGS_VARIABLE})'}")
        )
        for u in usable:
            runs = u.usable and u.module is not None
            line = Text(f"  {'✓' if runs else '–' if u.usable else '✗'} {u.backend:<24}", style="green" if runs else "")
            # a row without a module describes a kernel that attnreg itself cannot call
            holds = "usable" if runs else "has what it needs"
            note = f"needs {', '.join(u.missing)}" if u.missing else holds
            note = note if u.problem is None else f"cannot be run: {u.problem}"
            note = "; ".join((note, *u.unproven)) if u.usable else note
            console.print(line.append(note + ("" if u.module else " · no kernel module in attnreg"), style="dim"))
