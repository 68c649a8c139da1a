"""Launch recipes of engines, read: YAML files, shell scripts and command lines, every option with its place.

A recipe is a YAML file with the keys of `KEYS`, or a shell script or a command line with the engine's command.
"""

from __future__ import annotations

import functools
import json
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
# a text in quotes goes over no more lines than these
_MOST_LINES = 100
# between the commands of a line
_SEPARATORS = {"&&", "||", "|", "&", ";"}
_ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)


class RecipeError(RegistryError):
    """Raised for a recipe that cannot be read; ``problems`` has each with its place."""

    subject = "the recipe"


@dataclass
class Recipe:
    """What a recipe says, each option and variable with its place; ``places`` has those of its keys.

    An option whose value is a JSON object is one option for each of its keys, as engines take it too.
    """

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


@functools.cache
def known_engines() -> dict[str, dict[str, Any]]:
    """Engine -> what is known of its commands, options, their short names, and variables."""
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
        where = document.at("command")
        _read_line(_split(texts["command"], where, problems), recipe, where)
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
            recipe.options += _options(option, value, document.at("args", name))
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


def _commands(words: list[tuple[str, Location]]) -> list[list[tuple[str, Location]]]:
    """The commands of a line, each the words between two separators; those within ``$(...)`` part nothing."""
    commands: list[list[tuple[str, Location]]] = [[]]
    depth = 0
    for word, where in words:
        if not depth and word in _SEPARATORS:
            commands.append([])
            continue
        inside = depth > 0
        depth += word.count("$(")
        depth -= min(depth, word.count(")"))
        ends = not depth and word.endswith(";")
        word = word.removesuffix(";") if ends else word
        # of a subshell
        commands[-1].append((word if inside or "(" in word else word.removesuffix(")"), where))
        if ends:
            commands.append([])
    return [command for command in commands if command]


def _read_line(words: list[tuple[str, Location]], recipe: Recipe, where: Location) -> None:
    """Read the command of a line that runs an engine, with what is exported before it; the whole line if none does."""
    commands = _commands(words)
    runs = next((i for i, command in enumerate(commands) if _engine_of(command)), None)
    for command in commands[:runs] if runs is not None else ():
        recipe.variables += _exported(command)
    _read_words(words if runs is None else commands[runs], recipe, where)


def _exported(words: list[tuple[str, Location]]) -> list[tuple[str, Location]]:
    """The variables that a command exports, or only assigns."""
    found = [(match[1], where) for word, where in words if (match := _ASSIGNMENT.fullmatch(word))]
    return found if words and (words[0][0] == "export" or len(found) == len(words)) else []


def _engine_of(words: list[tuple[str, Location]]) -> str:
    """The engine that a command line runs; "" for none."""
    text = " ".join(word for word, _ in words)
    engines = known_engines().items()
    return next((engine for engine, about in engines if any(name in text for name in about["commands"])), "")


def _read_words(words: list[tuple[str, Location]], recipe: Recipe, command: Location | None = None) -> None:
    """Read the words of a command: variables before it, the engine, and its options."""
    if command is not None:
        recipe.engine = recipe.engine or _engine_of(words)
    # no two engines have one short name
    short_names = {
        short: option for about in known_engines().values() for short, option in about.get("short", {}).items()
    }
    for i, (word, where) in enumerate(words):
        option, equals, value = word.partition("=")
        short, dot, key = option.partition(".")
        if short in short_names:
            option = f"{short_names[short]}{dot}{key}"
        if option.startswith("--"):
            following = words[i + 1][0] if i + 1 < len(words) else ""
            value = value if equals else "" if following.startswith("--") else following
            recipe.options += _options(option.replace("_", "-") if "." not in option else option, value, where)
        elif found := _ASSIGNMENT.fullmatch(word):
            recipe.variables.append((found[1], where))


def _options(option: str, value: Any, where: Location) -> Iterator[tuple[str, str, Location]]:
    """An option with its value as text, "" for none; of a JSON object or a mapping, one for each key."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            yield option, value, where
            return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _options(f"{option}.{key}", inner, where)
    else:
        yield option, "" if value is None else str(value), where


def _of_script(text: str, file: str) -> Iterator[Recipe]:
    """A recipe for each command of a script that runs an engine, with the variables that were exported before it."""
    exported: list[tuple[str, Location]] = []
    lines, number = text.splitlines(), 0
    while number < len(lines):
        first = number
        words, number, problems = _line(lines, number, file)
        for command in _commands(words):
            if _engine_of(command):
                if problems:
                    raise RecipeError(problems)
                recipe = Recipe(variables=[*exported])
                _read_words(command, recipe, Location(file, first + 1, 1))
                yield recipe
            elif command[0][0] == "unset":
                gone = {word for word, _ in command}
                exported = [(name, where) for name, where in exported if name not in gone]
            else:
                exported += _exported(command)


def _line(lines: list[str], number: int, file: str) -> tuple[list[tuple[str, Location]], int, list[Problem]]:
    """The words of the line at a number and of those that continue it, the next line's number, and what is wrong.

    A text in quotes goes on to another line only in a command that runs an engine: what else a script quotes is of no
    matter here, and an apostrophe of a here-document quotes nothing.
    """
    words: list[tuple[str, Location]] = []
    problems: list[Problem] = []
    goes_on = True
    while goes_on and number < len(lines):
        part, column = lines[number].rstrip(), len(lines[number]) - len(lines[number].lstrip()) + 1
        where = Location(file, number + 1, column)
        wrong: list[Problem] = []
        found = _split(part.removesuffix("\\"), where, wrong)
        if wrong and _engine_of([*words, (part, where)]):
            found, part, number, wrong = _quoted(lines, number, where)
        words += found
        problems += wrong
        goes_on = part.endswith("\\")
        number += 1
    return words, number, problems


def _quoted(
    lines: list[str], number: int, where: Location
) -> tuple[list[tuple[str, Location]], str, int, list[Problem]]:
    """The words from a line whose quotes end on a later one, that line and its number; what is wrong where none does.

    The words of an engine's command are kept then, so that it is refused and not passed over.
    """
    text = lines[number].rstrip()
    for end in range(number + 1, min(number + _MOST_LINES, len(lines))):
        text = f"{text}\n{lines[end].rstrip()}"
        problems: list[Problem] = []
        found = _split(text.removesuffix("\\"), where, problems) if {*lines[end]} & {"'", '"'} else []
        if found and not problems:
            return found, lines[end].rstrip(), end, []
    return [(lines[number], where)], "", number, [Problem(where, "not a command line: No closing quotation")]
