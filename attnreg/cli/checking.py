"""The commands that check, compare and verify: `check`, `lock`, `diff` and `verify`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from attnreg.cli import completion
from attnreg.cli.command import command, option
from attnreg.cli.inputs import PlatformInputs, RegistryInputs, RequestInputs, facet_value
from attnreg.cli.options import json_option, platform_options, registry_options
from attnreg.cli.output import print_json, terminal

if TYPE_CHECKING:
    from attnreg.analysis.check import Finding
    from attnreg.registry import Registry


@command(short_help="Check a registry: invariants, dead data; or a lock.")
@registry_options
@option("--lock", metavar="FILE", help="Compare the selections of a lock file with the registry instead.")
@json_option
def check(registry_inputs: RegistryInputs, lock: str | None, as_json: bool) -> None:
    """Check a registry: schema, invariants, and data that is never reached."""
    if lock is not None:
        _check_lock(registry_inputs, lock, as_json)
        return
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
        for finding in findings:
            click.echo(f"{finding}\n")
        click.echo(_summary(registry, findings))
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


def _check_lock(registry_inputs: RegistryInputs, file: str, as_json: bool) -> None:
    from pathlib import Path

    from attnreg.analysis.lock import drift, read_lock

    path = Path(file)
    lock = read_lock(path)
    registry = registry_inputs.load(default=lock["registry"])
    drifts = drift(lock, registry, path)
    if as_json:
        print_json({"registry": registry.title, "drift": [d.to_dict() for d in drifts]})
    else:
        for item in drifts:
            click.echo("\n".join(item.lines()))
        total = len(lock["selections"])
        click.echo(f"{registry.title}: {total - len(drifts)} of {total} locked selections hold")
    raise click.exceptions.Exit(1 if drifts else 0)


@command(short_help="Record which backends models get on some platforms.")
@platform_options
@option(
    "--model",
    "models",
    multiple=True,
    required=True,
    metavar="CONFIG",
    help="A model to lock; repeatable.",
    section="Model",
)
@option("--dtype", metavar="WORD", help="The dtype to compute in, instead of the configs' own.", section="Request")
@option("--kv-dtype", metavar="WORD", help="How the KV cache is stored.", section="Request")
@option(
    "--tp", type=click.IntRange(min=1), default=1, metavar="N", help="Ranks of tensor parallelism.", section="Model"
)
@option("--output", "-o", default="-", metavar="FILE", help="The file to write; by default standard output.")
@registry_options
def lock(
    registry_inputs: RegistryInputs,
    platform_inputs: PlatformInputs,
    models: tuple[str, ...],
    dtype: str | None,
    kv_dtype: str | None,
    tp: int,
    output: str,
) -> None:
    """Record which backend every layer of some models gets on some platforms.

    \b
    attnreg lock --platform rocm --model llama/ --model gpt-oss/ -o attnreg.lock
    attnreg check --lock attnreg.lock
    """
    from pathlib import Path

    from attnreg.analysis.lock import write_lock
    from attnreg.files import write_text

    registry = registry_inputs.load()
    platforms = platform_inputs.platforms(registry)
    facets = {name: word for name, word in (("dtype", dtype), ("kv_dtype", kv_dtype)) if word is not None}
    request_inputs = RequestInputs(tp=tp, facets=facets)
    layers = [request_inputs.of_model(model, registry) for model in models]
    locked = [(model.name, model.questions) for model in layers]
    data = write_lock(registry, registry.base, locked, platforms)
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    if output == "-":
        click.echo(text, nl=False)
    else:
        write_text(Path(output), text)


@command(short_help="Compare two registries: what changes, exactly.")
@click.argument("before", shell_complete=completion.registries)
@click.argument("after", shell_complete=completion.registries)
@option("--platform", metavar="WORD", help="Only this platform.", section="Platform")
@option("--arch", multiple=True, metavar="WORD", help="Only these architectures; repeatable.", section="Platform")
@option(
    "--facet",
    "facets",
    multiple=True,
    metavar="FACET=VALUE",
    help="Only where a facet has a value; repeatable.",
    section="Request",
)
@option("--model", metavar="CONFIG", help="Only what the layers of a model ask for.", section="Model")
@option(
    "--any-packages",
    is_flag=True,
    help="Let packages be missing, instead of taking all as installed.",
    section="Platform",
)
@option("--limit", default=8, show_default=True, help="Boxes to list for each pair of backends.")
@json_option
def diff(
    before: str,
    after: str,
    platform: str | None,
    arch: tuple[str, ...],
    facets: tuple[str, ...],
    model: str | None,
    any_packages: bool,
    limit: int,
    as_json: bool,
) -> None:
    """Compare two registries: exactly which configurations change their backend, and which model families change.

    BEFORE and AFTER are bundled names, directories, overlay files, or (in a git checkout) REV:DIRECTORY.
    """
    from attnreg.analysis.diff import diff as diff_registries
    from attnreg.analysis.model_changes import ModelChanges, model_changes
    from attnreg.analysis.revisions import family_texts, load_revision
    from attnreg.explain.tables import print_diff, print_model_changes

    within: dict[str, Any] = {"platform": platform} if platform else {}
    within |= {"arch": list(arch)} if arch else {}
    for name, value in (facet_value("--facet", text) for text in facets):
        within.setdefault({"feature": "features", "flag": "flags"}.get(name, name), []).append(value)
    old, new = load_revision(before), load_revision(after)
    questions = RequestInputs().of_model(model, new).questions if model else ()
    difference = diff_registries(
        old,
        new,
        within=within,
        requests=[question.request for question in questions if question.request is not None],
        any_packages=any_packages,
        limit=limit,
    )
    was, now = family_texts(before), family_texts(after)
    # registries without families of their own, as other engines' are, have none to compare
    models = model_changes(was, now) if was and now else None
    if as_json:
        print_json(difference.to_dict() | ({} if models is None else {"models": models.to_dict()}))
    else:
        print_diff(difference, terminal())
        print_model_changes(models or ModelChanges(), terminal())
    raise click.exceptions.Exit(1 if difference.changes or (models or ModelChanges()).lines() else 0)


@command(short_help="Prove what backends claim, by running them.")
@click.argument("backends", nargs=-1, metavar="[BACKEND]...", shell_complete=completion.backends)
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
        click.echo("\n".join(line for evidence in results for line in evidence.lines()))
    raise click.exceptions.Exit(1 if any(e.problems for e in results) else 0)
