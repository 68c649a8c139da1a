"""The command `doctor`."""

from __future__ import annotations

from attnreg.cli.command import command, option
from attnreg.cli.inputs import RegistryInputs
from attnreg.cli.options import json_option, registry_options
from attnreg.cli.output import print_json, terminal, working


@command(short_help="Show this machine, and what is usable on it.")
@registry_options
@option("--fresh", is_flag=True, help="Import every kernel module, although nothing changed since the last time.")
@json_option
def doctor(registry_inputs: RegistryInputs, fresh: bool, as_json: bool) -> None:
    """Show this machine: devices, packages, flags, and which backends are usable here and why not."""
    from attnreg.machine.doctor import examine, print_report

    # quiet, because the report lists the problems that `load` would print
    registry = registry_inputs.load(quiet=True)
    with working("importing the kernel modules", shown=not as_json):
        report = examine(registry, fresh=fresh)
    if as_json:
        print_json(report.to_dict())
    else:
        print_report(report, terminal())
