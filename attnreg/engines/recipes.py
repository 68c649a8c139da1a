"""Launch recipes of engines, read: YAML files, shell scripts and command lines, every option with its place.

A recipe is a YAML file with the keys of `KEYS`, or a shell script or a command line with the engine's command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnreg.compile.bundled import bundled_registries, help_for_registry, registry_root, release_name
from attnreg.compile.yaml_source import Document
from attnreg.errors import Location, Problem, RegistryError, did_you_mean
from attnreg.files import read_text
from attnreg.registry import Registry

KEYS = {
    "engine": "vllm or sglang; by default that of the command",
    "version": "the engine's release, such as 0.33 in quotes; by default the newest that is bundled",
    "model": "a config.json or its directory, for what the model gets",
    "arch": "the GPU, such as sm90, for what the model gets there",
    "env": "variables of the environment, name to value",
    "args": "the engine's options: a list of words, or a mapping of option to value",
    "command": "the whole command line",
}
_MAX_BYTES = 1 << 20
_ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)


class RecipeError(RegistryError):
    """Raised for a recipe that cannot be read; ``problems`` has each with its place."""

    subject = "the recipe"


@dataclass
class Recipe:
    """What a recipe says, each option and variable with its place; ``places`` has those of its keys."""

    engine: str = ""
    version: str = ""
    model: str = ""
    arch: str = ""
    options: list[tuple[str, str, Location]] = field(default_factory=list)
    variables: list[tuple[str, Location]] = field(default_factory=list)
    places: dict[str, Location] = field(default_factory=dict)


def read_recipe(path: Path) -> list[Recipe]:
    """The recipes in a file. Raises `RecipeError` with every problem of it, each with its place."""
    if path.suffix in (".yaml", ".yml"):
        try:
            document = Document.load(path)
        except RegistryError as error:
            raise RecipeError(error.problems) from None
        return [_of_document(document)]
    registry = release_name(str(path))
    if registry in bundled_registries() and not path.exists():
        help_ = f"{registry} is a bundled registry: `attnreg check --registry {registry}` checks it"
        raise RecipeError([Problem(Location(str(path), 1, 1), "there is no such recipe", help_)])
    found = list(_of_script(read_text(path, _MAX_BYTES, str(path)), str(path)))
    if not found:
        commands = ", ".join(f"`{c}`" for about in known_engines().values() for c in about["commands"])
        raise RecipeError([Problem(Location(str(path), 1, 1), "no line runs an engine", f"known: {commands}")])
    return found


def known_engines() -> dict[str, dict[str, Any]]:
    """Engine -> what is known of its commands, options and variables."""
    data: dict[str, dict[str, Any]] = Document.load(registry_root() / "launch.yaml", "registry/launch.yaml").data
    return data


def drafts_choose_in(registry: Registry) -> bool:
    """Whether the engine of a registry gives its drafts no backend that is named for the model alone."""
    for engine, about in known_engines().items():
        since, source = about.get("drafts_choose_from"), registry.sources.get(engine)
        # attnreg's own tables cite engines too
        if since is not None and source is not None and not registry.imports:
            return version_parts(source.version) >= version_parts(since)
    return False


def version_parts(version: str) -> tuple[int, ...]:
    """A release's numbers, which compare as releases do; what follows them (``rc1``, ``.dev5``) is left out."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def _of_document(document: Document) -> Recipe:
    data = document.data
    if not isinstance(data, Mapping):
        help_ = f"its keys are {', '.join(KEYS)}"
        raise RecipeError([document.problem((), "a recipe is a mapping", help_)])
    problems = [
        document.problem((key,), f"unknown key `{key}`", did_you_mean(str(key), KEYS), key=True)
        for key in data
        if key not in KEYS
    ]
    texts = {name: data.get(name, "") for name in ("engine", "version", "model", "arch", "command")}
    for name, value in texts.items():
        if not isinstance(value, str):
            example = ', such as "0.33" in quotes' if name == "version" else ""
            problems.append(document.problem((name,), f"{name}: expected a text{example}, got {value!r}"))
            texts[name] = ""
    recipe = Recipe(texts["engine"], texts["version"], texts["model"], texts["arch"])
    recipe.places |= {name: document.at(name) for name in ("model", "arch") if name in data}
    if texts["command"]:
        _read_words(_split(texts["command"], document.at("command"), problems), recipe, document.at("command"))
    _read_env(data.get("env"), document, recipe, problems)
    _read_args(data.get("args"), document, recipe, problems)
    if recipe.engine not in known_engines() and "engine" not in {p.message.partition(":")[0] for p in problems}:
        what = f"engine: unknown engine `{recipe.engine}`" if recipe.engine else "the recipe names no engine"
        path = ("engine",) if "engine" in data else ()
        name, _, version = recipe.engine.partition("-")
        parted = f'write `engine: {name}` and `version: "{version}"`' if name in known_engines() else ""
        problems.append(document.problem(path, what, parted or f"known: {', '.join(known_engines())}"))
    elif not problems and release_name(f"{recipe.engine}-{recipe.version or 0}") not in bundled_registries():
        name = f"{recipe.engine}-{recipe.version}"
        problems.append(document.problem(("version",), f"no bundled release {name}", help_for_registry(name)))
    if problems:
        raise RecipeError(problems)
    return recipe


def _read_env(env: Any, document: Document, recipe: Recipe, problems: list[Problem]) -> None:
    if isinstance(env, Mapping):
        recipe.variables += [(str(name), document.key_at("env", name)) for name in env]
    elif env is not None:
        problems.append(document.problem(("env",), f"env: expected a mapping of variables, got {env!r}"))


def _read_args(args: Any, document: Document, recipe: Recipe, problems: list[Problem]) -> None:
    if isinstance(args, Mapping):
        for name, value in args.items():
            option = f"--{str(name).removeprefix('--').replace('_', '-')}"
            recipe.options.append((option, str(value), document.at("args", name)))
    elif isinstance(args, list) and all(isinstance(word, str | int | float) for word in args):
        _read_words([(str(word), document.at("args", i)) for i, word in enumerate(args)], recipe)
    elif args is not None:
        problems.append(document.problem(("args",), "args: expected a list of words, or a mapping of option to value"))


def _split(text: str, where: Location, problems: list[Problem]) -> list[tuple[str, Location]]:
    try:
        return [(word, where) for word in shlex.split(text, comments=True)]
    except ValueError as error:
        problems.append(Problem(where, f"not a command line: {error}"))
        return []


def _read_words(words: list[tuple[str, Location]], recipe: Recipe, command: Location | None = None) -> None:
    """Read the words of a command line: variables before it, the engine, and its options."""
    text = " ".join(word for word, _ in words)
    for engine, about in known_engines().items():
        if command is not None and any(name in text for name in about["commands"]):
            recipe.engine = recipe.engine or engine
    for i, (word, where) in enumerate(words):
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            following = words[i + 1][0] if i + 1 < len(words) else ""
            value = value if equals else "" if following.startswith("--") else following
            recipe.options.append((option.replace("_", "-") if "." not in option else option, value, where))
        elif found := _ASSIGNMENT.fullmatch(word):
            recipe.variables.append((found[1], where))


def _of_script(text: str, file: str) -> Iterator[Recipe]:
    """A recipe for each line of a script that runs an engine, with the variables that were exported before it."""
    exported: list[tuple[str, Location]] = []
    lines, number = text.splitlines(), 0
    while number < len(lines):
        first, parts = number, [lines[number]]
        while parts[-1].rstrip().endswith("\\") and number + 1 < len(lines):
            number += 1
            parts.append(lines[number])
        number += 1
        words: list[tuple[str, Location]] = []
        problems: list[Problem] = []
        for offset, part in enumerate(parts):
            start = len(part) - len(part.lstrip()) + 1
            words += _split(part.rstrip().removesuffix("\\"), Location(file, first + offset + 1, start), problems)
        recipe = Recipe(variables=[*exported])
        _read_words(words, recipe, Location(file, first + 1, 1))
        if recipe.engine:
            if problems:
                raise RecipeError(problems)
            yield recipe
        elif words and (words[0][0] == "export" or all(_ASSIGNMENT.fullmatch(word) for word, _ in words)):
            exported += recipe.variables[len(exported) :]
