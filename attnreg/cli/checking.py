"""The commands that say whether something holds: `check` and `verify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import click

from attnreg.cli.command import argument, command, option
from attnreg.cli.inputs import PlatformInputs, RegistryInputs
from attnreg.cli.options import json_option, package_option, platform_options, registry_options
from attnreg.cli.output import print_json, terminal
from attnreg.cli.refusals import BadInput

if TYPE_CHECKING:
    from attnreg.analysis.check.finding import Finding
    from attnreg.registry import Registry


@command(short_help="Check a registry: invariants, dead data; or a lock.")
@registry_options
@option("--lock", metavar="FILE", help="Compare the selections of a lock file with the registry instead.")
@package_option("Of a lock: an installed package in place of those that it names; repeatable.")
@json_option
def check(registry_inputs: RegistryInputs, lock: str | None, packages: tuple[str, ...], as_json: bool) -> None:
    """Check a registry: schema, invariants, and data that is never reached."""
    if lock is not None:
        _check_lock(registry_inputs, PlatformInputs(packages=packages), lock, as_json)
        return
    if packages:
        raise BadInput("--package says something of a lock: a registry is checked for all packages", "give --lock too")
    from attnreg.analysis.check import check as check_registry
    from attnreg.errors import RegistryError
    from attnreg.models.reader import bundled_families

    registry = registry_inputs.load()
    findings = check_registry(registry)
    if registry_inputs.bundled_default and (problems := bundled_families().check()):
        raise RegistryError(problems)
    if as_json:
        data = [{"kind": f.kind, "where": str(f.where), "message": f.message, "help": f.help} for f in findings]
        print_json({"registry": registry.title, "findings": data})
    else:
        _print_lines("\n\n".join([*map(str, findings), _summary(registry, findings)]))
    # the faults of another engine's registry are reported and do not fail the command
    failed = any(registry.imports or finding.kind == "broken plugin" for finding in findings)
    raise click.exceptions.Exit(1 if failed else 0)


def _summary(registry: Registry, findings: Sequence[Finding]) -> str:
    """The last line of `attnreg check`: counts of backends, orders, invariants and findings."""
    orders = sum(map(len, registry.orders.values()))
    held = len(registry.kept) - sum(f.kind == "violated invariant" for f in findings)
    noun = "finding" if registry.imports else "warning"
    known = f" ({len(registry.known)} known)" if registry.known else ""
    return (
        f"{registry.title}: {len(registry.backends)} backends, {orders} orders, "
        f"{held} of {len(registry.invariants)} invariants hold, "
        f"{len(findings)} {noun}{'s' * (len(findings) != 1)}{known}"
    )


def _print_lines(text: str) -> None:
    """Print lines of text, each wrapped at the width of the terminal below its own indentation."""
    from rich.text import Text

    from attnreg.explain.layout import emit, wrapped

    console = terminal()
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        parts = wrapped(line.lstrip(), console.width, f"{indent}  ", first=indent) or [""]
        emit(map(Text, parts), console)


def _check_lock(registry_inputs: RegistryInputs, inputs: PlatformInputs, file: str, as_json: bool) -> None:
    from pathlib import Path

    from attnreg.analysis.lock import drift, read_lock
    from attnreg.explain.changes import print_moves
    from attnreg.machine.detect import detect

    lock = read_lock(Path(file))
    registry = registry_inputs.of_lock(lock)
    packages = inputs.installed(registry.vocabulary)
    here = detect(registry.vocabulary) if lock.detected and packages is None else None
    moves = drift(lock, registry, here, packages)
    if as_json:
        print_json({"registry": registry.title, "locked_with": lock.fingerprint, **moves.to_dict()})
    else:
        print_moves(moves, terminal())
        if lock.fingerprint != registry.fingerprint:
            _print_lines(f"locked with {lock.registry}@{lock.fingerprint}")
        total = len(lock.entries)
        _print_lines(f"{registry.title}: {total - len(moves.moves)} of {total} locked selections hold")
    raise click.exceptions.Exit(1 if moves.moves else 0)


@command(short_help="Prove what backends claim, by running them.")
@argument("backends", nargs=-1, metavar="[BACKEND]...", completes="backends")
@platform_options
@registry_options
@option("--device", metavar="NAME", help="PyTorch's name of the device to run on; by default the platform's.")
@option("--size", type=click.Choice(["claims", "pairs"]), default="pairs", show_default=True, help="How many cases.")
@option("--jobs", type=click.IntRange(min=1), default=1, help="Processes that run cases at the same time.")
@option("--record", metavar="FILE|DIR", help="Keep the evidence in a file, or in a directory's <device>.json.")
@json_option
def verify(
    registry_inputs: RegistryInputs,
    platform_inputs: PlatformInputs,
    backends: tuple[str, ...],
    device: str | None,
    size: Literal["claims", "pairs"],
    jobs: int,
    record: str | None,
    as_json: bool,
) -> None:
    """Prove what backends claim: run cases made from their rows and compare with float64. Exit 1: a claim is refuted.

    Without a BACKEND, every one with a kernel module for this machine. Needs PyTorch.
    """
    registry = registry_inputs.load()
    platforms = platform_inputs.platforms(registry)
    if len(platforms) != 1:
        raise click.UsageError("verify runs on one device; give one --arch")
    try:
        from attnreg.conformance.verify import verify as verify_backends
    except ImportError as e:
        raise click.ClickException(f"verify runs the backends and needs PyTorch: {e}") from None
    results = verify_backends(
        backends, registry=registry, platform=platforms[0], device=device, size=size, jobs=jobs, record=record
    )
    if as_json:
        print_json({e.backend: {**e.to_dict(), "problems": e.problems} for e in results})
    else:
        _print_lines("\n".join(line for evidence in results for line in evidence.lines()))
    raise click.exceptions.Exit(1 if any(e.problems for e in results) else 0)
