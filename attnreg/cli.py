"""The attnreg command. Exit status: 0 all is well, 1 nothing is valid or something differs, 2 bad input."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from attnreg import __version__

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem
    from rich.console import Console

    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.vocabulary import Vocabulary

F = TypeVar("F", bound=Callable[..., Any])
_PIPED_WIDTH = 110
_INTEGERS = (
    "head_size",
    "num_heads",
    "num_kv_heads",
    "block_size",
    "head_size_v",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_topk",
)
_WORDS = {
    "dtype": "dtypes",
    "kv_dtype": "kv_dtypes",
    "attention": "attention",
    "attn_type": "attn_types",
    "role": "roles",
    "phase": "phases",
}


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


# options that several commands share ---------------------------------------------------------------------------------


def _completer(words: Callable[[Vocabulary], Sequence[tuple[str, str]]]) -> Any:
    """Completion from the default registry's words, with their legends."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from attnreg.loader import load_registry

        vocabulary = load_registry().vocabulary
        return [CompletionItem(w, help=h) for w, h in words(vocabulary) if w.startswith(incomplete)]

    return complete


def _complete_backend(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from attnreg.loader import load_registry

    rows = load_registry(ctx.params.get("registry")).backends.values()
    return [CompletionItem(r.name, help=r.summary) for r in rows if r.name.startswith(incomplete)]


def _words_of(name: str) -> Callable[[Vocabulary], Sequence[tuple[str, str]]]:
    return lambda v: [(w.name, w.legend) for w in {**v.words, "features": v.features, "flags": v.flags}[name].values()]


def registry_options(command: F) -> F:
    """``--registry``, ``--overlay`` and ``--trust``."""
    options = [
        click.option(
            "--registry", metavar="NAME|DIR|FILE", help="A bundled registry, a directory, or an overlay file."
        ),
        click.option("--overlay", multiple=True, metavar="FILE", help="Lay a file over the registry; repeatable."),
        click.option("--trust", multiple=True, metavar="PACKAGE", help="Let rows import modules of this package."),
    ]
    return _with_options(command, options)


def request_options(command: F) -> F:
    """An option for every facet of a request."""
    options = [click.option("--model", metavar="CONFIG", help="A config.json, or the directory that holds one.")]
    for name, group in _WORDS.items():
        options.append(
            click.option(_flag(name), metavar="WORD", shell_complete=_completer(_words_of(group)), help=f"{name}.")
        )
    options += [click.option(_flag(name), type=int, metavar="N", help=f"{name}.") for name in _INTEGERS]
    options += [
        click.option(
            "--feature",
            "features",
            multiple=True,
            metavar="WORD",
            shell_complete=_completer(_words_of("features")),
            help="A feature that the layer asks for; repeatable.",
        ),
        click.option(
            "--set", "extra", multiple=True, metavar="FACET=VALUE", help="A facet that the registry declares."
        ),
    ]
    return _with_options(command, options)


def platform_options(command: F) -> F:
    """``--platform``, ``--arch``, ``--flag`` and ``--package``."""
    archs = _completer(lambda v: [(a.name, a.family) for a in v.architectures.values()])
    options = [
        click.option(
            "--platform",
            metavar="WORD",
            shell_complete=_completer(_words_of("platforms")),
            help="cuda, rocm, xpu or cpu; this machine's, if left out.",
        ),
        click.option("--arch", multiple=True, metavar="WORD", shell_complete=archs, help="Architecture; repeatable."),
        click.option(
            "--flag",
            "flags",
            multiple=True,
            metavar="WORD",
            shell_complete=_completer(_words_of("flags")),
            help="A flag that is on; repeatable.",
        ),
        click.option(
            "--package",
            "packages",
            multiple=True,
            metavar="NAME[==VERSION]",
            help="An installed package; repeatable. Without any, every package is assumed.",
        ),
    ]
    return _with_options(command, options)


def _with_options(command: F, options: Sequence[Callable[[F], F]]) -> F:
    for option in reversed(options):
        command = option(command)
    return command


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _registry(registry: str | None, overlay: Sequence[Any], trust: Sequence[str]) -> Registry:
    from attnreg.environment import environment_problems
    from attnreg.loader import load_registry

    loaded = load_registry(registry, overlay, trust=trust)
    for problem in environment_problems(os.environ, loaded.vocabulary):
        click.echo(f"attnreg: {problem}", err=True)
    return loaded


def _console(width: int | None = None) -> Console:
    from rich.console import Console

    # a pipe has no width of its own
    return Console(
        width=width or (None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPED_WIDTH), highlight=False
    )


# explain -------------------------------------------------------------------------------------------------------------


@cli.command()
@platform_options
@request_options
@click.option("--backend", metavar="NAME", shell_complete=_complete_backend, help="Ask for this backend by name.")
@click.option("--prefer", metavar="NAME", shell_complete=_complete_backend, help="Take this backend where it is valid.")
@click.option("--deny", multiple=True, metavar="NAME", shell_complete=_complete_backend, help="Never this backend.")
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
    registry = _registry(options["registry"], overlays, options["trust"])
    platforms = _platforms(registry, options["platform"], options["arch"], options["flags"], options["packages"])
    questions, title, notes = _questions(options, platforms, registry)
    explanation = explain_questions(
        questions, platforms, registry, backend=options["backend"], title=title, notes=notes
    )
    if options["as_json"]:
        click.echo(json.dumps(explanation.to_dict(), indent=2))
    else:
        render(explanation, _console())
    raise click.exceptions.Exit(0 if explanation.found else 1)


def _platforms(
    registry: Registry, platform: str | None, archs: Sequence[str], flags: Sequence[str], packages: Sequence[str]
) -> list[Platform]:
    """The platforms that the options name: each architecture of one, or this machine's first device."""
    from attnreg.errors import did_you_mean
    from attnreg.platforms import Platform

    vocabulary = registry.vocabulary
    known = vocabulary.words["platforms"]
    if platform is not None and platform not in known:
        raise click.UsageError(f"unknown platform {platform!r}; {did_you_mean(platform, known)}")
    for arch in archs:
        if arch not in vocabulary.architectures:
            raise click.UsageError(f"unknown architecture {arch!r}; {did_you_mean(arch, vocabulary.architectures, 20)}")
    installed = {name: version for name, _, version in (p.partition("==") for p in packages)} if packages else None
    for name in installed or ():
        if name not in vocabulary.packages:
            raise click.UsageError(f"unknown package {name!r}; {did_you_mean(name, vocabulary.packages)}")
    if platform is None and not archs:
        here = Platform.detect(vocabulary)
        found = installed if installed is not None else here.packages
        return [Platform(platform=here.platform, arch=here.arch, flags=here.flags | set(flags), packages=found)]  # type: ignore[arg-type]
    names = archs or [a.name for a in vocabulary.architectures_of(platform or "")]
    return [
        Platform(
            platform=platform or vocabulary.architectures[name].platform,
            arch=name,
            flags=frozenset(flags),
            packages=installed,  # type: ignore[arg-type]
        )
        for name in names
    ]


def _questions(options: dict[str, Any], platforms: Sequence[Platform], registry: Registry) -> Any:
    """The questions that the options ask, the line that names them, and what was assumed."""
    from attnreg.explain import PLATFORM_NAMES, Question, platform_title
    from attnreg.request import AttentionRequest

    where = PLATFORM_NAMES.get(platforms[0].platform, platforms[0].platform)
    if len(platforms) == 1:
        where = f"{where} {platform_title(platforms[0], registry)}"
    given = {name: options[name] for name in (*_WORDS, *_INTEGERS) if options[name] is not None}
    if given.get("kv_dtype") == "none":
        given["kv_dtype"] = None
    features = frozenset(options["features"])
    extra = dict(_pair(item) for item in options["extra"])
    if options["model"] is None:
        request = AttentionRequest(**{"head_size": 128, **given}, features=features, extra=extra)  # type: ignore[arg-type]
        assumed = [] if "head_size" in given else ["no --head-size and no --model: head_size 128 was assumed"]
        title = f"{where} · registry {registry.title}"
        return [Question(request, _request_label(request))], title, assumed
    return _model_questions(options["model"], given, features, extra, where, registry)


def _model_questions(
    model: str, given: dict[str, Any], features: frozenset[str], extra: dict[str, Any], where: str, registry: Registry
) -> Any:
    from attnreg.explain import Question
    from attnreg.model_config import describe_indices, requests_from_model

    special = {k: given.pop(k) for k in ("dtype", "kv_dtype", "role") if k in given}
    layers = requests_from_model(model, **special)
    questions = []
    for group in layers.groups:
        count = f"{len(group.layers)} layer{'s' if len(group.layers) != 1 else ''}"
        label = f"{count} ({describe_indices(group.layers)})"
        if group.request is None:
            continue
        changes = {**given, "features": group.request.features | features, "extra": extra}
        request = dataclasses.replace(group.request, **changes)
        questions.append(Question(request, group.label, label))
        if request.attention.startswith("mla") and "phase" not in given and request.qk_nope_head_dim is not None:
            questions.append(Question(request.expanded(), f"{group.label} · prefill", label))
    number = sum(len(g.layers) for g in layers.groups)
    title = f"{layers.name} · {number} layers · {layers.dtype} · {where} · registry {registry.title}"
    return questions, title, list(layers.assumptions)


def _request_label(request: Any) -> str:
    heads = (
        f"{request.num_heads}/{request.num_kv_heads or request.num_heads} heads of "
        if request.num_heads
        else "head size "
    )
    parts = [f"{heads}{request.head_size}", request.dtype, f"KV cache {request.kv_dtype or 'not given'}"]
    parts += [
        v
        for v, usual in (
            (request.attention, "mha"),
            (request.attn_type, "decoder"),
            (request.role, "target"),
            (request.phase, "any"),
        )
        if v != usual
    ]
    parts += sorted(request.features)
    return " · ".join(parts)


def _pair(item: str) -> tuple[str, Any]:
    name, equals, text = item.partition("=")
    if not equals:
        raise click.UsageError(f"--set {item}: expected FACET=VALUE")
    values: dict[str, Any] = {"true": True, "false": False, "null": None}
    return name, values[text] if text in values else int(text) if text.lstrip("-").isdigit() else text


# list, show ----------------------------------------------------------------------------------------------------------


@cli.command(name="list")
@platform_options
@registry_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(**options: Any) -> None:
    """List the backends: for a platform or an architecture, in the orders that apply there."""
    from attnreg.render import list_backends

    registry = _registry(options["registry"], options["overlay"], options["trust"])
    platforms = None
    if options["platform"] or options["arch"]:
        platforms = _platforms(registry, options["platform"], options["arch"], options["flags"], options["packages"])
    list_backends(registry, platforms, _console(), as_json=options["as_json"])


@cli.command()
@click.argument("backend", shell_complete=_complete_backend)
@registry_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(backend: str, **options: Any) -> None:
    """Show everything that the registry says of one BACKEND."""
    from attnreg.errors import did_you_mean
    from attnreg.render import show_backend

    registry = _registry(options["registry"], options["overlay"], options["trust"])
    if backend not in registry.backends:
        raise click.UsageError(f"unknown backend {backend!r}; {did_you_mean(backend, registry.backends, 40)}")
    show_backend(registry, registry.backends[backend], _console(), as_json=options["as_json"])


# check, diff, doctor -------------------------------------------------------------------------------------------------


@cli.command()
@registry_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(**options: Any) -> None:
    """Check a registry: schema, invariants, data that is never reached, and (in a checkout) the generated docs."""
    from attnreg.docs import stale_docs
    from attnreg.proofs import check as findings_of

    registry = _registry(options["registry"], options["overlay"], options["trust"])
    findings = findings_of(registry)
    stale = (
        stale_docs() if not (options["registry"] or options["overlay"] or os.environ.get("ATTNREG_REGISTRY")) else None
    )
    if options["as_json"]:
        data = [{"kind": f.kind, "where": str(f.where), "message": f.message, "help": f.help} for f in findings]
        click.echo(json.dumps({"registry": registry.title, "findings": data, "stale_docs": stale}, indent=2))
    else:
        for finding in findings:
            click.echo(f"{finding}\n")
        if stale:
            click.echo(stale)
        orders = sum(map(len, registry.orders.values()))
        held = len(registry.invariants) - sum(f.kind == "violated invariant" for f in findings)
        click.echo(
            f"{registry.title}: {len(registry.backends)} backends, {orders} orders, "
            f"{held} of {len(registry.invariants)} invariants hold, {len(findings)} finding{'s' * (len(findings) != 1)}"
            + ("" if stale is None else ", docs are stale" if stale else ", docs are up to date")
        )
    raise click.exceptions.Exit(1 if findings or stale else 0)


@cli.command()
@click.argument("before")
@click.argument("after")
@click.option("--platform", metavar="WORD", help="Only this platform.")
@click.option("--arch", multiple=True, metavar="WORD", help="Only these architectures; repeatable.")
@click.option(
    "--facet", "facets", multiple=True, metavar="FACET=VALUE", help="Only where a facet has a value; repeatable."
)
@click.option("--limit", default=8, show_default=True, help="Boxes to list for each pair of backends.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff(before: str, after: str, **options: Any) -> None:
    """Compare two registries: exactly which configurations change their backend.

    BEFORE and AFTER are bundled names, directories, overlay files, or (in a git checkout) REV:DIRECTORY.
    """
    from attnreg.diff import diff as difference_of
    from attnreg.render import print_diff
    from attnreg.revisions import load_revision

    within: dict[str, Any] = {}
    if options["platform"]:
        within["platform"] = options["platform"]
    if options["arch"]:
        within["arch"] = list(options["arch"])
    for name, value in map(_pair, options["facets"]):
        within.setdefault({"feature": "features", "flag": "flags"}.get(name, name), []).append(value)
    difference = difference_of(load_revision(before), load_revision(after), within=within, limit=options["limit"])
    if options["as_json"]:
        click.echo(json.dumps(difference.to_dict(), indent=2))
    else:
        print_diff(difference, _console())
    raise click.exceptions.Exit(1 if difference.changes else 0)


@cli.command()
@registry_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(**options: Any) -> None:
    """Look at this machine: devices, packages, flags, and which backends are usable here and why not."""
    from attnreg.doctor import examine, print_report

    registry = _registry(options["registry"], options["overlay"], options["trust"])
    report = examine(registry)
    if options["as_json"]:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        print_report(report, _console())


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes attnreg's words in a SHELL: eval "$(attnreg completion bash)"."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(kind(cli, {}, "attnreg", "_ATTNREG_COMPLETE").source())
