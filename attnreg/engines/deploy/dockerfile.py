"""Reads Dockerfiles: what the last stage runs by ENTRYPOINT and CMD."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from attnreg.engines.deploy.containers import Container, launches_in
from attnreg.engines.deploy.launch import MOST_WORDS, EngineLaunch
from attnreg.engines.deploy.places import PlacedWord, Text
from attnreg.engines.deploy.shell.syntax import Budget
from attnreg.errors import Location

FILE_NAME = re.compile(r"(?:dockerfile|containerfile)(?:\..*)?|.*\.(?:dockerfile|containerfile)", re.IGNORECASE)
_HEREDOC = re.compile(r"<<-?['\"]?(\w+)['\"]?")
_VARIABLE = re.compile(r"(\w+)=(\"(?:\\.|[^\"\\])*\"|'[^']*'|\S*)")


class _Instruction(NamedTuple):
    """An instruction of a Dockerfile and the text behind its name."""

    name: str
    text: Text
    where: Location


def of_dockerfile(text: str, file: str, budget: Budget) -> list[EngineLaunch]:
    """The launches of a Dockerfile. Raises `LaunchError`."""
    stages: dict[str, Container] = {}
    container = Container(Location(file, 1, 1))
    entry: list[PlacedWord] = []
    command: list[PlacedWord] = []
    for name, behind, where in _instructions(text, file):
        if name == "FROM":
            # an option such as --platform may stand before the image
            words = [word for word in behind.text.split() if not word.startswith("--")]
            above = stages.get(words[0].casefold()) if words else None
            image = above.image if above else "".join(words[:1])
            container = Container(where, image, variables=dict(above.variables) if above else {})
            entry, command = [], []
            if len(words) > 2 and words[1].casefold() == "as":
                stages[words[2].casefold()] = container
        elif name == "ENV":
            container.variables |= _variables(behind)
        elif name == "ENTRYPOINT":
            entry, command = _words(behind), []
            container.has_command = bool(entry)
        elif name == "CMD":
            command = _words(behind)
    container.words = [*entry, *command]
    return launches_in(container, budget)


def _instructions(text: str, file: str) -> Iterator[_Instruction]:
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        first, pieces = number, list[tuple[str, Location]]()
        name, _, _ = lines[number].strip().partition(" ")
        column = lines[number].find(name) + len(name)
        going_on = bool(name) and not name.startswith("#")
        while going_on and number < len(lines):
            line = lines[number]
            start = column if number == first else 0
            comment = number > first and line.lstrip().startswith("#")
            going_on = comment or line.rstrip().endswith("\\")
            if not comment:
                kept = line.rstrip()[start:].removesuffix("\\") if going_on else line[start:]
                pieces.append((f"{kept} ", Location(file, number + 1, start + 1)))
            number += 1
        number = max(number, first + 1)
        if not pieces:
            continue
        for end in _HEREDOC.findall(lines[first]) if name.upper() in ("RUN", "COPY", "ADD") else ():
            while number < len(lines) and lines[number].strip() != end:
                number += 1
            number += 1
        yield _Instruction(name.upper(), Text(pieces), Location(file, first + 1, 1))


def _words(text: Text) -> list[PlacedWord]:
    """The words of the exec form, a JSON list; the shell form is a text that a shell gets."""
    start = len(text.text) - len(text.text.lstrip())
    try:
        items = json.loads(text.text)
    except (ValueError, RecursionError):
        items = None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        return [
            *(PlacedWord(word, text.at(start)) for word in ("sh", "-c")),
            PlacedWord(text.text, text.at(start), source=text),
        ]
    found, at = [], start
    # a command of more words is refused
    for item in items[: MOST_WORDS + 1]:
        written = json.dumps(item, ensure_ascii=False)
        place = text.text.find(written, at)
        at = place + len(written) if place >= 0 else at
        source = Text(text.pieces(place + 1, at - 1)) if place >= 0 and written[1:-1] == item else None
        found.append(PlacedWord(item, text.at(place + 1 if place >= 0 else at), source=source))
    return found


def _variables(text: Text) -> dict[str, PlacedWord]:
    """The variables of `ENV NAME=VALUE …`, and of the old form `ENV NAME VALUE`."""
    start = len(text.text) - len(text.text.lstrip())
    name, _, value = text.text.strip().partition(" ")
    if "=" not in name:
        return {name: PlacedWord(value.strip(), text.at(start))}
    return {
        match[1]: PlacedWord(match[2].strip("\"'"), text.at(match.start()))
        for match in _VARIABLE.finditer(text.text, start)
    }
