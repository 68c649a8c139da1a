"""Numbers of options: what is no number, not finite, or out of bounds is refused, and the bounds are said."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from attnreg.cli import main
from attnreg.cli.command import Number
from attnreg.cli.commands import cli

WRONG = [
    *(("--minutes", text, "from 0.1 to 1,000,000") for text in ("0", "-1", "nan", "-nan", "inf", "1e300", "ten")),
    *(("--patience", text, "from 1 to 1,000,000") for text in ("0", "NaN", "infinity", "1e7")),
]


@pytest.mark.parametrize(("option", "text", "bounds"), WRONG)
def test_a_number_out_of_bounds_is_said_with_the_bounds(
    option: str, text: str, bounds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", option, text, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"attnreg: {option} is ")
    assert error.endswith(f"; expected a number {bounds}\n")


def parameters(command: click.Command, ctx: click.Context) -> Iterator[click.Parameter]:
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            assert found is not None
            yield from parameters(found, ctx)
    else:
        yield from command.params


def test_every_option_that_takes_a_float_refuses_what_is_not_finite() -> None:
    floats = [p for p in parameters(cli, click.Context(cli)) if isinstance(p.type, click.types.FloatParamType)]
    assert len(floats) >= 2
    assert [p.name for p in floats if not isinstance(p.type, Number)] == []


def test_an_integer_is_said_with_its_least(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("0", "x", "1.5"):
        assert main(["explain", "--head-size", "64", "--tp", text]) == 2
        assert capsys.readouterr().err.endswith("; expected an integer of at least 1\n")
