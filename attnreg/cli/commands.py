"""The attnreg command. Exit status: 0 all is well, 1 nothing is valid or something differs, 2 bad input."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from attnreg.cli.options import (
    complete_backend,
    load,
    pair,
    platform_options,
    platforms_of,
    questions_of,
    registry_options,
    request_options,
    terminal,
)
from attnreg.version import __version__

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Registry


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script: the exit status, with problems on stderr and never a traceback for them."""
    try:
        # without standalone mode click returns the status of `Exit`
        return cli(arguments, prog_name="attnreg", standalone_mode=False) or 0
    except click.ClickException as e:
        e.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # the reader went away; leave quietly, as other commands do
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ValueError as e:
        click.echo(f"attnreg: {e}", err=True)
        return 2


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="attnreg")
def cli() -> None:
    """Which attention kernel runs, and why: backends, capabilities and priorities as data."""


def _print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2))


# explain -------------------------------------------------------------------------------------------------------------


@cli.command()
@platform_options
@request_options
@click.option("--backend", metavar="NAME", shell_complete=complete_backend, help="Ask for this backend by name.")
@click.option("--prefer", metavar="NAME", shell_complete=complete_backend, help="Take this backend where it is valid.")
@click.option("--deny", multiple=True, metavar="NAME", shell_complete=complete_backend, help="Never this backend.")
@registry_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(**options: Any) -> None:
    """Say which backend each layer gets, and why not the others.

    \b
    attnreg explain --platform rocm --model gpt-oss-120b/config.json
    attnreg explain --arch sm90 --head-size 128 --kv-dtype fp8 --feature sinks
    """
    from attnreg.explain import explain as explain_questions
    from attnreg.explain import render

    overlays: list[Any] = list(options["overlay"])
    choices = [{"prefer": options["prefer"]}] if options["prefer"] else []
    choices += [{"deny": list(options["deny"])}] if options["deny"] else []
    if choices:
        overlays.append({"choices": choices})
    registry = load(options["registry"], overlays, options["trust"])
    platforms = platforms_of(registry, options["platform"], options["arch"], options["flags"], options["packages"])
    questions, title, notes, memory = questions_of(options, platforms, registry)
    explanation = explain_questions(
        questions, platforms, registry, backend=options["backend"], title=title, notes=notes, memory=memory
    )
    if options["as_json"]:
        _print_json(explanation.to_dict())
    else:
        render(explanation, terminal())
    raise click.exceptions.Exit(0 if explanation.found else 1)


# list, show ----------------------------------------------------------------------------------------------------------


@cli.command(name="list", short_help="List backends, and the orders of a platform.")
@platform_options
@registry_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(**options: Any) -> None:
    """List the backends: for a platform or an architecture, in the orders that apply there."""
    from attnreg.explain.tables import backend_dict, backends_on, print_backends

    registry = load(options["registry"], options["overlay"], options["trust"])
    platforms: Sequence[Platform] = ()
    if options["platform"] or options["arch"]:
        platforms = platforms_of(registry, options["platform"], options["arch"], options["flags"], options["packages"])
    if options["as_json"]:
        _print_json([backend_dict(row) for row in backends_on(registry, platforms)])
    else:
        print_backends(registry, platforms, terminal())


@cli.command(short_help="Show one backend, or the rule of one model family.")
@click.argument("name", metavar="BACKEND|MODEL_TYPE", shell_complete=complete_backend)
@registry_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(name: str, **options: Any) -> None:
    """Show everything that the registry says of one backend, or how the configs of a model family are read."""
    from attnreg.errors import did_you_mean
    from attnreg.explain.families import family_dict, print_family
    from attnreg.explain.tables import backend_dict, print_backend
    from attnreg.models.reader import bundled_families

    families = bundled_families()
    if name in families:
        if options["as_json"]:
            _print_json(family_dict(families, name))
        else:
            print_family(families, name, terminal())
        return
    registry = load(options["registry"], options["overlay"], options["trust"])
    if name not in registry.backends:
        known = {**registry.backends, **dict.fromkeys(families)}
        raise click.UsageError(f"no backend and no model family {name!r}; {did_you_mean(name, known, 40)}")
    if options["as_json"]:
        _print_json(backend_dict(registry.backends[name]))
    else:
        print_backend(registry, registry.backends[name], terminal())


@cli.command(short_help="List the model families whose configs are known.")
@click.argument("words", nargs=-1, metavar="[WORD]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(words: Sequence[str], as_json: bool) -> None:
    """List the model families that are known, or those whose model_type has one of the WORDs in it."""
    from attnreg.explain.families import family_dict, print_families
    from attnreg.models.reader import bundled_families

    families = bundled_families()
    names = [name for name in families if not words or any(word in name for word in words)]
    if not names:
        raise click.UsageError(f"no model family has {' or '.join(map(repr, words))} in its name")
    if as_json:
        _print_json([family_dict(families, name) for name in names])
    else:
        print_families(families, names, terminal())


# check, diff, doctor -------------------------------------------------------------------------------------------------


@cli.command(short_help="Check a registry: invariants, dead data; or a lock.")
@registry_options
@click.option("--lock", metavar="FILE", help="Hold the selections of a lock file against the registry instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(**options: Any) -> None:
    """Check a registry: schema, invariants, and data that is never reached."""
    if options["lock"]:
        _check_lock(options)
    from attnreg.analysis.check import check as findings_of
    from attnreg.errors import RegistryError
    from attnreg.models.reader import bundled_families

    registry = load(options["registry"], options["overlay"], options["trust"])
    findings = findings_of(registry)
    ours = not (options["registry"] or options["overlay"] or os.environ.get("ATTNREG_REGISTRY"))
    if ours and (problems := bundled_families().check()):
        raise RegistryError(problems)
    if options["as_json"]:
        data = [{"kind": f.kind, "where": str(f.where), "message": f.message, "help": f.help} for f in findings]
        _print_json({"registry": registry.title, "findings": data})
    else:
        for finding in findings:
            click.echo(f"{finding}\n")
        orders = sum(map(len, registry.orders.values()))
        held = len(registry.kept) - sum(f.kind == "violated invariant" for f in findings)
        click.echo(
            f"{registry.title}: {len(registry.backends)} backends, {orders} orders, "
            f"{held} of {len(registry.invariants)} invariants hold, {_counted(findings, registry)}"
        )
    # another engine's faults are worth knowing; only our own are ours to mend
    raise click.exceptions.Exit(1 if findings and registry.imports else 0)


def _check_lock(options: dict[str, Any]) -> None:
    from pathlib import Path

    from attnreg.analysis.lock import drift, read_lock

    path = Path(options["lock"])
    lock = read_lock(path)
    registry = load(options["registry"] or lock["registry"], options["overlay"], options["trust"])
    drifts = drift(lock, registry, path)
    if options["as_json"]:
        _print_json({"registry": registry.title, "drift": [d.to_dict() for d in drifts]})
    else:
        for item in drifts:
            click.echo("\n".join(item.lines()))
        total = len(lock["selections"])
        click.echo(f"{registry.title}: {total - len(drifts)} of {total} locked selections hold")
    raise click.exceptions.Exit(1 if drifts else 0)


@cli.command(short_help="Write down what models get on some platforms.")
@platform_options
@click.option("--model", "models", multiple=True, required=True, metavar="CONFIG", help="A model to lock; repeatable.")
@click.option("--dtype", metavar="WORD", help="What the models compute in, where it is not what their configs say.")
@click.option("--kv-dtype", metavar="WORD", help="How the KV cache is stored.")
@click.option("--tp", type=click.IntRange(min=1), default=1, metavar="N", help="Ranks of tensor parallelism.")
@click.option("--output", "-o", default="-", metavar="FILE", help="Where to write; standard output, if left out.")
@registry_options
def lock(**options: Any) -> None:
    """Write down which backend every layer of some models gets on some platforms.

    \b
    attnreg lock --platform rocm --model llama/ --model gpt-oss/ -o attnreg.lock
    attnreg check --lock attnreg.lock
    """
    from pathlib import Path

    from attnreg.analysis.lock import write_lock
    from attnreg.models.questions import ModelOptions, model_questions

    registry = load(options["registry"], options["overlay"], options["trust"])
    platforms = platforms_of(registry, options["platform"], options["arch"], options["flags"], options["packages"])
    given = {k: options[k] for k in ("dtype", "kv_dtype") if options[k] is not None}
    models = []
    for model in options["models"]:
        asked = model_questions(model, ModelOptions(given=given, ranks=options["tp"]), registry)
        models.append((asked.name, asked.questions))
    source = options["registry"] or os.environ.get("ATTNREG_REGISTRY") or "default"
    text = json.dumps(write_lock(registry, source, models, platforms), indent=1, ensure_ascii=False) + "\n"
    if options["output"] == "-":
        click.echo(text, nl=False)
    else:
        Path(options["output"]).write_text(text)


def _counted(findings: Sequence[Any], registry: Registry) -> str:
    noun = "finding" if registry.imports else "warning"
    known = f" ({len(registry.known)} known)" if registry.known else ""
    return f"{len(findings)} {noun}{'s' * (len(findings) != 1)}{known}"


@cli.command(short_help="Compare two registries: what changes, exactly.")
@click.argument("before")
@click.argument("after")
@click.option("--platform", metavar="WORD", help="Only this platform.")
@click.option("--arch", multiple=True, metavar="WORD", help="Only these architectures; repeatable.")
@click.option(
    "--facet", "facets", multiple=True, metavar="FACET=VALUE", help="Only where a facet has a value; repeatable."
)
@click.option("--model", metavar="CONFIG", help="Only what the layers of a model ask for.")
@click.option("--any-packages", is_flag=True, help="Let packages be missing, instead of taking all as installed.")
@click.option("--limit", default=8, show_default=True, help="Boxes to list for each pair of backends.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff(before: str, after: str, **options: Any) -> None:
    """Compare two registries: exactly which configurations change their backend.

    BEFORE and AFTER are bundled names, directories, overlay files, or (in a git checkout) REV:DIRECTORY.
    """
    from attnreg.analysis.diff import diff as difference_of
    from attnreg.analysis.revisions import load_revision
    from attnreg.explain.tables import print_diff
    from attnreg.models.questions import ModelOptions, model_questions

    within: dict[str, Any] = {}
    if options["platform"]:
        within["platform"] = options["platform"]
    if options["arch"]:
        within["arch"] = list(options["arch"])
    for name, value in map(pair, options["facets"]):
        within.setdefault({"feature": "features", "flag": "flags"}.get(name, name), []).append(value)
    old, new = load_revision(before), load_revision(after)
    questions = model_questions(options["model"], ModelOptions(), new).questions if options["model"] else ()
    difference = difference_of(
        old,
        new,
        within=within,
        requests=[question.request for question in questions if question.request is not None],
        any_packages=options["any_packages"],
        limit=options["limit"],
    )
    if options["as_json"]:
        _print_json(difference.to_dict())
    else:
        print_diff(difference, terminal())
    raise click.exceptions.Exit(1 if difference.changes else 0)


@cli.command(short_help="Look at this machine, and what is usable on it.")
@registry_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(**options: Any) -> None:
    """Look at this machine: devices, packages, flags, and which backends are usable here and why not."""
    from attnreg.machine.doctor import examine, print_report

    registry = load(options["registry"], options["overlay"], options["trust"])
    report = examine(registry)
    if options["as_json"]:
        _print_json(report.to_dict())
    else:
        print_report(report, terminal())


@cli.command(short_help="Prove what backends claim, by running them.")
@click.argument("backends", nargs=-1, metavar="[BACKEND]...", shell_complete=complete_backend)
@platform_options
@registry_options
@click.option("--device", metavar="NAME", help="Where to run, as PyTorch calls it; the platform's, if left out.")
@click.option(
    "--size", type=click.Choice(["claims", "pairs"]), default="pairs", show_default=True, help="How many cases."
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Processes that try cases side by side.")
@click.option("--record", metavar="FILE|DIR", help="Keep the evidence in a file, or in a directory's <device>.json.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(backends: Sequence[str], **options: Any) -> None:
    """Prove what backends claim: cases made from the registry's rows, run and held against float64. Exit 1: refuted.

    Without a BACKEND, all that have a kernel module for this machine. Needs PyTorch.
    """
    registry = load(options["registry"], options["overlay"], options["trust"])
    platforms = platforms_of(registry, *(options[name] for name in ("platform", "arch", "flags", "packages")))
    if len(platforms) != 1:
        raise click.UsageError("verify runs on one device; give one --arch")
    try:
        from attnreg.conformance.verify import verify as verified
    except ImportError as e:
        raise click.ClickException(f"verify runs the backends and needs PyTorch: {e}") from None
    given = {name: options[name] for name in ("device", "size", "record", "jobs")}
    found = verified(backends, registry=registry, platform=platforms[0], **given)
    if options["as_json"]:
        _print_json({e.backend: {**e.to_dict(), "problems": e.problems} for e in found})
    else:
        click.echo("\n".join(line for evidence in found for line in evidence.lines()))
    raise click.exceptions.Exit(1 if any(e.problems for e in found) else 0)


@cli.command(short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes attnreg's words in a SHELL: eval "$(attnreg completion bash)"."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(kind(cli, {}, "attnreg", "_ATTNREG_COMPLETE").source())
