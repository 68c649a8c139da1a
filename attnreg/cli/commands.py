"""The attnreg command. Exit status: 0 for success, 1 for no backend, a finding or a difference, 2 for bad input."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from attnreg.cli.asking import doctor, explain, list_, models, show
from attnreg.cli.checking import check, diff, lock, verify
from attnreg.cli.command import Group, command, describe
from attnreg.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script: returns the exit status, and prints problems on stderr without a traceback."""
    try:
        # without standalone mode click returns the status of `Exit`
        return cli(arguments, prog_name="attnreg", standalone_mode=False) or 0
    except click.ClickException as e:
        click.echo(describe(e), err=True)
        return 2
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # the reader closed the pipe: end quietly, as other commands do
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ValueError as e:
        click.echo(describe(e), err=True)
        return 2


@click.group(
    cls=Group,
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


@command(name="help", short_help="Print the help of a command.")
@click.argument("names", nargs=-1, metavar="[COMMAND]")
@click.pass_context
def help_(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Print the help of a COMMAND, or of attnreg."""
    cli.main([*names, "--help"], prog_name="attnreg", standalone_mode=False)


@command(short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes attnreg's words in a SHELL: eval "$(attnreg completion bash)"."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(kind(cli, {}, "attnreg", "_ATTNREG_COMPLETE").source())


for _command in (explain, list_, show, models, doctor, check, lock, diff, verify, completion, help_):
    cli.add_command(_command)
