"""The report on this machine: its devices, and which backends are usable on each, with what others lack."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnreg.environment import FLAGS_VARIABLE, environment_problems
from attnreg.errors import escaped
from attnreg.language.conditions import Condition
from attnreg.machine.detect import detect_all
from attnreg.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from attnreg.platforms import Platform
    from attnreg.registry import Backend, Registry


@dataclass(frozen=True)
class Usability:
    """One backend on one device: what it lacks there, and whether attnreg has a kernel module for it."""

    backend: str
    missing: tuple[str, ...]
    runnable: bool


@dataclass(frozen=True)
class Report:
    """The devices of this machine, the usability of each backend on them, and problems of the environment."""

    registry: Registry
    devices: tuple[tuple[Platform, tuple[Usability, ...]], ...]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "attnreg": __version__,
            "python": sys.version.split()[0],
            "registry": self.registry.title,
            "problems": list(self.problems),
            "devices": [
                {
                    **platform.to_dict(),
                    "backends": [
                        {"name": u.backend, "usable": not u.missing, "missing": list(u.missing), "module": u.runnable}
                        for u in usable
                    ],
                }
                for platform, usable in self.devices
            ],
        }


def examine(registry: Registry) -> Report:
    """The report on this machine. Imports no kernel and no framework."""
    problems = environment_problems(os.environ, registry.vocabulary)
    problems += [p.sentence if p.why == "not installed" else f"left out: {p.sentence}" for p in registry.left_out]
    devices: list[tuple[Platform, tuple[Usability, ...]]] = []
    for platform in detect_all(registry.vocabulary):
        unknown_flags = sorted(platform.flags - set(registry.vocabulary.flags))
        problems += [f"{FLAGS_VARIABLE} names {flag!r}, which {registry.title} does not know" for flag in unknown_flags]
        if platform.arch not in registry.vocabulary.architectures:
            problems.append(f"{platform.arch} is no architecture of {registry.title}: add it to its vocabulary.yaml")
            devices.append((platform, ()))
            continue
        rows = [r for r in registry.backends.values() if platform.platform in r.platforms]
        devices.append((platform, tuple(_usability(row, platform) for row in rows)))
    return Report(registry, tuple(devices), tuple(dict.fromkeys(problems)))


def _usability(row: Backend, platform: Platform) -> Usability:
    """What a backend lacks on a device for every request, by the variant that lacks least."""
    missing = [(*_missing(v.when, platform), *_missing(v.requires, platform)) for v in row.variants]
    return Usability(row.name, min(missing, key=len), row.module is not None)


def _missing(condition: Condition, platform: Platform) -> Iterator[str]:
    """What a platform lacks for a condition to hold for some request."""
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


def print_report(report: Report, console: Console) -> None:
    """Print the report for a person."""
    from rich.text import Text

    registry = report.registry
    head = f"attnreg {__version__} · Python {sys.version.split()[0]} · registry {registry.title}"
    console.print(Text(head, style="bold"))
    for problem in report.problems:
        console.print(Text(f"! {problem}", style="yellow"))
    for platform, usable in report.devices:
        arch = registry.vocabulary.architectures.get(platform.arch)
        console.print()
        console.print(
            Text(f"{platform.platform} {platform.arch}", style="bold").append(f"   {arch.family if arch else ''}")
        )
        packages = [f"{name} {version}".strip() for name, version in platform.packages or ()]
        console.print(Text(f"  packages  {escaped(', '.join(packages)) or 'none that a backend needs'}"))
        console.print(
            Text(f"  flags     {escaped(', '.join(sorted(platform.flags))) or f'none (set {FLAGS_VARIABLE})'}")
        )
        for u in usable:
            line = Text(f"  {'✗' if u.missing else '✓'} {u.backend:<24}", style="" if u.missing else "green")
            note = f"needs {', '.join(u.missing)}" if u.missing else "usable"
            console.print(line.append(note + ("" if u.runnable else " · no kernel module in attnreg"), style="dim"))
