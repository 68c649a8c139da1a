"""The commands that test something, from the data or by a run: `check`, `verify` and `tune`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from attnreg.cli.command import Number, argument, command, option
from attnreg.cli.inputs import PlatformInputs, RegistryInputs, RequestInputs
from attnreg.cli.options import (
    engine_options,
    json_option,
    models_options,
    package_option,
    platform_options,
    registry_options,
)
from attnreg.cli.output import print_json, status, terminal
from attnreg.cli.refusals import BadInput
from attnreg.errors import counted, shown

if TYPE_CHECKING:
    from attnreg.analysis.check.finding import Finding
    from attnreg.analysis.lock import Lock
    from attnreg.registry import Registry

# the limit of --minutes and --patience: timers of operating systems accept little more
_LONGEST = 1e6
# the exit status of verify if no claim is refuted and some case is undecided
_UNDECIDED = 3


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
@engine_options
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
    misspelt or only restate the default. Files in shell need the extra attnreg[check].

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
    findings = check_registry(registry, here, allow_outside=allowed)
    aside = notes(registry, allow_outside=allowed)
    if as_json:
        data, more = ([finding.to_dict() for finding in some] for some in (findings, aside))
        print_json({"registry": registry.title, "findings": data, "notes": more})
    else:
        lines = "\n".join(f"note: {f.line}" for f in aside)
        _print_lines("\n\n".join([*map(str, findings), *([lines] if aside else []), _summary(registry, findings)]))
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
        _print_lines("\n".join(code_lines(codes()[name]) if name else list_lines()))


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


def _print_lines(text: str) -> None:
    """Print lines of text, each wrapped at the width of the terminal and indented like its first part."""
    from rich.text import Text

    from attnreg.explain.layout import emit, wrapped

    console = terminal()
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        parts = wrapped(line.lstrip(), console.width, f"{indent}  ", first=indent) or [""]
        emit(map(Text, parts), console)


def _check_files(release: str | None, files: tuple[str, ...], arch: str | None, model: str | None, form: str) -> None:
    from attnreg.cli.configs import find_config, known_config
    from attnreg.cli.refusals import describe
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
        _print_lines("\n".join(text_lines(reports)))
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
            _print_lines(f"locked with {lock.registry}@{lock.fingerprint}")
        total = len(lock.entries)
        _print_lines(f"{registry.title}: {total - len(moves.moves)} of {total} locked selections hold")
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


@command(short_help="Prove what backends claim, by running them.")
@argument("backends", nargs=-1, metavar="[BACKEND]...", completes="backends")
@platform_options
@registry_options
@option("--device", "where", metavar="NAME", help="PyTorch's name of the device to run on; by default the platform's.")
@option("--size", type=click.Choice(["claims", "pairs"]), default="pairs", show_default=True, help="How many cases.")
@option("--jobs", type=click.IntRange(min=1), default=1, help="Processes that run cases at the same time.")
@option("--record", metavar="FILE|DIR", help="Keep the evidence in a file, or in a directory's <device>.json.")
@json_option
def verify(
    registry_inputs: RegistryInputs,
    platform_inputs: PlatformInputs,
    backends: tuple[str, ...],
    where: str | None,
    size: Literal["claims", "pairs"],
    jobs: int,
    record: str | None,
    as_json: bool,
) -> None:
    """Prove what backends claim: run cases made from their rows and compare with float64.

    Exit 1: a claim is refuted. Exit 3: none is, but a compiler or interpreter failed to run a case.

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
        backends, registry=registry, platform=platforms[0], device=where, size=size, jobs=jobs, record=record
    )
    if as_json:
        print_json(
            {
                e.backend: {**e.to_dict(), "problems": e.problems, "undecided": e.undecided, "ended": e.ended}
                for e in results
            }
        )
    else:
        _print_lines("\n".join(line for evidence in results for line in evidence.lines()))
    raise click.exceptions.Exit(
        1 if any(e.problems for e in results) else _UNDECIDED if any(e.undecided for e in results) else 0
    )


@command(short_help="Time the backends that load here, and write the orders that follow.")
@models_options
@registry_options
@option(
    "--output", "-o", metavar="FILE", default="tuned.yaml", show_default=True, help="The overlay; samples beside it."
)
@option("--minutes", type=Number(0.1, _LONGEST), default=10.0, show_default=True, help="The most that it may take.")
@option(
    "--patience",
    type=Number(1, _LONGEST),
    metavar="SECONDS",
    help="How long a kernel may take to answer, compiling included: FlashInfer's take minutes the first time. "
    "[default: 120, less in a short run]",
)
@option("--decode", multiple=True, metavar="NxLENGTH", help="Time decoding of N requests of this length; repeatable.")
@option("--prefill", multiple=True, metavar="NxLENGTH", help="Time N prompts of this length; repeatable.")
@option("--device", metavar="NAME", help="PyTorch's name of the device to run on; by default the first.")
@option("--from", "samples", metavar="FILE", help="Measure nothing: write the orders that follow from these samples.")
@option("--dry-run", is_flag=True, help="Say what would be timed, and how long it takes.")
def tune(
    registry_inputs: RegistryInputs,
    request_inputs: RequestInputs,
    output: str,
    minutes: float,
    patience: float | None,
    decode: tuple[str, ...],
    prefill: tuple[str, ...],
    device: str | None,
    samples: str | None,
    dry_run: bool,
) -> None:
    """Time every backend that is valid and loads here, and write an overlay of orders with their evidence.

    The layers are those of the models, by default of the 24 that come with attnreg. Each backend runs in its own
    process, and the processes take turns. An order ranks two backends only if their times differ by more than the
    noise. The same command continues an interrupted run. Needs PyTorch.

    \b
    attnreg tune --model llama/config.json --minutes 5
    attnreg diff default tuned.yaml
    """
    from pathlib import Path

    from attnreg.compile.inputs.bundled import bundled_configs
    from attnreg.files import require_directory
    from attnreg.tuning.grid import workloads_of

    require_directory()
    registry = registry_inputs.load()
    if samples is not None:
        from attnreg.tuning.command import write_orders

        _print_lines("\n".join(write_orders(Path(samples), registry, Path(output))))
        return
    try:
        from attnreg.tuning.command import Tuning
        from attnreg.tuning.device import device_of
    except ImportError as e:
        raise click.ClickException(f"tune runs the backends and needs PyTorch: {e}") from None
    where = device_of(device or "", registry)
    named = request_inputs.models or "head_size" in request_inputs.facets
    models = request_inputs.models if named else tuple(map(str, bundled_configs().values()))
    left_out: dict[str, None] | None = None if named else {}
    asked = request_inputs.questions(registry, models, left_out=left_out)
    kind = "cpu" if where.platform.platform == "cpu" else "gpu"
    tuning = Tuning(
        registry=registry,
        device=where,
        questions=[question for questions in asked.values() for question in questions],
        workloads=workloads_of(_sizes("--decode", decode), _sizes("--prefill", prefill), kind),
        output=Path(output),
        minutes=minutes,
        patience=patience,
    )
    planned = tuning.planned()
    lines = list(tuning.dry_lines(planned)) if dry_run else tuning.measure(planned)
    _print_lines("\n".join(lines))


def _sizes(option: str, texts: Sequence[str]) -> list[tuple[int, int]]:
    """The pairs of numbers in texts such as ``32x4096``."""
    out = []
    for text in texts:
        number, _, length = text.partition("x")
        if not (number.isdecimal() and length.isdecimal() and 0 < len(text) < 20 and int(number) and int(length)):
            raise BadInput(f"{option} {text}: expected requests and length, as 32x4096")
        out.append((int(number), int(length)))
    return out
