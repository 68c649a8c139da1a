"""Reads a file that deploys an engine, of any format that attnreg knows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from attnreg.compile.inputs.bundled import bundled_registries, release_name
from attnreg.compile.source.yaml_source import MAX_BYTES, Document
from attnreg.engines.deploy.compose import is_compose, of_compose
from attnreg.engines.deploy.config import ANY, config_keys, of_config
from attnreg.engines.deploy.dockerfile import FILE_NAME, of_dockerfile
from attnreg.engines.deploy.kubernetes import is_manifest, of_manifests
from attnreg.engines.deploy.launch import MOST_LAUNCHES, EngineLaunch, LaunchError, NoEngineError
from attnreg.engines.deploy.places import Text, Yaml
from attnreg.engines.deploy.published import is_published, of_published
from attnreg.engines.deploy.recipe import KEYS, of_recipe
from attnreg.engines.deploy.shell.script import launches_of
from attnreg.engines.deploy.shell.syntax import Budget
from attnreg.engines.deploy.words import is_template, template_problem
from attnreg.engines.settings import known_engines
from attnreg.errors import Location, Problem, RegistryError, did_you_mean, nearest
from attnreg.files import FileError, read_text

_MOST_DOCUMENTS = 200
_DOCUMENT = re.compile(r"^---(?=\s|$)", re.MULTILINE)
# a key that is not the name of a variable
_TWICE = re.compile(r"^`(?![A-Z][A-Z0-9_]*`).*` is given twice", re.DOTALL)
_YAML = (".yaml", ".yml", ".json")


def text_of(path: Path) -> str:
    """The text of a file. Raises `LaunchError` for one that is no text, too large, or of a kind that is not read."""
    file = str(path)
    start = Location(file, 1, 1)
    registry = release_name(file)
    if registry in bundled_registries() and not path.exists():
        help_ = f"{registry} is a bundled registry: `attnreg check --registry {registry}` checks it"
        raise LaunchError([Problem(start, "there is no such file", help_)])
    if path.suffix == ".service":
        help_ = "write its variables and its command as `env` and `command` of a YAML recipe"
        raise LaunchError([Problem(start, "units of systemd are not read", help_)])
    try:
        text = read_text(path, MAX_BYTES, file)
    except FileError as error:
        raise LaunchError([error.problem]) from None
    if "\0" in text:
        raise LaunchError([Problem(start, "the file has a NUL byte: it is no text")])
    return text


def launches_in_text(text: str, path: Path, engine: str = "") -> list[EngineLaunch]:
    """The launches in the text of a file. engine: that of a file of options that fits several.

    Raises `LaunchError` with every problem of the file, each with its place; also for a file that runs no engine.
    """
    file = str(path)
    start, budget = Location(file, 1, 1), Budget(file)
    if path.suffix in _YAML:
        found = _of_yaml(text, file, engine, budget)
    elif FILE_NAME.fullmatch(path.name):
        found = of_dockerfile(text, file, budget)
    else:
        found = launches_of(Text([(text, start)]), budget)
    if len(found) > MOST_LAUNCHES:
        raise budget.refusal(start, f"more than {MOST_LAUNCHES} launches")
    if not found:
        commands = ", ".join(f"`{c}`" for about in known_engines().values() for c in about["commands"])
        raise NoEngineError([Problem(start, "nothing in the file runs an engine", f"known: {commands}")])
    return found


def _of_yaml(text: str, file: str, engine: str, budget: Budget) -> list[EngineLaunch]:
    documents = [yaml for yaml in _documents(text, file) if yaml.data not in (None, {}, [])]
    manifests = [yaml for yaml in documents if isinstance(yaml.data, Mapping) and is_manifest(yaml.data)]
    found = of_manifests(manifests, budget)
    for yaml in documents:
        if yaml not in manifests:
            found += _of_document(yaml, engine, budget)
    return found


def _of_document(yaml: Yaml, engine: str, budget: Budget) -> list[EngineLaunch]:
    data = yaml.data
    if not isinstance(data, Mapping):
        raise LaunchError([Problem(yaml.at(), "the file is no launch file: it is no mapping", _formats())])
    if is_compose(data):
        return of_compose(yaml, budget)
    if is_published(data):
        return of_published(yaml, budget)
    own = [key for key in data if key in KEYS]
    options = {str(key).replace("_", "-") for key in data} & config_keys()
    if options and not {"engine", "command", "args", "env"} & {*own} and options != {"model"}:
        return [of_config(yaml, engine)]
    if own:
        return [of_recipe(yaml, budget)]
    near = next(((key, n) for key in data if (n := nearest(str(key), [*KEYS, *config_keys()], 0.8))), None)
    where = yaml.key_at(near[0]) if near else yaml.at()
    help_ = did_you_mean(near[1], [near[1]]) if near else _formats()
    raise LaunchError([Problem(where, "the file is no launch file: it has no key of one", help_)])


def _formats() -> str:
    return f"the keys of a recipe are {', '.join(KEYS)}; docs/check.md has the other formats"


def _documents(text: str, file: str) -> list[Yaml]:
    """The documents of a YAML file. Raises `LaunchError` with the problems of each, and for a template."""
    starts = [0, *(match.end() for match in _DOCUMENT.finditer(text))]
    if len(starts) > _MOST_DOCUMENTS:
        raise LaunchError([Problem(Location(file, 1, 1), f"more than {_MOST_DOCUMENTS} YAML documents in one file")])
    found, problems = [], list[Problem]()
    for start, end in zip(starts, [*(at - 3 for at in starts[1:]), len(text)], strict=True):
        # empty lines in place of the documents before, so that places are those of the file
        part = "\n" * text.count("\n", 0, start) + text[start:end]
        try:
            found.append(Yaml(Document(part, file, ANY, merges=True)))
        except RegistryError as error:
            # it may be a secret of a file of another kind
            problems += [replace(p, message=_TWICE.sub("a key is given twice", p.message)) for p in error.problems]
    if problems and is_template(text):
        line = next(i for i, line in enumerate(text.split("\n"), 1) if "{{" in line)
        raise LaunchError([template_problem(Location(file, line, 1))])
    if problems:
        raise LaunchError(problems)
    return found
