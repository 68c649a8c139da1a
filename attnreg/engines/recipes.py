"""Reads launch recipes of engines: YAML files, shell scripts and command lines, every option with its place.

A recipe is a YAML file with the keys of `KEYS`, or a shell script or a command line with the engine's command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnreg.compile.inputs.bundled import bundled_registries, help_for_registry, release_name
from attnreg.compile.source.quoting import FileKind, cut, variables_of
from attnreg.compile.source.yaml_source import Document, shown
from attnreg.engines.settings import launch_data
from attnreg.engines.shell import (
    ASSIGNMENT,
    Line,
    Placed,
    ShellOperator,
    command_word,
    commands,
    exported_by,
    given_to_shell,
    is_written,
    lines_of,
    only_says,
    split,
)
from attnreg.errors import Location, Problem, RegistryError, did_you_mean
from attnreg.files import read_text

KEYS = {
    "engine": "vllm or sglang; by default that of the command",
    "version": "the engine's release, such as 0.33 in quotes; by default the newest that is bundled",
    "model": "a config.json or its directory, for what the model gets",
    "arch": "the GPU, such as sm90, for what the model gets there",
    "env": "variables of the environment, name to value",
    "args": "the engine's options: a list of words, or a mapping of option to value",
    "command": "the whole command line",
}
# any line of a recipe may set a variable, even under a misspelt key, so messages quote no line
_RECIPE = FileKind("launch recipe", frozenset(KEYS), quoted=False)
_MAX_BYTES = 1 << 20
# shell variables that hold options, by their names: `$@`, `${ARGS[@]}`, `$EXTRA_ARGS`
_HOLDS_OPTIONS = re.compile(
    r"\$\{?[@*]|\[[@*]\]|\$\{?(?:\w*_)?(?:ARGS?|OPTS?|OPTIONS?|EXTRAS?|FLAGS?|PARAMS?)(?:_\w*)?(?!\w)", re.IGNORECASE
)


# a word after an option that is another option; a negative number is a value
_OPTION = re.compile(r"-[^\d.]")

# files in formats that attnreg does not read
_UNREAD_FILES = re.compile(r"(?:dockerfile|containerfile)(?:\..*)?|.*\.(?:dockerfile|containerfile|service)", re.I)


class RecipeError(RegistryError):
    """Raised for an unreadable recipe; ``problems`` has each problem with its place."""

    subject = "the recipe"


@dataclass
class Recipe:
    """The content of a recipe, each option and variable with its place; ``places`` has the places of its keys.

    An option with a JSON object becomes one option for each key, as in the engines. ``expansions`` are words with shell
    variables that may hold further options.
    """

    engine: str = ""
    version: str = ""
    model: str = ""
    arch: str = ""
    options: list[tuple[str, str, Location]] = field(default_factory=list)
    variables: list[tuple[str, str, Location]] = field(default_factory=list)
    expansions: list[str] = field(default_factory=list)
    places: dict[str, Location] = field(default_factory=dict)


def read_recipe(path: Path) -> list[Recipe]:
    """The recipes in a file. Raises `RecipeError` with every problem of the file, each with its place."""
    if path.suffix in (".yaml", ".yml"):
        try:
            document = Document.load(path, kind=_RECIPE)
        except RegistryError as error:
            raise RecipeError(error.problems) from None
        return [_of_document(document)]
    if _UNREAD_FILES.fullmatch(path.name):
        help_ = "write its variables and its command as `env` and `command` of a YAML recipe"
        raise RecipeError([Problem(Location(str(path), 1, 1), f"{path.name} is no launch recipe", help_)])
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
    """Engine -> the data on its commands, options, their short names, and variables."""
    data: dict[str, dict[str, Any]] = launch_data().data
    return data


def version_parts(version: str) -> tuple[int, ...]:
    """The numbers of a release, in a form that compares like releases; a suffix (``rc1``, ``.dev5``) is left out."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def _of_document(document: Document) -> Recipe:
    data = document.data
    if not isinstance(data, Mapping):
        help_ = f"its keys are {', '.join(KEYS)}"
        raise RecipeError([document.problem((), "a recipe is a mapping", help_)])
    problems = [
        document.problem((key,), f"unknown key `{cut(key)}`", did_you_mean(str(key), KEYS), key=True)
        for key in data
        if key not in KEYS
    ]
    texts = {name: data.get(name, "") for name in ("engine", "version", "model", "arch", "command")}
    for name, value in texts.items():
        if not isinstance(value, str):
            example = ', such as "0.33" in quotes' if name == "version" else ""
            problems.append(document.problem((name,), f"{name}: expected a text{example}, got {shown(value)}"))
            texts[name] = ""
    recipe = Recipe(texts["engine"], texts["version"], texts["model"], texts["arch"])
    recipe.places |= {name: document.at(name) for name in ("model", "arch") if name in data}
    if texts["command"]:
        where = document.at("command")
        line = split(texts["command"], where)
        problems += line.problems
        _read_line(line, recipe, problems)
    _read_env(data.get("env"), document, recipe, problems)
    _read_args(data.get("args"), document, recipe, problems)
    if recipe.engine not in known_engines() and "engine" not in {p.message.partition(":")[0] for p in problems}:
        what = f"engine: unknown engine `{cut(recipe.engine)}`" if recipe.engine else "the recipe names no engine"
        path = ("engine",) if "engine" in data else ()
        name, _, version = cut(recipe.engine).partition("-")
        parted = f'write `engine: {name}` and `version: "{version}"`' if name in known_engines() else ""
        problems.append(document.problem(path, what, parted or f"known: {', '.join(known_engines())}"))
    elif not problems and release_name(f"{recipe.engine}-{recipe.version or 0}") not in bundled_registries():
        name = f"{recipe.engine}-{cut(recipe.version)}"
        problems.append(document.problem(("version",), f"no bundled release {name}", help_for_registry(name)))
    if problems:
        raise RecipeError(problems)
    return recipe


def _read_env(env: Any, document: Document, recipe: Recipe, problems: list[Problem]) -> None:
    if isinstance(env, Mapping):
        recipe.variables += [(str(name), _text(value), document.key_at("env", name)) for name, value in env.items()]
    elif env is not None:
        # a list (as in compose and Kubernetes) or a text: the message has the names of variables, and no values
        kind = "a list" if isinstance(env, list) else "a text"
        names = "".join(f" of {', '.join(map(cut, names))}" if (names := variables_of(env)) else "")
        message = f"env: expected a mapping of variables, got {kind}{names}"
        problems.append(document.problem(("env",), message, "write each as NAME: VALUE"))


def _read_args(args: Any, document: Document, recipe: Recipe, problems: list[Problem]) -> None:
    if isinstance(args, Mapping):
        for name, value in args.items():
            option = _full_name(str(name) if str(name).startswith("-") else f"--{name}")
            recipe.options += _options(option, value, document.at("args", name)) if option.startswith("--") else ()
    elif isinstance(args, list) and all(isinstance(word, str | int | float) for word in args):
        _read_words([(str(word), document.at("args", i)) for i, word in enumerate(args)], recipe)
    elif args is not None:
        problems.append(document.problem(("args",), "args: expected a list of words, or a mapping of option to value"))


def _read_line(line: Line, recipe: Recipe, problems: list[Problem]) -> None:
    """Read the line's command that runs an engine, with variables exported before it; without one the whole line."""
    words = [(word, where) for word, where in line.words if not isinstance(word, ShellOperator)]
    variables, command = next(_launches(line, [], problems), ([], words))
    recipe.variables += _variables(variables)
    recipe.engine = recipe.engine or _engine_of(command)
    _read_words(command, recipe)


def _launches(
    line: Line, exported: list[Placed], problems: list[Problem]
) -> Iterator[tuple[list[Placed], list[Placed]]]:
    """Each command of a line that runs an engine, after the variables that were exported before it.

    It updates ``exported``, and reads texts that the line gives to another shell. It adds the problems of a command to
    ``problems`` before it yields the command.
    """
    for command in commands(line.words):
        inner = given_to_shell(command)
        if inner is not None:
            before = exported_by(inner.before) if inner.inherits else []
            known = [*exported, *before] if inner.inherits else []
            yield from _launches_within(inner.text, inner.where, known, problems)
        elif _engine_of(command):
            yield [*exported], command
        elif command[0][0] == "unset":
            gone = {word for word, _ in command}
            exported[:] = [(word, where) for word, where in exported if word.partition("=")[0] not in gone]
        else:
            exported += exported_by(command)
    for text, where in line.within:
        yield from _launches_within(text, where, exported, problems)


def _launches_within(
    text: str, where: Location, exported: list[Placed], problems: list[Problem]
) -> Iterator[tuple[list[Placed], list[Placed]]]:
    """Each command that runs an engine in a text that the script gives to a shell."""
    known = [*exported]
    for line in lines_of(text, where.file, _mentions):
        words, within = ([(item, where) for item, _ in items] for items in (line.words, line.within))
        wrong = [replace(problem, where=where) for problem in line.problems]
        for found in _launches(Line(words, [], within), known, wrong):
            problems += wrong
            yield found


def _variables(words: list[Placed]) -> Iterator[tuple[str, str, Location]]:
    """The variables in words such as ``A=1``."""
    for word, where in words:
        name, _, value = word.partition("=")
        yield name, value, where


def _mentions(text: str) -> bool:
    """Whether a text contains the command of an engine, also inside quotes."""
    known = known_engines().values()
    return any(name in text for about in known for name in (*about["commands"], *about.get("images", ())))


def _engine_of(words: list[Placed]) -> str:
    """The engine that a command line runs, else ""."""
    return "" if only_says(words) else _found_in(words)[0]


def _found_in(words: list[Placed]) -> tuple[str, int]:
    """The engine whose command is in some words, and the index of the next word; "" and 0 without one."""
    plain = [command_word(word) for word, _ in words]
    for engine, about in known_engines().items():
        for parts in map(str.split, about["commands"]):
            for i, word in enumerate(plain):
                is_module = word.startswith(f"{parts[0]}.") and "." in parts[0]
                if plain[i : i + len(parts)] == parts or is_module:
                    return engine, i + len(parts)
    return _image_in([word for word, _ in words])


def _image_in(words: list[str]) -> tuple[str, int]:
    """The engine whose container image some words run, and the index of the next word; "" and 0 without one."""
    if "run" not in words or any(word.startswith("--entrypoint") for word in words):
        return "", 0
    # names without tags; the host of a container registry may precede the image
    names = [f"/{re.sub('[:@][^/]*$', '', word)}" for word in words]
    for engine, about in known_engines().items():
        for i, name in enumerate(names, 1):
            if any(name.endswith(f"/{image}") for image in about.get("images", ())):
                return engine, i
    return "", 0


def _read_words(words: list[Placed], recipe: Recipe) -> None:
    """Read the words of a command: the variables before it, its options, and words with shell variables."""
    _, behind = _found_in(words)
    takes_model = behind > 1 and "." not in words[behind - 1][0]
    for i, (word, where) in enumerate(words):
        name, equals, value = word.partition("=")
        option = _full_name(name)
        before = words[i - 1][0] if i > behind else ""
        assigned = word.removeprefix("--env=") if i < behind else word
        if ASSIGNMENT.fullmatch(assigned):
            recipe.variables += _variables([(assigned, where)])
        elif i < behind:
            continue
        elif option.startswith("--"):
            following = words[i + 1][0] if i + 1 < len(words) else ""
            value = value if equals else "" if _OPTION.match(following) else following
            recipe.options += _options(option, value, where)
        elif is_written(word):
            continue
        # any other word with a shell variable, except a model or the value of an option
        elif _HOLDS_OPTIONS.search(word) or not ((i == behind and takes_model) or _takes_value(before)):
            recipe.expansions.append(word)


def _takes_value(word: str) -> bool:
    """Whether a word is an option whose value is the next word."""
    return word.startswith("-") and "=" not in word


def _full_name(option: str) -> str:
    """The option's name in the data: the long form of a short name, with dashes between its words."""
    name, dot, key = option.partition(".")
    # each short name belongs to one engine
    short_names = {
        short: option for about in known_engines().values() for short, option in about.get("short", {}).items()
    }
    return f"{short_names.get(name) or (name.replace('_', '-') if name.startswith('--') else name)}{dot}{key}"


def _options(option: str, value: Any, where: Location) -> Iterator[tuple[str, str, Location]]:
    """An option with its value as text, "" without a value; for a JSON object or a mapping one option for each key."""
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
        yield option, _text(value), where


def _text(value: Any) -> str:
    """A value of a YAML file or a JSON object as text, "" for null."""
    return "" if value is None else str(value)


def _of_script(text: str, file: str) -> Iterator[Recipe]:
    """A recipe for each command of a script that runs an engine, with the variables exported before it."""
    exported: list[Placed] = []
    for line in lines_of(text, file, _mentions):
        problems = [*line.problems]
        for variables, command in _launches(line, exported, problems):
            if problems:
                raise RecipeError(problems)
            recipe = Recipe(engine=_engine_of(command), variables=[*_variables(variables)])
            _read_words(command, recipe)
            yield recipe
