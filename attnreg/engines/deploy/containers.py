"""Reads what a container runs, from a Kubernetes manifest, a compose file or a Dockerfile, as launches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from attnreg.engines.deploy.config import add_config
from attnreg.engines.deploy.launch import EngineLaunch, GivenVariable, LaunchError
from attnreg.engines.deploy.places import PlacedWord, Text
from attnreg.engines.deploy.shell.script import launches_of, launches_of_words
from attnreg.engines.deploy.shell.syntax import Budget
from attnreg.engines.deploy.words import image_of, is_chart, is_template, read_words, template_problem
from attnreg.errors import Location

# $(NAME), which Kubernetes replaces by a variable of the container
_REFERENCE = re.compile(r"\$\((\w+)\)")
_SHELLS = {"bash", "sh"}
# what a launch takes of a file's budget
_STEPS_OF_LAUNCH = 1000


@dataclass
class Container:
    """What a container runs: its image, its words, its variables, and the files that come with it, by their names.

    has_command: whether the words replace the image's own command; else they are arguments of it.
    """

    where: Location
    image: str = ""
    words: list[PlacedWord] = field(default_factory=list)
    has_command: bool = False
    variables: dict[str, PlacedWord] = field(default_factory=dict)
    files: Mapping[str, Text] = field(default_factory=dict)
    arch: str = ""
    notes: list[str] = field(default_factory=list)


def launches_in(container: Container, budget: Budget) -> list[EngineLaunch]:
    """The launches of a container; none if it runs no engine. Raises `LaunchError`."""
    places = [word.where for word in container.words if is_chart(word.text)]
    if is_template(container.image) or places:
        raise LaunchError([template_problem(places[0] if places else container.where)])
    engine, takes_options, release = image_of(container.image)
    words = [_with_values(word, container.variables) for word in container.words]
    found = launches_of_words(words, budget, container.variables)
    if not found and (script := _script_of(words, container.files)) is not None:
        found = launches_of(script, budget, container.variables)
    if not found and takes_options and not container.has_command:
        launch = EngineLaunch(words[0].where if words else container.where, engine)
        launch.variables += [GivenVariable(name, word.text, word.where) for name, word in container.variables.items()]
        read_words(words, launch)
        found = [launch]
    budget.spend(_STEPS_OF_LAUNCH * len(found))
    for launch in found:
        if not launch.version and engine == launch.engine:
            launch.version = release
        launch.arch, launch.notes = container.arch, [*container.notes]
        add_config(launch, container.files)
    return found


def _with_values(word: PlacedWord, variables: Mapping[str, PlacedWord]) -> PlacedWord:
    """A word with the values of known variables in place of their references."""
    text, pieces, at = word.as_text, list[tuple[str, Location]](), 0
    for match in _REFERENCE.finditer(word.text):
        if match[1] in variables:
            pieces += [*text.pieces(at, match.start()), (variables[match[1]].text, text.at(match.start()))]
            at = match.end()
    if not at:
        return word
    source = Text([*pieces, *text.pieces(at, len(word.text))])
    return word._replace(text=source.text, source=source)


def _script_of(words: Sequence[PlacedWord], files: Mapping[str, Text]) -> Text | None:
    """The script among the files that the words run; None without one."""
    names = [PurePosixPath(word.text).name for word in words]
    if names and names[0] in _SHELLS:
        names = [name for name in names[1:] if not name.startswith("-")]
    return files.get(names[0]) if names else None
