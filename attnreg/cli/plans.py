"""The command that plans a whole run: `plan`."""

from __future__ import annotations

import re
from typing import Any

import click

from attnreg.cli.command import Number, command, option
from attnreg.cli.inputs import BackendInputs, PlatformInputs, RegistryInputs, RequestInputs
from attnreg.cli.names import engine_notes
from attnreg.cli.options import backend_options, json_option, platform_options, registry_options, request_options
from attnreg.cli.output import command_line, print_json, terminal
from attnreg.cli.refusals import BadInput, refuse_unread
from attnreg.compile.inputs.configs import find_config

_POSITIVE = click.IntRange(min=1)
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]i?B|B)")
_UNITS = {
    "B": 1,
    **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)},
    **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)},
}


class Bytes(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number of bytes, such as ``80GiB``."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes. Raises `BadInput` for any other text."""
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(str(value))
        if found is None or (size := int(float(found[1]) * _UNITS[found[2] or "B"])) < 1:
            raise BadInput(f"{param.opts[0] if param else 'the size'} is {value}", "give bytes, such as 80GiB or 60GB")
        return size


@command()
@option(
    "--pp", "stages", type=_POSITIVE, default=1, metavar="N", help="Stages of pipeline parallelism.", section="Model"
)
@option("--dcp", type=_POSITIVE, default=1, metavar="N", help="Ranks of decode context parallelism.", section="Model")
@option("--speculative-tokens", type=_POSITIVE, metavar="N", help="Tokens that a draft proposes.", section="Model")
@option("--layout", metavar="LAYOUT", help="Ask for this KV cache layout.", section="Backend")
@option("--connector-layout", "connector", metavar="LAYOUT", help="The layout of a KV connector.", section="Backend")
@option("--kv-transfer-config", metavar="JSON|NAME", help="The run's KV connector.", section="Backend")
@option("--graphs", metavar="MODE", help="Ask for this CUDA-graph mode.", section="Backend")
@option("--gpu-memory", type=Bytes(), metavar="SIZE", help="The memory of one GPU: 80GiB.", section="Platform")
@option("--weights", type=Bytes(), metavar="SIZE", help="The weights on one GPU: 60GiB.", section="Platform")
@option(
    "--memory-share",
    type=Number(0, 1, min_open=True),
    metavar="X",
    help="The share of a GPU's memory that the engine takes, if not its default.",
    section="Platform",
)
@platform_options
@request_options
@backend_options
@registry_options
@json_option
def plan(
    registry_inputs: RegistryInputs,
    platform_inputs: PlatformInputs,
    request_inputs: RequestInputs,
    backend_inputs: BackendInputs,
    as_json: bool,
    **asked: Any,
) -> None:
    """Say what an engine decides for a whole run: backends, page, cache layout, graphs, memory.

    \b
    attnreg plan --engine vllm-0.33 --arch sm90 --model gpt-oss-120b --tp 2
    attnreg plan --engine vllm-0.33 --arch B200 --model DeepSeek-V3 \\
      --draft mtp --tp 8 --gpu-memory 180GiB --weights 84GiB --length 32768

    The exit status is 1 if the run does not start, and 3 if the answer is partly not known.
    """
    from attnreg.planning.ask import planned, run_of
    from attnreg.planning.render import render

    if request_inputs.model is None:
        raise BadInput("a plan is of a model, and none is named", "give --model")
    if request_inputs.layer is not None:
        raise BadInput(
            "--layer asks about one layer, and a run has all of them", "leave it out, or use `attnreg explain`"
        )
    registry = registry_inputs.load(backend_inputs.choices)
    refuse_unread(request_inputs.extra_facets, registry)
    platforms = platform_inputs.platforms(registry)
    if len(platforms) > 1:
        archs = ", ".join(platform.arch for platform in platforms)
        raise BadInput(f"a run is on devices of one kind, and these are {len(platforms)}: {archs}", "give --arch once")
    path = find_config(request_inputs.model)
    here = not platform_inputs.named
    notes = [f"no --arch: this machine, {platforms[0].arch}"] if here else []
    notes += engine_notes(registry_inputs.engine, registry, own=registry_inputs.bundled_default)
    if path != request_inputs.model:
        notes.append(f"{request_inputs.model} is {path}")
    run = run_of(
        path,
        request_inputs.options(),
        registry,
        platforms[0],
        **backend_inputs.by_option,
        **asked,
        named=backend_inputs.words,
        notes=notes,
    )
    answer = planned(run)
    if as_json:
        detected = platforms[0] if here else None
        print_json({"command": command_line(click.get_current_context(), detected), **answer.to_dict()})
    else:
        render(answer, terminal())
    raise click.exceptions.Exit({True: 0, False: 1, None: 3}[answer.starts])
