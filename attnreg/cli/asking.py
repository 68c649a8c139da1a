"""The commands that print what the registry and the machine hold: `explain`, `list`, `show`, `models`, `doctor`."""

from __future__ import annotations

import click

from attnreg.cli.again import command_line
from attnreg.cli.command import argument, command, option
from attnreg.cli.inputs import BackendInputs, PlatformInputs, RegistryInputs, RequestInputs, read_inputs
from attnreg.cli.options import backend_options, json_option, platform_options, registry_options, request_options
from attnreg.cli.output import print_json, terminal
from attnreg.cli.refusals import BadInput


@command()
@platform_options
@request_options
@backend_options
@registry_options
@option("--selector", is_flag=True, help="Ask the engine's selector alone, without what its start changes.")
@option("--brief", is_flag=True, help="Print the winners alone; one line, where all layers agree.")
@json_option
def explain(
    registry_inputs: RegistryInputs,
    platform_inputs: PlatformInputs,
    request_inputs: RequestInputs,
    backend_inputs: BackendInputs,
    brief: bool,
    as_json: bool,
) -> None:
    """Say which backend each layer gets, and why not the others.

    \b
    attnreg explain --platform rocm --model gpt-oss-120b/config.json
    attnreg explain --arch sm90 --head-size 128 --kv-dtype fp8 --feature sinks
    """
    from attnreg.explain import explain as explain_all
    from attnreg.explain import render

    if brief and as_json:
        raise BadInput("--brief is for people, and --json prints everything", "give one of them")
    inputs = read_inputs(registry_inputs, platform_inputs, request_inputs, backend_inputs)
    if registry_inputs.selector and not inputs.registry.name.endswith("/selector"):
        raise BadInput(
            f"--selector leaves nothing out: {inputs.registry.title} says nothing of a start", "leave it out"
        )
    explanation = explain_all(
        inputs.questions,
        inputs.platforms,
        inputs.registry,
        backend=backend_inputs.backend,
        draft_backend=backend_inputs.draft_backend,
        title=inputs.title,
        notes=inputs.notes,
        memory=inputs.memory,
    )
    if as_json:
        detected = None if platform_inputs.named else inputs.platforms[0]
        print_json({"command": command_line(click.get_current_context(), detected), **explanation.to_dict()})
    else:
        render(explanation, terminal(), brief=brief)
    raise click.exceptions.Exit(0 if explanation.found else 1)


@command(name="list", short_help="List backends, and the orders of a platform.")
@platform_options
@registry_options
@json_option
def list_(registry_inputs: RegistryInputs, platform_inputs: PlatformInputs, as_json: bool) -> None:
    """List the backends: for a platform or an architecture, in the orders that apply there."""
    from attnreg.explain.tables import backend_dict, backends_on, print_backends

    registry = registry_inputs.load()
    platforms = platform_inputs.platforms(registry) if platform_inputs.named else []
    if as_json:
        print_json([backend_dict(row) for row in backends_on(registry, platforms)])
    else:
        print_backends(registry, platforms, terminal())


@command(short_help="Show one backend, or the rule of one model family.")
@argument("name", metavar="BACKEND|MODEL_TYPE", completes="shown")
@registry_options
@json_option
def show(registry_inputs: RegistryInputs, name: str, as_json: bool) -> None:
    """Show the whole entry of one backend, or how the configs of a model family are read."""
    from attnreg.errors import did_you_mean
    from attnreg.explain.families import family_dict, print_family
    from attnreg.explain.tables import backend_dict, print_backend
    from attnreg.models.reader import bundled_families

    families = bundled_families()
    if name in families:
        if registry_inputs != RegistryInputs():
            raise BadInput(f"{name} is a model family, which is read alike with every registry", "give its name alone")
        if as_json:
            print_json(family_dict(families, name))
        else:
            print_family(families, name, terminal())
        return
    registry = registry_inputs.load()
    if name not in registry.backends:
        row, _, variant = name.partition("/")
        if variant and row in registry.backends:
            variants = [v.name for v in registry.backends[row].variants if v.name]
            what = f"{row} has no variant {variant!r}" if variant not in variants else f"{name} is a variant of {row}"
            raise BadInput(what, f"`attnreg show {row}` prints {'all: ' + ', '.join(variants) if variants else 'it'}")
        names = {**registry.backends, **dict.fromkeys(families)}
        raise BadInput(f"no backend and no model family {name!r}", did_you_mean(name, names, 40) + registry.missed)
    if as_json:
        print_json(backend_dict(registry.backends[name]))
    else:
        print_backend(registry, registry.backends[name], terminal())


@command(short_help="List the model families whose configs can be read.")
@argument("words", nargs=-1, metavar="[WORD]...", completes="families")
@json_option
def models(words: tuple[str, ...], as_json: bool) -> None:
    """List all model families, or those whose model_type contains one of the WORDs."""
    from attnreg.explain.families import family_dict, print_families
    from attnreg.models.reader import bundled_families

    families = bundled_families()
    if not all(words):
        raise BadInput("an empty WORD is in every name", "without a WORD all families are listed")
    names = [name for name in families if not words or any(word.casefold() in name for word in words)]
    if not names:
        raise BadInput(f"no model family has {' or '.join(map(repr, words))} in its name")
    if as_json:
        print_json([family_dict(families, name) for name in names])
    else:
        print_families(families, names, terminal())


@command(short_help="Show this machine, and what is usable on it.")
@registry_options
@json_option
def doctor(registry_inputs: RegistryInputs, as_json: bool) -> None:
    """Show this machine: devices, packages, flags, and which backends are usable here and why not."""
    from attnreg.machine.doctor import examine, print_report

    # the report has the problems that `load` would print
    report = examine(registry_inputs.load(quiet=True))
    if as_json:
        print_json(report.to_dict())
    else:
        print_report(report, terminal())
