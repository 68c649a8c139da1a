"""Click commands whose help has sections of options; a user gives each single-valued option at most once."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from attnreg.cli.refusals import BadInput
from attnreg.errors import nearest

if TYPE_CHECKING:
    # the type of a source of values is private to click before 8.2
    from click.core import ParameterSource
    from click.shell_completion import CompletionItem

# the key of a context's `meta`: whether its help has all options
HELP_ALL = "attnreg.help_all"
# `--help` lists all options of a command with fewer rare options than this
_MANY_RARE = 8
# the sections of a command's help, in their order
SECTIONS = ("Model", "Platform", "Backend", "Request", "Registry", "Output")


class Number(click.FloatRange):
    """A finite number within bounds. Click alone would accept `nan`, because every comparison with it is false."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Raises `click.BadParameter` for any other text, an infinite number, or one out of bounds."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class Option(click.Option):
    """An option in a section of the help. Giving a single-valued option twice is an error.

    rare: ``--help`` leaves the option out if the command has many such options; ``--help-all`` lists it.
    """

    def __init__(self, *args: Any, section: str = "Output", rare: bool = False, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.section = section
        self.rare = rare

    @property
    def _single(self) -> bool:
        return not (self.multiple or self.is_flag or self.count)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Make the parser keep all values of a single-valued option, not only the last one."""
        if self._single:
            parser.add_option(obj=self, opts=self.opts, dest=self.name, action="append", nargs=self.nargs)
        else:
            super().add_to_parser(parser, ctx)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        """The option's value and where it comes from. Raises `BadInput` for a second value."""
        given = opts.get(self.name or "")
        if self._single and isinstance(given, list):
            if len(given) > 1 and not ctx.resilient_parsing:
                times = "twice" if len(given) == 2 else f"{len(given)} times"
                # an option may be given without its value
                values = ", ".join(value if isinstance(value, str) else "no value" for value in given)
                raise BadInput(f"{self.opts[0]} given {times}: {values}", "it takes one value")
            opts = {**opts, self.name or "": given[-1]}
        # an unset variable of the shell leaves an empty text, which must not mean the default
        if isinstance(given, list) and "" in given and not ctx.resilient_parsing:
            raise BadInput(f"{self.opts[0]} is empty", "give it a value, or leave it out")
        return super().consume_value(ctx, opts)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completions of the option's value: attnreg's for the option's name, else click's."""
        from attnreg.cli.completion import complete_option

        found = complete_option(ctx, self, incomplete)
        return super().shell_complete(ctx, incomplete) if found is None else found


class Argument(click.Argument):
    """An argument; ``completes`` is the function of `attnreg.cli.completion` that lists its values."""

    def __init__(self, *args: Any, completes: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.completes = completes

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completions of the argument's value."""
        from attnreg.cli import completion

        items: list[CompletionItem] = getattr(completion, self.completes)(ctx, self, incomplete)
        return items


class Command(click.Command):
    """A command whose help lists its options by section. Its error for a surplus argument suggests an option.

    A command with many rare options has a short ``--help``, and ``--help-all`` with all options.
    """

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.rare = [param for param in self.params if getattr(param, "rare", False)]
        if len(self.rare) < _MANY_RARE:
            self.rare = []
            return
        text = "Show the help of all options and exit."
        more: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
        self.params.append(Option(["--help-all"], help=text, callback=_print_all, **more))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, one section after the other; without the rare ones unless ``--help-all`` asks for them."""
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in SECTIONS}
        left_out = [] if ctx.meta.get(HELP_ALL) else self.rare
        for param in self.get_params(ctx):
            if param in left_out:
                continue
            # the command's docstring describes its arguments
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections[getattr(param, "section", "Output")].append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(f"{len(left_out)} more options: {ctx.command_path} --help-all")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises `BadInput` for a surplus argument."""
        ctx.allow_extra_args = True
        extra = super().parse_args(ctx, args)
        if extra and not ctx.resilient_parsing:
            more = "no more arguments" if any(isinstance(p, click.Argument) for p in self.params) else "no arguments"
            raise BadInput(f"{ctx.info_name} takes {more}, got {' '.join(extra)}", self._option_for(extra[0]))
        return extra

    def _option_for(self, word: str) -> str:
        """Help for a surplus argument: the option that probably belongs before the word."""
        from attnreg.loader import load_registry

        options = {name for param in self.params for name in param.opts}
        try:
            registry = load_registry()
        except ValueError:
            return ""
        arch, backend = registry.vocabulary.architecture(word) is not None, registry.row(word) is not None
        option = "--arch" if arch else "--backend" if backend else "--model"
        return f"did you mean `{option} {word}`?" if option in options else ""


def _print_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """The callback of ``--help-all``: print the help with the rare options, and end the command."""
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class CommandGroup(click.Group):
    """A group of commands. The error for an unknown command suggests the most similar one.

    homes: command -> its place, as in ``package.module:name``; the group imports the module at the first use.
    """

    def __init__(self, *args: Any, homes: Mapping[str, str], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.homes = homes

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands."""
        return sorted({*self.commands, *self.homes})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command with that name, else None."""
        if cmd_name in self.homes:
            module, _, name = self.homes[cmd_name].partition(":")
            found: click.Command = getattr(importlib.import_module(module), name)
            return found
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the arguments name, and its arguments. Raises `BadInput` for an unknown command."""
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = nearest(args[0], self.list_commands(ctx))
            hint = f"did you mean `{near}`?" if near else f"`{ctx.command_path} --help` lists the commands"
            raise BadInput(f"there is no command {args[0]!r}", hint)
        return super().resolve_command(ctx, args)


def command(name: str | None = None, **attributes: Any) -> Callable[[Callable[..., None]], Command]:
    """A decorator that makes a `Command` of a function."""
    return click.command(name, cls=Command, **attributes)


def argument(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """A decorator that adds an `Argument` to a command."""
    return click.argument(*names, cls=Argument, **attributes)


def option(*names: str, section: str = "Output", **attributes: Any) -> Callable[[Any], Any]:
    """A decorator that adds an `Option` to a command; ``section`` is one of `SECTIONS`, ``rare`` as in `Option`."""
    return click.option(*names, cls=Option, section=section, **attributes)
