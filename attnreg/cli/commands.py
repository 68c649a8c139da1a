"""The attnreg command.

Exit status:

- 0: success
- 1: no backend, a finding, or a difference
- 2: bad input, or standard output cannot be written
- 3: an answer that is partly not known; of `verify`, a case that could not be decided. Status 1 comes first
- 70: an error of attnreg itself
- 130: an interrupt
- 141: the reader of standard output closed the pipe
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import click

from attnreg.cli.command import Command, CommandGroup, argument
from attnreg.cli.output import OutputError, discard_output, guarded_streams
from attnreg.cli.refusals import describe
from attnreg.environment import DEBUG_VARIABLE
from attnreg.errors import RegistryWarning, escaped
from attnreg.version import __version__

_SHELLS = ("bash", "zsh", "fish")
_COMPLETE_VARIABLE = "_ATTNREG_COMPLETE"
# command -> its module and name; a command is imported at its first use
_HOMES = {
    "explain": "attnreg.cli.answers:explain",
    "plan": "attnreg.cli.plans:plan",
    "list": "attnreg.cli.lookups.lists:list_",
    "show": "attnreg.cli.lookups.show:show",
    "models": "attnreg.cli.lookups.lists:models",
    "doctor": "attnreg.cli.lookups.doctor:doctor",
    "defaults": "attnreg.cli.answers:defaults",
    "why": "attnreg.cli.answers:why",
    "check": "attnreg.cli.checks:check",
    "new": "attnreg.cli.vendor.new:new",
    "verify": "attnreg.cli.vendor.verify:verify",
    "tune": "attnreg.cli.vendor.tune:tune",
    "lock": "attnreg.cli.upgrades.commands:lock",
    "diff": "attnreg.cli.upgrades.commands:diff",
    "upgrade": "attnreg.cli.upgrades.commands:upgrade",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. It prints errors on standard error, without a traceback."""
    with guarded_streams(), warnings.catch_warnings():
        # a warning would appear in the middle of the word that the shell completes
        warnings.simplefilter("ignore" if _COMPLETE_VARIABLE in os.environ else "always", RegistryWarning)
        warnings.showwarning = _show_warning
        try:
            status = _run(arguments)
            sys.stdout.flush()
        except OutputError as e:
            discard_output()
            # no message if the reader of the pipe has closed it
            if e.status != 141:
                click.echo(f"attnreg: {e}", err=True)
            return e.status
        return status


def _run(arguments: Sequence[str] | None) -> int:
    """The exit status of a run. It prints errors on standard error. Raises `OutputError`."""
    if _COMPLETE_VARIABLE in os.environ:
        # registers attnreg's completion for bash with click
        import attnreg.cli.completion  # noqa: F401
    try:
        # without standalone mode click returns the status of `Exit`
        return cli(arguments, prog_name="attnreg", standalone_mode=False) or 0
    except click.ClickException as e:
        click.echo(describe(e), err=True)
        return 2
    except (click.Abort, KeyboardInterrupt):
        return 130
    except OutputError:
        raise
    except (ValueError, OSError) as e:
        _show_traceback()
        click.echo(describe(e), err=True)
        return 2
    # every other exception is a fault of attnreg or of a package that it calls
    except (Exception, SystemExit) as e:
        # click raises SystemExit after it has completed a word
        if isinstance(e, SystemExit) and _COMPLETE_VARIABLE in os.environ:
            raise
        if not _show_traceback():
            hint = f"please report it with the traceback, which {DEBUG_VARIABLE}=1 prints"
            click.echo(f"attnreg: internal error: {type(e).__name__}: {e}\n  help: {hint}", err=True)
        return 70


def _show_warning(message: Warning | str, *context: Any, **more: Any) -> None:
    """Print a warning in the style of the command's errors."""
    click.echo(f"attnreg: {escaped(str(message))}", err=True)


def _show_traceback() -> bool:
    """Print the traceback of the current exception if $ATTNREG_DEBUG is 1; returns whether it is."""
    asked = os.environ.get(DEBUG_VARIABLE) == "1"
    if asked:
        import traceback

        traceback.print_exc()
    return asked


@click.group(
    cls=CommandGroup,
    homes=_HOMES,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "--version", "-V", prog_name="attnreg", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Which attention kernel runs, and why: backends, capabilities and priorities as data."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


@cli.command(name="help", cls=Command, short_help="Print the help of a command.")
@argument("names", nargs=-1, metavar="[COMMAND]", completes="commands")
@click.pass_context
def help_(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Print the help of a COMMAND, or of attnreg."""
    cli.main([*names, "--help"], prog_name="attnreg", standalone_mode=False)


@cli.command(name="completion", cls=Command, short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(_SHELLS))
def completion_(shell: str) -> None:
    """Print the script that completes attnreg's words in a SHELL: eval "$(attnreg completion bash)"."""
    from attnreg.cli.completion import script

    click.echo(script(cli, shell))
