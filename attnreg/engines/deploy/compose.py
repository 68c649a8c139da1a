"""Reads docker compose files: what each service runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attnreg.engines.deploy.containers import Container, launches_in
from attnreg.engines.deploy.launch import EngineLaunch
from attnreg.engines.deploy.places import PlacedWord, Text, Yaml
from attnreg.engines.deploy.shell.script import words_of
from attnreg.engines.deploy.shell.syntax import Budget


def is_compose(data: Mapping[str, Any]) -> bool:
    """Whether a document is a compose file."""
    return isinstance(data.get("services"), Mapping)


def of_compose(yaml: Yaml, budget: Budget) -> list[EngineLaunch]:
    """The launches of all services. Raises `LaunchError`."""
    found: list[EngineLaunch] = []
    for name, service in yaml.data["services"].items():
        if not isinstance(service, Mapping):
            continue
        path = ("services", str(name))
        entry = _words(yaml, (*path, "entrypoint"), budget)
        image = _without_variables(str(service.get("image") or ""))
        container = Container(yaml.key_at(*path), image, has_command=bool(entry))
        container.words = [*entry, *_words(yaml, (*path, "command"), budget)]
        container.variables = _variables(yaml, (*path, "environment"))
        found += launches_in(container, budget)
    return found


def _without_variables(image: str) -> str:
    """An image without a tag that is a variable: its release is not known."""
    return re.sub(r":\$\{?\w.*$", "", image)


def _words(yaml: Yaml, path: tuple[str, ...], budget: Budget) -> list[PlacedWord]:
    value = yaml.value(*path)
    if isinstance(value, list):
        return [_plain(yaml.word(*path, i)) for i in range(len(value))]
    return words_of(_one_line(_plain(yaml.word(*path)).as_text), budget) if isinstance(value, str) else []


def _one_line(text: Text) -> Text:
    """A command with a space for each line break: compose splits it at both."""
    parts, at = list[tuple[str, Any]](), 0
    for found in re.finditer("\n", text.text):
        parts += [*text.pieces(at, found.start()), (" ", text.at(found.start()))]
        at = found.end()
    return Text([*parts, *text.pieces(at, len(text.text))])


def _plain(word: PlacedWord) -> PlacedWord:
    """A word with one dollar sign in place of two, which compose writes for one."""
    if "$$" not in word.text:
        return word
    parts, at = list[tuple[str, Any]](), 0
    while (found := word.text.find("$$", at)) >= 0:
        parts += word.as_text.pieces(at, found + 1)
        at = found + 2
    source = Text([*parts, *word.as_text.pieces(at, len(word.text))])
    return word._replace(text=source.text, source=source)


def _variables(yaml: Yaml, path: tuple[str, ...]) -> dict[str, PlacedWord]:
    value = yaml.value(*path)
    if isinstance(value, Mapping):
        return {str(name): yaml.word(*path, name)._replace(where=yaml.key_at(*path, name)) for name in value}
    found: dict[str, PlacedWord] = {}
    for i, item in enumerate(value if isinstance(value, list) else ()):
        name, equals, text = str(item).partition("=")
        if equals:
            found[name] = PlacedWord(text, yaml.at(*path, i))
    return found
