"""The commands that print answers from the registry, the machine and engines: `explain`, `list`, `show`, `why`, ..."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from attnreg.cli.command import argument, command, option
from attnreg.cli.inputs import BackendInputs, Inputs, PlatformInputs, RegistryInputs, RequestInputs, read_inputs
from attnreg.cli.options import (
    backend_options,
    json_option,
    outside_option,
    platform_options,
    registry_options,
    request_options,
)
from attnreg.cli.output import command_line, print_json, status, terminal
from attnreg.cli.refusals import BadInput
from attnreg.cli.screen.links import cite
from attnreg.compile.inputs.configs import find_config, known_config
from attnreg.language.facets import ordinary

if TYPE_CHECKING:
    from attnreg.cli.upgrades.commands import Upgraded
    from attnreg.engines.logs.report import LogReport
    from attnreg.explain.answers import Explanation
    from attnreg.platforms import Platform
    from attnreg.registry import Registry

# the architectures in the table of `attnreg defaults` without --arch
_ARCHS = ("sm80", "sm89", "sm90", "sm100", "sm103", "sm120")


@command()
@platform_options
@request_options
@backend_options
@registry_options
@option("--selector", is_flag=True, help="Ask the engine's selector alone, without what its start changes.")
@option("--brief", is_flag=True, help="Print the winners alone; one line, where all layers agree.")
@option("--since", metavar="RELEASE", help="Also say what changed since this release of the engine.")
@json_option
def explain(
    registry_inputs: RegistryInputs,
    platform_inputs: PlatformInputs,
    request_inputs: RequestInputs,
    backend_inputs: BackendInputs,
    brief: bool,
    since: str | None,
    as_json: bool,
) -> None:
    """Say which backend each layer gets, and why not the others.

    \b
    attnreg explain --engine vllm --arch H100 --model gpt-oss-120b
    attnreg explain --arch sm90 --head-size 128 --kv-dtype fp8 --feature sinks

    The exit status is 1 if a layer gets no backend or the run does not start. It is 3 if the backend of a layer or the
    bytes of its cache are not known.
    """
    from attnreg.explain import render

    if brief and as_json:
        raise BadInput("--brief is for people, and --json prints everything", "give one of them")
    if since is not None:
        _validate_since(brief, registry_inputs, backend_inputs)
    inputs, explanation = explained(registry_inputs, platform_inputs, request_inputs, backend_inputs)
    changed = None if since is None else _changed(since, inputs, registry_inputs, platform_inputs, request_inputs)
    if as_json:
        detected = None if platform_inputs.named else inputs.platforms[0]
        more = {} if changed is None else {"since": changed.to_dict()}
        print_json({"command": command_line(click.get_current_context(), detected), **explanation.to_dict(), **more})
    else:
        render(explanation, terminal(), brief=brief)
        if changed is not None:
            click.echo()
            changed.print()
    raise click.exceptions.Exit(status(not explanation.found, not explanation.known))


def _validate_since(brief: bool, registry_inputs: RegistryInputs, backend_inputs: BackendInputs) -> None:
    if brief:
        raise BadInput("--brief prints the winners alone, and --since prints what changed", "give one of them")
    if backend_inputs.words or registry_inputs.overlay or registry_inputs.selector:
        message = "--since compares what two releases choose by themselves"
        raise BadInput(message, "leave out --overlay, --selector and the options that name backends")


def _changed(
    since: str,
    inputs: Inputs,
    registry_inputs: RegistryInputs,
    platform_inputs: PlatformInputs,
    request_inputs: RequestInputs,
) -> Upgraded:
    """What changed between an earlier release and the one that was asked. Raises `BadInput` for another registry."""
    from attnreg.cli.names import compared_releases, is_later
    from attnreg.cli.upgrades.commands import upgraded

    name = registry_inputs.registry or inputs.registry.name
    if inputs.registry.base == "default":
        raise BadInput("--since needs a release of an engine", "name the newer one: --engine vllm-0.33")
    earlier, later = compared_releases(since, name)
    if earlier == later or is_later(earlier, later):
        raise BadInput(f"--since names {earlier}, and {later} is no later release", "name an earlier release")
    model = request_inputs.model
    # without a model, `upgrade` compares the bundled ones, and `explain` asks one request
    models, size = ((model,), {}) if model else ((), {"head_size": ordinary("head_size")})
    facets = {**size, **request_inputs.facets}
    asked = replace(request_inputs, model=None, models=models, lengths=(), facets=facets)
    return upgraded(earlier, later, platform_inputs, asked, allow_outside=registry_inputs.allow_outside)


def explained(
    registry_inputs: RegistryInputs,
    platform_inputs: PlatformInputs,
    request_inputs: RequestInputs,
    backend_inputs: BackendInputs,
) -> tuple[Inputs, Explanation]:
    """What the options of `attnreg explain` ask, and its answer. Raises `BadInput` for what there is not."""
    from attnreg.explain import explain as explain_all
    from attnreg.selection.point import refuse_unknown_kv_dtype

    inputs = read_inputs(registry_inputs, platform_inputs, request_inputs, backend_inputs)
    if registry_inputs.selector and not inputs.registry.name.endswith("/selector"):
        raise BadInput(
            f"--selector leaves nothing out: {inputs.registry.title} says nothing of a start", "leave it out"
        )
    if inputs.memory is not None:
        asked = request_inputs.options()
        refuse_unknown_kv_dtype((asked.given, asked.draft_given), inputs.registry)
    explanation = explain_all(
        inputs.questions,
        inputs.platforms,
        inputs.registry,
        **backend_inputs.by_option,
        title=inputs.title,
        notes=inputs.notes,
        memory=inputs.memory,
    )
    if inputs.memory is None or not inputs.memory.whole:
        return inputs, explanation
    from attnreg.planning.ask import judged

    options, named = request_inputs.options(), backend_inputs.by_option
    return inputs, judged(explanation, inputs.memory, options, inputs.platforms, inputs.registry, named)


@command(short_help="Print the backend that engines take by default.")
@option(
    "--release", "releases", multiple=True, metavar="RELEASE", help="Such as vllm-0.33; all, if left out; repeatable."
)
@option(
    "--arch",
    "archs",
    multiple=True,
    metavar="SM",
    help="An NVIDIA GPU's, such as sm90; repeatable.",
    section="Platform",
)
@option(
    "--architecture", "architectures", multiple=True, metavar="CLASS", help="Of models: LlamaForCausalLM; repeatable."
)
@option("--aiconfigurator", is_flag=True, help="Print YAML that aiconfigurator reads.")
@json_option
def defaults(
    releases: tuple[str, ...],
    archs: tuple[str, ...],
    architectures: tuple[str, ...],
    aiconfigurator: bool,
    as_json: bool,
) -> None:
    """Print which backend engines take by default: engine x release x SM x architecture of a model.

    \b
    attnreg defaults --release sglang-0.5 --architecture GptOssForCausalLM
    attnreg defaults --aiconfigurator > attention_lane_defaults.yaml
    """
    from dataclasses import asdict

    from attnreg.compile.inputs.bundled import help_for_registry, release_name
    from attnreg.engines.defaults import defaults as table_of
    from attnreg.engines.defaults import known_releases
    from attnreg.explain.layout import Column, emit, table
    from attnreg.loader import default_registry

    if aiconfigurator and as_json:
        raise BadInput("--aiconfigurator prints YAML, and --json prints JSON", "give one of them")
    known = known_releases()
    names = [release_name(name) for name in releases] or known
    for given, name in zip(releases, names, strict=False):
        if name not in known:
            raise BadInput(f"{given} is no bundled release of an engine", help_for_registry(given, known))
    platforms = PlatformInputs(arch=archs or _ARCHS).platforms(default_registry())
    for platform in platforms:
        if platform.platform != "cuda":
            raise BadInput(f"{platform.arch} is no NVIDIA GPU, and the table is by SM", "name one such as sm90")
    asked = list(dict.fromkeys(platform.arch for platform in platforms))
    found = table_of(names, asked, architectures)
    if not found.rows:
        raise BadInput("; ".join(found.notes), "architectures are those in a config.json: LlamaForCausalLM")
    for note in found.notes:
        click.echo(f"attnreg: {note}", err=True)
    if as_json:
        print_json({"rows": [asdict(row) for row in found.rows]})
    elif aiconfigurator:
        click.echo(found.aiconfigurator(), nl=False)
    else:
        console = terminal()
        columns = [Column("release", "bold"), Column("architecture"), *(Column(name) for name in asked)]
        rows: dict[tuple[str, str], list[str]] = {}
        for row in found.rows:
            rows.setdefault((row.release, row.architecture), [row.release, row.architecture]).append(
                row.title if row.decode is not None else "not known" if row.error.startswith("not known") else "none"
            )
        emit(table(columns, list(rows.values()), console.width), console)


@command(short_help="Explain what an engine's log says of its attention backends.")
@argument("lines", nargs=-1, metavar="[LINE]...", completes="files")
@option(
    "--engine",
    "--registry",
    "registry",
    metavar="RELEASE",
    help="The release that logged them, if the log does not name it: vllm-0.33.",
)
@option(
    "--arch", metavar="WORD", help="The GPU that the engine ran on, if the log does not name it.", section="Platform"
)
@option(
    "--model",
    metavar="CONFIG",
    help="The config.json of the run's model, if its name does not find it.",
    section="Model",
)
@option("--follow", is_flag=True, help="Explain each line as it comes; wait for more at the end of a file.")
@json_option
@outside_option
def why(
    lines: tuple[str, ...],
    registry: str | None,
    arch: str | None,
    model: str | None,
    follow: bool,
    as_json: bool,
    allow_outside: bool,
) -> None:
    """Explain what an engine's log says of its attention backends.

    A LINE may also be the name of a log; without one, a log is read from standard input. Release, model, GPU, ranks and
    dtypes are taken from the log.

    \b
    attnreg why server.log
    attnreg why "Attention backend not specified. Use fa3 backend by default."
    vllm serve ... 2>&1 | attnreg why --follow
    """
    from attnreg.engines.logs.inputs import logs_of
    from attnreg.engines.logs.printing import LogPrinter
    from attnreg.engines.logs.reading.lines import plain
    from attnreg.engines.logs.report import LogReport

    around = _LogSurroundings(arch, model, allow_outside)
    printer = LogPrinter(terminal, _write_line, as_json=as_json, follow=follow)
    reports, total, filled = [], 0, False
    for log in logs_of(lines, sys.stdin, follow=follow):
        reports.append(report := LogReport(around, registry))
        streams = follow or log.streams
        printer.begin(log.name, several=len(lines) > 1, streams=streams)
        try:
            for line in log:
                found = report.read(plain(line, report.known.messages), now=streams)
                if found is not None:
                    printer.line(found)
            for found in report.explain_all():
                printer.line(found)
        finally:
            # a server's log ends by Ctrl-C
            printer.end(report)
        total, filled = total + log.count, filled or log.filled
    printer.finish()
    _refuse_lines(lines, reports, total, filled)


def _write_line(text: str) -> None:
    """Print a line at once, also into a pipe."""
    click.echo(text)
    sys.stdout.flush()


class _LogSurroundings:
    """The registries, the GPU and the configs that the options of `attnreg why` name; each registry is loaded once."""

    def __init__(self, arch: str | None, model: str | None, allow_outside: bool) -> None:
        self._arch, self._allow_outside = arch, allow_outside
        self._registries: dict[str, Registry] = {}
        self._config = find_config(model) if model is not None else None

    def load(self, registry: str) -> Registry:
        """The registry of a name."""
        from attnreg.loader import load_registry

        if registry not in self._registries:
            self._registries[registry] = load_registry(registry, allow_outside=self._allow_outside)
            cite(self._registries[registry].files)
        return self._registries[registry]

    def platform(self, registry: Registry, name: str | None) -> Platform | None:
        """The platform of ``--arch``, else the one of a product. Raises `BadInput` for an unknown ``--arch``."""
        if self._arch is not None:
            return PlatformInputs(arch=(self._arch,)).platforms(registry)[0]
        if name is None or registry.vocabulary.architecture(name) is None:
            return None
        return PlatformInputs(arch=(name,)).platforms(registry)[0]

    def config(self, names: list[str]) -> tuple[str, str] | None:
        """The config of ``--model``, else one in the hub's cache or an example with one of some names, and a note."""
        return (self._config, "") if self._config is not None else known_config(names)


def _refuse_lines(arguments: tuple[str, ...], reports: list[LogReport], total: int, filled: bool) -> None:
    """Raises `BadInput` if no line of the logs was explained, or not every line about attention was."""
    from attnreg.engines.logs.inputs import absent_log

    found = [line for report in reports for line in report.entries]
    if not filled:
        where = "the lines given are" if arguments else "standard input is"
        raise BadInput(f"{where} empty", "give lines of a log, the name of one, or pipe one into the command")
    if not found:
        absent = absent_log(arguments)
        if absent is not None:
            raise BadInput(f"{absent}: no such file", "give the name of a log, or lines of one in quotes")
        what = "the line is not" if total == 1 else f"none of the {total:,} lines is"
        example = "vLLM says `Using X attention backend out of potential backends: [...]`"
        raise BadInput(f"{what} one that engines are known to log of an attention backend", example)
    passed = sum(report.passed_over for report in reports)
    if passed:
        what = f"more than {len(found):,} different lines about attention: {passed:,} were passed over"
        raise BadInput(f"the log has {what}", "give a part of the log")
    refused = sum(bool(line.reason) for line in found)
    if refused:
        what = f"{refused:,} of {len(found):,} lines {'is' if refused == 1 else 'are'} not explained"
        raise BadInput(what, "the reason stands below each")
