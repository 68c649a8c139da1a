"""The command `check`: it tests a registry, launch recipes or a lock, from the data alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnreg.cli.command import argument, command, option
from attnreg.cli.inputs import PlatformInputs, RegistryInputs
from attnreg.cli.options import json_option, package_option, registry_options
from attnreg.cli.output import print_json, print_lines, status, terminal, working
from attnreg.cli.refusals import BadInput
from attnreg.errors import counted, shown

if TYPE_CHECKING:
    from attnreg.analysis.check.finding import Finding
    from attnreg.analysis.lock import Lock
    from attnreg.registry import Registry


@command(short_help="Check files that deploy an engine; or a registry, or a lock.")
@argument("files", nargs=-1, metavar="[FILE]...", completes="files")
@option("--arch", metavar="WORD", help="The GPU for files that name none, such as sm90 or H100.", section="Platform")
@option(
    "--model",
    metavar="CONFIG",
    help="For files whose model is not here: a config.json, its directory, or an id in the hub's cache.",
    section="Model",
)
@option(
    "--output-format",
    "form",
    type=click.Choice(["text", "json", "github", "sarif"]),
    default="text",
    show_default=True,
    help="How findings in files are printed.",
)
@registry_options
@option("--lock", metavar="FILE", help="Compare the selections of a lock file with the registry instead.")
@option("--explain", metavar="[CODE]", is_flag=False, flag_value="", help="What a finding's code means; all codes.")
@package_option("Of a lock: an installed package in place of those that it names; repeatable.")
@json_option
def check(
    registry_inputs: RegistryInputs,
    files: tuple[str, ...],
    arch: str | None,
    model: str | None,
    form: str,
    lock: str | None,
    explain: str | None,
    packages: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check files that deploy vLLM or SGLang, or without a FILE a registry.

    A FILE is a shell script, a Kubernetes manifest, a compose file, a Dockerfile, a recipe or an engine's own
    configuration. Findings are variables that the release ignores, backends that it lacks or refuses, options that are
    misspelt or only restate the default. Files in shell need the packages tree-sitter and tree-sitter-bash.

    Exit 1: a finding. Exit 2: a file could not be read. Exit 3: no finding, and a part of the answer is not known.
    `--explain unreachable-entry` says what the code of a finding means.

    \b
    attnreg check serve.sh deployment.yaml --arch H100
    """
    if explain is not None:
        _explain(explain, as_json)
        return
    if files:
        if lock is not None or packages or registry_inputs.overlay or registry_inputs.trust:
            options = "leave --lock, --overlay, --trust and --package out"
            raise BadInput("a launch is checked with the tables of its engine alone", options)
        _check_files(registry_inputs.registry, files, arch, model, "json" if as_json else form)
        return
    if arch is not None or model is not None or form != "text":
        raise BadInput("--arch, --model and --output-format are about files", "name a file that deploys an engine")
    if lock is not None:
        _check_lock(registry_inputs, PlatformInputs(packages=packages), lock, as_json)
        return
    if packages:
        raise BadInput("--package says something of a lock: a registry is checked for all packages", "give --lock too")
    from attnreg.analysis.check.findings import check as check_registry
    from attnreg.analysis.check.findings import notes
    from attnreg.errors import RegistryError
    from attnreg.loader import bundled_registries
    from attnreg.machine.detect import detect
    from attnreg.models.families import Families
    from attnreg.models.reader import bundled_families

    registry = registry_inputs.load()
    families = bundled_families() if registry_inputs.bundled_default else None
    beside = Path(registry.base, "models")
    if registry.base not in bundled_registries() and beside.is_dir():
        families = Families.load(beside, str(beside), allow_outside=registry_inputs.allow_outside)
    if families is not None and (problems := families.check()):
        raise RegistryError(problems)
    measured = any(order.measured for orders in registry.orders.values() for order in orders)
    here = detect(registry.vocabulary) if measured else None
    allowed = registry_inputs.allow_outside
    with working(f"deciding {len(registry.invariants)} invariants", shown=not as_json):
        findings = check_registry(registry, here, allow_outside=allowed)
    aside = notes(registry, allow_outside=allowed)
    if as_json:
        data, more = ([finding.to_dict() for finding in some] for some in (findings, aside))
        print_json({"registry": registry.title, "findings": data, "notes": more})
    else:
        lines = "\n".join(f"note: {f.line}" for f in aside)
        print_lines("\n\n".join([*map(str, findings), *([lines] if aside else []), _summary(registry, findings)]))
    # the faults of another engine's registry are reported and do not fail the command
    failed = any(registry.imports or finding.code == "broken-plugin" for finding in findings)
    raise click.exceptions.Exit(1 if failed else 0)


def _explain(name: str, as_json: bool) -> None:
    """Print what a code means, or all codes for an empty name. Raises `BadInput` for a name that is none."""
    from dataclasses import asdict

    from attnreg.analysis.check.codes import code_lines, codes, list_lines
    from attnreg.errors import did_you_mean

    if name and name not in codes():
        raise BadInput(f"no finding has the code {shown(name)}", did_you_mean(name, codes(), also=3))
    if as_json:
        print_json({"codes": [asdict(code) for code in codes().values() if name in ("", code.name)]})
    else:
        print_lines("\n".join(code_lines(codes()[name]) if name else list_lines()))


def _summary(registry: Registry, findings: Sequence[Finding]) -> str:
    """The last line of `attnreg check`: counts of backends, orders, invariants and findings."""
    orders = sum(map(len, registry.orders.values()))
    held = len(registry.kept) - sum(f.code == "violated-invariant" for f in findings)
    noun = "finding" if registry.imports else "warning"
    known = f" ({len(registry.known)} known)" if registry.known else ""
    return (
        f"{registry.title}: {counted(len(registry.backends), 'backend')}, {counted(orders, 'order')}, "
        f"{held} of {len(registry.invariants)} invariants hold, "
        f"{counted(len(findings), noun)}{known}"
    )


def _check_files(release: str | None, files: tuple[str, ...], arch: str | None, model: str | None, form: str) -> None:
    from attnreg.cli.refusals import describe
    from attnreg.compile.inputs.configs import find_config, known_config
    from attnreg.engines.reports import as_data, check_files, github_lines, sarif, text_lines
    from attnreg.engines.surroundings import LaunchSurroundings

    config = find_config(model) if model is not None else None
    around = LaunchSurroundings(registry=release, arch=arch, model=config, find=known_config)
    reports = check_files(files, around, lambda engine: None if release is None else _refuse_other(release, engine))
    for error in filter(None, (report.error for report in reports)):
        click.echo(describe(error), err=True)
    if form in ("json", "sarif"):
        print_json(as_data(reports) if form == "json" else sarif(reports))
    elif form == "github":
        click.echo("\n".join(github_lines(reports)))
    else:
        print_lines("\n".join(text_lines(reports)))
    if any(report.error for report in reports):
        raise click.exceptions.Exit(2)
    found = any(report.findings for report in reports)
    unknown = any(checked.unknown for report in reports for _, checked in report.launches)
    raise click.exceptions.Exit(status(found, unknown))


def _refuse_other(release: str, engine: str) -> None:
    """Raise `BadInput` for a name that is neither an engine nor a bundled release of it."""
    from attnreg.compile.inputs.bundled import bundled_registries, help_for_registry, release_name

    releases = [name for name in bundled_registries() if name.startswith(f"{engine}-")]
    if release != engine and release_name(release) not in releases:
        near = release if release.startswith(f"{engine}-") else engine
        raise BadInput(f"{release} is no release of {engine}", help_for_registry(near, releases))


def _check_lock(registry_inputs: RegistryInputs, inputs: PlatformInputs, file: str, as_json: bool) -> None:
    from pathlib import Path

    from attnreg.analysis.lock import drift, read_lock
    from attnreg.explain.changes import print_moves
    from attnreg.machine.detect import detect

    lock = read_lock(Path(file))
    if not registry_inputs.allow_outside:
        _refuse_outside(lock, registry_inputs, Path(file))
    registry = registry_inputs.of_lock(lock)
    packages = inputs.installed(registry.vocabulary)
    here = detect(registry.vocabulary) if lock.detected and packages is None else None
    moves = drift(lock, registry, here, packages)
    if as_json:
        print_json({"registry": registry.title, "locked_with": lock.fingerprint, **moves.to_dict()})
    else:
        print_moves(moves, terminal())
        if lock.fingerprint != registry.fingerprint:
            print_lines(f"locked with {lock.registry}@{lock.fingerprint}")
        total = len(lock.entries)
        print_lines(f"{registry.title}: {total - len(moves.moves)} of {total} locked selections hold")
    raise click.exceptions.Exit(status(bool(moves.moves), bool(moves.unknown)))


def _refuse_outside(lock: Lock, given: RegistryInputs, file: Path) -> None:
    """Raise `LockError` if a lock names a registry or an overlay outside the lock's directory.

    A registry or overlay that an option names instead is not checked.
    """
    from attnreg.analysis.lock import LockError
    from attnreg.compile.inputs.bundled import bundled_source
    from attnreg.errors import Location, Problem
    from attnreg.files import outside

    overlays = () if given.registry or given.overlay else lock.overlays
    named = [("overlay", name) for name in overlays] + ([] if given.registry else [("registry", lock.registry)])
    for kind, name in named:
        # the paths in a lock are relative to the current directory, as when it was written
        bundled = kind == "registry" and bundled_source(name) is not None
        if not bundled and (why := outside(name, file.parent, Path())):
            message = f"the lock names the {kind} {shown(name)}, which {why}"
            help_ = f"name it with --{kind}, or give --allow-outside where you trust who wrote the lock"
            raise LockError([Problem(Location(str(file), 1, 1), message, help_)])
