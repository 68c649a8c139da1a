"""Reads the YAML file of an engine's `--config`: options without their dashes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from attnreg.compile.source.quoting import FileKind
from attnreg.compile.source.yaml_source import Document
from attnreg.engines.deploy.launch import EngineLaunch, LaunchError
from attnreg.engines.deploy.places import Text, Yaml
from attnreg.engines.deploy.words import is_written, mapped_options
from attnreg.engines.settings import known_engines
from attnreg.errors import Problem, RegistryError

# any mapping; no message quotes a line
ANY = FileKind("launch file", frozenset(), quoted=False)


def config_keys() -> set[str]:
    """The keys by which a file of options is known, with dashes between their words."""
    return {name for about in known_engines().values() for name in _keys(about)}


def engines_of(data: Mapping[str, Any]) -> list[str]:
    """The engines that have most of the options in a mapping."""
    names = {str(key).replace("_", "-") for key in data}
    counts = {engine: len(names & _keys(about)) for engine, about in known_engines().items()}
    most = max(counts.values())
    return [engine for engine, count in counts.items() if count == most and most]


def of_config(yaml: Yaml, engine: str) -> EngineLaunch:
    """The launch of a file of options. engine: the one that the caller names, "" if none.

    Raises `LaunchError` if the options are those of several engines.
    """
    engines = [engine] if engine else engines_of(yaml.data)
    if len(engines) != 1:
        message = f"the options are those of {' and '.join(engines)}"
        raise LaunchError([Problem(yaml.at(), message, f"name one: --engine {engines[0]}")])
    launch = EngineLaunch(yaml.at(), engines[0])
    _add(yaml, launch)
    return launch


def add_config(launch: EngineLaunch, files: Mapping[str, Text]) -> None:
    """Add the options of the file that a launch's `--config` names, if it is among some files.

    An option of the command line wins over the file's.
    """
    for option in launch.options:
        text = files.get(PurePosixPath(option.value).name) if option.name == "--config" else None
        if text is None or not is_written(option.value):
            continue
        launch.options.remove(option)
        where = text.at(0)
        try:
            yaml = Yaml(Document(text.text, where.file, kind=ANY, merges=True), text)
        except RegistryError as error:
            first = error.problems[0]
            raise LaunchError([Problem(where, f"the file of --config: {first.message}", first.help)]) from None
        if isinstance(yaml.data, Mapping):
            _add(yaml, launch)
        return


def _add(yaml: Yaml, launch: EngineLaunch) -> None:
    given = {option.name for option in launch.options}
    before = launch.named_model
    mapped_options(launch, yaml, without=given)
    launch.named_model = before or launch.named_model


def _keys(about: Mapping[str, Any]) -> set[str]:
    return {option.removeprefix("--").partition(".")[0] for option in about["options"]}
