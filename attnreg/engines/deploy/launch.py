"""EngineLaunch: one start of an engine as a file describes it, every option with its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from attnreg.compile.source.quoting import without_values
from attnreg.engines.settings import known_engines
from attnreg.errors import Location, RegistryError

# the most launches that are read of one file
MOST_LAUNCHES = 200
# the most words of a command
MOST_WORDS = 10_000
# the name of the option that stands for a backslash with a blank behind it, at the end of a line
BROKEN_LINE = "\\ "
# a shorter value of a variable is hidden only where it is the whole text
_LEAST_SECRET = 4


class LaunchError(RegistryError):
    """Raised for an unreadable file; ``problems`` has each problem with its place."""

    subject = "the file"


class NoEngineError(LaunchError):
    """Raised for a file in which nothing runs an engine."""


class GivenOption(NamedTuple):
    """An option of an engine with its value as text, "" without one, and its place."""

    name: str
    value: str
    where: Location
    maybe: bool = False


class GivenVariable(NamedTuple):
    """A variable of an engine's environment."""

    name: str
    value: str
    where: Location


@dataclass
class EngineLaunch:
    """One start of an engine; empty texts are not stated.

    version: the engine's release. model: a config.json or its directory, which must exist. named_model: the model of
    the command line, which may be unknown here. fixed_arch: ``arch`` says for which GPUs the launch is, even if it is a
    name that no table has. An option with a JSON object is one option for each key.
    ``plain`` are name and value of the plain variables of the script: no message has such a value.
    ``expansions`` are words with shell variables that may hold further options. ``notes`` are sentences about what the
    file states and attnreg does not take.
    """

    where: Location
    engine: str = ""
    version: str = ""
    model: str = ""
    named_model: str = ""
    arch: str = ""
    fixed_arch: bool = False
    options: list[GivenOption] = field(default_factory=list)
    variables: list[GivenVariable] = field(default_factory=list)
    plain: list[tuple[str, str]] = field(default_factory=list)
    expansions: list[str] = field(default_factory=list)
    places: dict[str, Location] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def shown(self, text: str) -> str:
        """A text for a message: without values of variables, and cut if it is long; ``nothing`` for an empty one."""
        text = self.hidden(text)
        return f"{text[:40]}…" if len(text) > 60 else text or "nothing"

    def hidden(self, text: str) -> str:
        """A text with the name of a variable in place of its value; variables that the engine reads are no secrets."""
        about = known_engines().get(self.engine, {})
        known = {*about.get("variables", ()), *about.get("settings", ())}
        for name, value in (*((variable.name, variable.value) for variable in self.variables), *self.plain):
            if value and name not in known and (text == value or len(value) >= _LEAST_SECRET):
                text = text.replace(value, f"${name}")
        return without_values(text)
