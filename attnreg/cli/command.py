"""Commands whose options stand in sections and are given once, and their errors in the style of all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from attnreg.errors import RegistryError, RequestError, escaped, nearest

if TYPE_CHECKING:
    # the type of a source of values is private to click before 8.2
    from click.core import ParameterSource

# the sections of a command's help, in their order
SECTIONS = ("Model", "Platform", "Backend", "Request", "Registry", "Output")


class BadInput(click.UsageError):
    """Raised for input that is refused: the message says what is wrong, ``help`` how to mend it."""

    def __init__(self, message: str, help: str = "") -> None:  # noqa: A002 - as in `Problem`
        super().__init__(message)
        self.help = help


class Option(click.Option):
    """An option in a section of the help. One that takes a single value is refused where it is given twice."""

    def __init__(self, *args: Any, section: str = "Output", **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.section = section

    @property
    def _single(self) -> bool:
        return not (self.multiple or self.is_flag or self.count)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Have the parser keep every value of an option that takes one, instead of the last."""
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
                raise BadInput(f"{self.opts[0]} given {times}: {', '.join(given)}", "it takes one value")
            opts = {**opts, self.name or "": given[-1]}
        return super().consume_value(ctx, opts)


class Command(click.Command):
    """A command whose help lists its options by section, and which says what an argument too many may mean."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, one section after the other."""
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in SECTIONS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections[getattr(param, "section", "Output")].append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises `BadInput` for one too many."""
        ctx.allow_extra_args = True
        extra = super().parse_args(ctx, args)
        if extra and not ctx.resilient_parsing:
            more = "no more arguments" if any(isinstance(p, click.Argument) for p in self.params) else "no arguments"
            has_model = any("--model" in param.opts for param in self.params)
            hint = f"did you mean `--model {extra[0]}`?" if has_model else ""
            raise BadInput(f"{ctx.info_name} takes {more}, got {' '.join(extra)}", hint)
        return extra


class Group(click.Group):
    """A group of commands. One that does not exist is refused with the one that is most like it."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the arguments name, and its arguments. Raises `BadInput` where there is none."""
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = nearest(args[0], self.commands)
            hint = f"did you mean `{near}`?" if near else f"`{ctx.command_path} --help` lists the commands"
            raise BadInput(f"there is no command {args[0]!r}", hint)
        return super().resolve_command(ctx, args)


def command(name: str | None = None, **attributes: Any) -> Callable[[Callable[..., None]], Command]:
    """A decorator that makes a `Command` of a function."""
    return click.command(name, cls=Command, **attributes)


def option(*names: str, section: str = "Output", **attributes: Any) -> Callable[[Any], Any]:
    """A decorator that adds an `Option` to a command; ``section`` is one of `SECTIONS`."""
    return click.option(*names, cls=Option, section=section, **attributes)


def describe(error: click.ClickException | ValueError | OSError) -> str:
    """The text of an error: what is wrong, and on a line of its own how to mend it."""
    if isinstance(error, RegistryError):
        return f"attnreg: {error}"
    message, hint = _parts(error)
    return f"attnreg: {escaped(message)}" + (f"\n  help: {escaped(hint)}" if hint else "")


def _parts(error: click.ClickException | ValueError | OSError) -> tuple[str, str]:
    """What is wrong, and how to mend it."""
    if isinstance(error, BadInput | RequestError):
        return error.message, error.help
    if isinstance(error, ValueError | OSError):
        return str(error), ""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    path = ctx.command_path if ctx else "attnreg"
    if isinstance(error, click.NoSuchOption):
        near = nearest(error.option_name, _option_names(ctx) if ctx else ())
        hint = f"did you mean `{near}`?" if near else f"`{path} --help` lists its options"
        subject = f"{ctx.info_name} has" if ctx and ctx.parent else "there is"
        return f"{subject} no option {error.option_name}", hint
    if isinstance(error, click.BadParameter) and error.param is not None:
        param = error.param
        name = param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
        if isinstance(error, click.MissingParameter):
            return f"{path.rpartition(' ')[2]} needs {name}", f"`{path} --help` describes it"
        return f"{name}: {error.message.rstrip('.')}", ""
    message = error.format_message().rstrip(".")
    return message[:1].lower() + message[1:], ""


def _option_names(ctx: click.Context) -> Iterable[str]:
    return (name for param in ctx.command.get_params(ctx) for name in param.opts if name.startswith("--"))
