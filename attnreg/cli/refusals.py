"""The command's error messages: the fault, and on a line of its own how to mend it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from attnreg.errors import RegistryError, RequestError, escaped, nearest

if TYPE_CHECKING:
    from attnreg.registry import Registry


class BadInput(click.UsageError):
    """Raised for bad input: the message states the fault, ``help`` how to mend it."""

    def __init__(self, message: str, help: str = "") -> None:  # noqa: A002 - as in `Problem`
        super().__init__(message)
        self.help = help


def refuse_unread(given: Iterable[str], *registries: Registry) -> None:
    """Raise `BadInput` for a facet that is given, and on which no answer of a registry that has it depends."""
    from attnreg.analysis.check.unused import read_facets

    for name in sorted(set(given)):
        having = [registry for registry in registries if name in registry.vocabulary.facets]
        if having and not any(name in read_facets(registry) for registry in having):
            titles = " and in ".join(dict.fromkeys(registry.title for registry in having))
            raise BadInput(f"--set {name}: nothing in {titles} reads it", "leave it out")


def describe(error: click.ClickException | ValueError | OSError) -> str:
    """The text of an error: the fault, and on a line of its own how to mend it."""
    if isinstance(error, RegistryError):
        return f"attnreg: {error}"
    message, hint = _parts(error)
    return f"attnreg: {escaped(message)}" + (f"\n  help: {escaped(hint)}" if hint else "")


def _parts(error: click.ClickException | ValueError | OSError) -> tuple[str, str]:
    """The fault, and how to mend it."""
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
        if isinstance(param.type, click.types.IntParamType):
            return f"{name} is {error.message.partition(' is not ')[0]}; expected an integer{_bounds(param.type)}", ""
        if isinstance(param.type, click.types.FloatParamType):
            return f"{name} is {error.message.partition(' is not ')[0]}; expected a number{_bounds(param.type)}", ""
        return f"{name}: {error.message.rstrip('.')}", ""
    if isinstance(error, click.BadOptionUsage):
        needs = "needs a value" if "requires" in error.message else "takes no value"
        return f"{error.option_name} {needs}", ""
    message = error.format_message().rstrip(".")
    return message[:1].lower() + message[1:], ""


def _bounds(kind: object) -> str:
    """The bounds of a type of numbers in words; "" without bounds."""
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    if most is not None:
        return f" from {least:g} to {most:,.0f}"
    return "" if least is None else f" of at least {least}"


def _option_names(ctx: click.Context) -> Iterable[str]:
    return (name for param in ctx.command.get_params(ctx) for name in param.opts if name.startswith("--"))
