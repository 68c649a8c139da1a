"""The command `tune`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from attnreg.cli.command import Number, command, option
from attnreg.cli.inputs import RegistryInputs, RequestInputs
from attnreg.cli.options import models_options, registry_options
from attnreg.cli.output import error_terminal, print_lines
from attnreg.cli.refusals import BadInput, refuse_unread

# the limit of --minutes and --patience: timers of operating systems accept little more
_LONGEST = 1e6


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

        print_lines("\n".join(write_orders(Path(samples), registry, Path(output))))
        return
    try:
        from attnreg.tuning.command import Tuning
        from attnreg.tuning.device import device_of
    except ImportError as e:
        raise click.ClickException(f"tune runs the backends and needs PyTorch: {e}") from None
    refuse_unread(request_inputs.extra_facets, registry)
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
        console=error_terminal(),
    )
    planned = tuning.planned()
    lines = list(tuning.dry_lines(planned)) if dry_run else tuning.measure(planned)
    print_lines("\n".join(lines))


def _sizes(option: str, texts: Sequence[str]) -> list[tuple[int, int]]:
    """The pairs of numbers in texts such as ``32x4096``."""
    out = []
    for text in texts:
        number, _, length = text.partition("x")
        if not (number.isdecimal() and length.isdecimal() and 0 < len(text) < 20 and int(number) and int(length)):
            raise BadInput(f"{option} {text}: expected requests and length, as 32x4096")
        out.append((int(number), int(length)))
    return out
