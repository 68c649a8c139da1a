"""The command `verify`."""

from __future__ import annotations

from typing import Literal

import click

from attnreg.cli.command import argument, command, option
from attnreg.cli.inputs import PlatformInputs, RegistryInputs
from attnreg.cli.options import json_option, platform_options, registry_options
from attnreg.cli.output import print_json, print_lines, working

# the exit status if no claim is refuted and some case is undecided
_UNDECIDED = 3


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

    A refuted case is shrunk to the fewest features that fail.

    Exit 1: a claim is refuted. Exit 3: none is, but a compiler or interpreter failed to run a case.

    Without a BACKEND, every one with a kernel module for this machine. Needs PyTorch.
    """
    registry = registry_inputs.load()
    platforms = platform_inputs.platforms(registry)
    if len(platforms) != 1:
        raise click.UsageError("verify runs on one device; give one --arch")
    with working("importing PyTorch and the kernels", shown=not as_json) as report:
        try:
            from attnreg.conformance.verify import verify as verify_backends
        except ImportError as e:
            raise click.ClickException(f"verify runs the backends and needs PyTorch: {e}") from None
        results = verify_backends(
            backends,
            registry=registry,
            platform=platforms[0],
            device=where,
            size=size,
            jobs=jobs,
            record=record,
            progress=report,
        )
    if as_json:
        print_json(
            {
                e.backend: {
                    **e.to_dict(),
                    "problems": e.problems,
                    "smallest": e.smallest,
                    "undecided": e.undecided,
                    "ended": e.ended,
                }
                for e in results
            }
        )
    else:
        print_lines("\n".join(line for evidence in results for line in evidence.lines()))
    raise click.exceptions.Exit(
        1 if any(e.problems for e in results) else _UNDECIDED if any(e.undecided for e in results) else 0
    )
