"""Reads the models of vllm-project/recipes: the base command, and each variant, feature and GPU that adds to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from attnreg.compile.source.yaml_source import Path_
from attnreg.engines.deploy.launch import MOST_LAUNCHES, EngineLaunch, GivenVariable
from attnreg.engines.deploy.places import PlacedWord, Yaml, as_text
from attnreg.engines.deploy.shell.syntax import Budget
from attnreg.engines.deploy.words import read_words

# keys of a mapping that adds options, and variables
_ARGUMENTS = ("args", "extra_args", "vllm_args")
_VARIABLES = ("env", "extra_env")
# the parts of a model that add to its base command
_PARTS = ("variants", "features", "hardware_overrides", "strategy_overrides")


def is_published(data: Mapping[str, Any]) -> bool:
    """Whether a document is a model of vllm-project/recipes."""
    model = data.get("model")
    return isinstance(model, Mapping) and "model_id" in model


def of_published(yaml: Yaml, budget: Budget) -> list[EngineLaunch]:
    """A launch for the base command, and one for each part that adds options or variables, or names another model.

    Raises `LaunchError`.
    """
    parts = (path for part in _PARTS for path in _adding(yaml.data.get(part), (part,)))
    return [_launch(yaml, path, budget) for path in ((), *islice(parts, MOST_LAUNCHES))]


def _adding(value: Any, path: Path_) -> Iterator[Path_]:
    if isinstance(value, Mapping):
        if any(value.get(key) for key in (*_ARGUMENTS, *_VARIABLES, "model_id")):
            yield path
        for key, item in value.items():
            yield from _adding(item, (*path, str(key)))


def _launch(yaml: Yaml, part: Path_, budget: Budget) -> EngineLaunch:
    launch = EngineLaunch(yaml.key_at(*(part or ("model",))), "vllm")
    for path in filter(None, (("model",), part)):
        value = yaml.value(*path)
        if isinstance(value.get("model_id"), str):
            launch.named_model, launch.places["named_model"] = value["model_id"], yaml.at(*path, "model_id")
        for key in ("base_args", *_ARGUMENTS):
            words = value.get(key)
            if isinstance(words, list):
                added = EngineLaunch(launch.where, "vllm")
                command = [PlacedWord(word, launch.where) for word in ("vllm", "serve")]
                budget.spend(4 * len(words))
                read_words([*command, *_words(yaml, (*path, key))], added)
                # a part's option takes the place of the base's
                names = {option.name for option in added.options}
                launch.options = [option for option in launch.options if option.name not in names] + added.options
                launch.expansions += added.expansions
        for key in ("base_env", *_VARIABLES):
            for name, text in (value.get(key) or {}).items() if isinstance(value.get(key), Mapping) else ():
                launch.variables.append(GivenVariable(str(name), as_text(text), yaml.key_at(*path, key, name)))
        if "hardware_overrides" in path[:-1]:
            # a GPU, or a group such as `amd` or `blackwell`
            launch.arch, launch.fixed_arch = str(path[path.index("hardware_overrides") + 1]), True
    return launch


def _words(yaml: Yaml, path: Path_) -> list[PlacedWord]:
    return [yaml.word(*path, i) for i in range(len(yaml.value(*path)))]
