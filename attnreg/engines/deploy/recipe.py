"""Reads attnreg's own launch recipes: YAML with the keys of `KEYS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnreg.compile.inputs.bundled import bundled_registries, help_for_registry, release_name
from attnreg.compile.source.quoting import cut, variables_of
from attnreg.compile.source.yaml_source import shown
from attnreg.engines.deploy.launch import EngineLaunch, GivenVariable, LaunchError
from attnreg.engines.deploy.places import PlacedWord, Yaml, as_text
from attnreg.engines.deploy.shell.script import launches_of, words_of
from attnreg.engines.deploy.shell.syntax import Budget
from attnreg.engines.deploy.words import mapped_options, read_words
from attnreg.engines.settings import known_engines
from attnreg.errors import Problem, did_you_mean

KEYS = {
    "engine": "vllm or sglang; by default that of the command",
    "version": "the engine's release, such as 0.33 in quotes; by default the newest that is bundled",
    "model": "a config.json or its directory, for what the model gets",
    "arch": "the GPU, such as sm90, for what the model gets there",
    "env": "variables of the environment, name to value",
    "args": "the engine's options: a list of words, or a mapping of option to value",
    "command": "the whole command line",
}


def of_recipe(yaml: Yaml, budget: Budget) -> EngineLaunch:
    """The launch of a recipe. Raises `LaunchError` with every problem."""
    document, data = yaml.document, yaml.data
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
    launch = EngineLaunch(yaml.at(), texts["engine"], texts["version"], texts["model"], arch=texts["arch"])
    launch.places |= {name: yaml.at(name) for name in ("model", "arch") if name in data}
    if texts["command"]:
        _read_command(yaml, launch, budget, problems)
    _read_env(yaml, launch, problems)
    _read_args(yaml, launch, problems)
    unread = any(problem.message.startswith(("engine:", "not a shell command")) for problem in problems)
    if launch.engine not in known_engines() and not unread:
        what = f"engine: unknown engine `{cut(launch.engine)}`" if launch.engine else "the recipe names no engine"
        path = ("engine",) if "engine" in data else ()
        name, _, version = cut(launch.engine).partition("-")
        parted = f'write `engine: {name}` and `version: "{version}"`' if name in known_engines() else ""
        problems.append(document.problem(path, what, parted or f"known: {', '.join(known_engines())}"))
    elif not problems and release_name(f"{launch.engine}-{launch.version or 0}") not in bundled_registries():
        name = f"{launch.engine}-{cut(launch.version)}"
        problems.append(document.problem(("version",), f"no bundled release {name}", help_for_registry(name)))
    if problems:
        raise LaunchError(problems)
    return launch


def _read_command(yaml: Yaml, launch: EngineLaunch, budget: Budget, problems: list[Problem]) -> None:
    """Read the command that runs an engine, with variables exported before it; without one all words are options."""
    text = yaml.text("command")
    try:
        found = launches_of(text, budget)
    except LaunchError as error:
        problems += error.problems
        return
    if not found:
        read_words(words_of(text, budget), launch)
        return
    first = found[0]
    launch.engine, launch.version = launch.engine or first.engine, launch.version or first.version
    launch.named_model, launch.places = first.named_model, {**first.places, **launch.places}
    launch.options, launch.variables, launch.expansions = first.options, first.variables, first.expansions


def _read_env(yaml: Yaml, launch: EngineLaunch, problems: list[Problem]) -> None:
    env = yaml.data.get("env")
    if isinstance(env, Mapping):
        launch.variables += [
            GivenVariable(str(name), as_text(value), yaml.key_at("env", name)) for name, value in env.items()
        ]
    elif env is not None:
        # a list (as in compose and Kubernetes) or a text: the message has the names of variables, and no values
        kind = "a list" if isinstance(env, list) else "a text"
        names = "".join(f" of {', '.join(map(cut, names))}" if (names := variables_of(env)) else "")
        message = f"env: expected a mapping of variables, got {kind}{names}"
        problems.append(yaml.document.problem(("env",), message, "write each as NAME: VALUE"))


def _read_args(yaml: Yaml, launch: EngineLaunch, problems: list[Problem]) -> None:
    args: Any = yaml.data.get("args")
    if isinstance(args, Mapping):
        mapped_options(launch, yaml, "args")
    elif isinstance(args, list) and all(isinstance(word, str | int | float) for word in args):
        words = [yaml.word("args", i) for i in range(len(args))]
        read_words([PlacedWord(word.text, word.where) for word in words], launch)
    elif args is not None:
        message = "args: expected a list of words, or a mapping of option to value"
        problems.append(yaml.document.problem(("args",), message))
