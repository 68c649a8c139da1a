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


@command(short_help="Check a registry: invariants, dead data; or launch recipes, or a lock.")
@argument("recipes", nargs=-1, metavar="[RECIPE]...", completes="files")
@registry_options
@option("--lock", metavar="FILE", help="Compare the selections of a lock file with the registry instead.")
@option("--explain", metavar="[CODE]", is_flag=False, flag_value="", help="What a finding's code means; all codes.")
@package_option("Of a lock: an installed package in place of those that it names; repeatable.")
@json_option
def check(
    registry_inputs: RegistryInputs,
    recipes: tuple[str, ...],
    lock: str | None,
    explain: str | None,
    packages: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check a registry: schema, invariants, and data that is never reached.

    With RECIPEs, YAML files or shell scripts that launch an engine: variables that are ignored, backends that are not
    in the release, options that only restate the default. Exit 1: a finding. Exit 3: no finding, and a
    part of the answer is not known. `--explain unreachable-entry` says what the code of a finding means.

    \b
    attnreg check serve.sh recipe.yaml
    """
    if explain is not None:
        _explain(explain, as_json)
        return
    if recipes:
        if lock is not None or packages or registry_inputs.overlay or registry_inputs.trust:
            options = "leave --lock, --overlay, --trust and --package out"
            raise BadInput("a recipe is checked with the tables of its engine alone", options)
        _check_recipes(registry_inputs.registry, recipes, as_json)
        return
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
        print_json([asdict(code) for code in codes().values() if name in ("", code.name)])
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


def _check_recipes(release: str | None, files: tuple[str, ...], as_json: bool) -> None:
    from attnreg.engines.launches import check_recipe
    from attnreg.engines.recipes import read_recipe

    recipes = [(file, recipe) for file in files for recipe in read_recipe(Path(file))]
    if release is not None:
        for engine in dict.fromkeys(recipe.engine for _, recipe in recipes):
            _refuse_other(release, engine)
    checked = [(file, check_recipe(recipe, release)) for file, recipe in recipes]
    found = [finding for _, each in checked for finding in each.findings]
    notes = list(dict.fromkeys(f"{file}: {each.note}" for file, each in checked if each.note))
    if as_json:
        print_json({"findings": [finding.to_dict() for finding in found], "notes": notes})
    else:
        noun = counted(len(files), "recipe")
        summary = f"{noun}: {counted(len(found), 'finding')}"
        print_lines("\n".join([*map(str, found), *(f"note: {note}" for note in notes), summary]))
    raise click.exceptions.Exit(status(bool(found), any(each.unknown for _, each in checked)))


def _refuse_other(release: str, engine: str) -> None:
    """Raise `BadInput` for a name that is not a bundled release of the recipe's engine."""
    from attnreg.compile.inputs.bundled import bundled_registries, help_for_registry, release_name

    releases = [name for name in bundled_registries() if name.startswith(f"{engine}-")]
    if release_name(release) not in releases:
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
