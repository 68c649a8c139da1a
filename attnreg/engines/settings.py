"""The mapping of launch options and variables to a release's vocabulary, from registry/launch.yaml."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from attnreg.compile.inputs.bundled import registry_root
from attnreg.compile.source.yaml_source import Document, Path_
from attnreg.errors import Problem, RegistryError, did_you_mean

# the options of `attnreg explain` that name a backend
NAMING = ("backend", "prefill_backend", "vision_backend", "draft_backend")
# settings without a word in the vocabulary; `draft`: the draft's config, or how it drafts; `unread`: the setting
# matters, and attnreg does not understand it
KINDS = (*NAMING, "ranks", "model", "draft", "unread")
# the values that turn a setting on: true or 1, a number above 1, any name; or a number of at least 1, which is set
TAKES = ("switch", "number", "name", "count")
_MOST_DIGITS = 18
_ON, _OFF = ("true", "1"), ("false", "0")


@dataclass(frozen=True)
class Setting:
    """The effect of an option or a variable: one of `KINDS`, or a facet, a feature or a flag that it sets.

    ``takes`` is one of `TAKES`; "" means that the facet gets the value itself. ``like`` maps values to those of the
    facet. A setting with ``behind`` is on by default, and has an effect only if the variable ``behind`` is on.
    """

    kind: str = ""
    facet: str = ""
    feature: str = ""
    flag: str = ""
    takes: str = ""
    like: tuple[tuple[str, Any], ...] = ()
    behind: str = ""


_KEYS = [field.name for field in fields(Setting) if field.name != "kind"]


@dataclass(frozen=True)
class Settings:
    """The settings of an engine by its options and by its variables."""

    options: Mapping[str, Setting]
    variables: Mapping[str, Setting]

    def of_option(self, option: str) -> Setting | None:
        """The setting of an option. A key of a JSON object without a setting is unread if the object is."""
        name, found = option, self.options.get(option)
        while found is None and "." in name:
            name = name.rpartition(".")[0]
            above = self.options.get(name)
            found = above if above is not None and above.kind == "unread" else None
        return found

    def has_keys(self, option: str) -> bool:
        """Whether an option takes a JSON object one of whose keys has a setting."""
        return any(known.startswith(f"{option}.") for known in self.options)


def switched(value: str) -> bool | None:
    """Whether a text turns a setting on; None for a text that engines read differently."""
    text = value.casefold()
    return True if text in _ON else False if text in _OFF else None


def number_in(text: str) -> int | None:
    """The number in a text; None for another text, and for a number that no engine accepts."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def digits_note(text: str) -> str:
    """What to add to the refusal of a number that has too many digits; else ""."""
    return f" and of at most {_MOST_DIGITS} digits" if text.isdecimal() and len(text) > _MOST_DIGITS else ""


def words_of_option(engine: str, option: str, version: str) -> Mapping[str, bool]:
    """The words that an option takes in some release, and whether the release has them; empty if any text is taken."""
    words = known_engines()[engine].get("words", {}).get(option, {})
    release = version_parts(version)

    def there(since: str = "", before: str = "") -> bool:
        return version_parts(since) <= release and not (before and version_parts(before) <= release)

    return {word: there(*between) for word, between in words.items()}


@functools.cache
def launch_data() -> Document:
    """The data on engines' commands, options and variables: registry/launch.yaml."""
    return Document.load(registry_root() / "launch.yaml", "registry/launch.yaml")


def known_engines() -> dict[str, dict[str, Any]]:
    """Engine -> the data on its commands, images, options, their short names, and variables."""
    data: dict[str, dict[str, Any]] = launch_data().data
    return data


def version_parts(version: str) -> tuple[int, ...]:
    """The numbers of a release, in a form that compares like releases; a suffix (``rc1``, ``.dev5``) is left out."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


@functools.cache
def full_name(option: str) -> str:
    """The option's name in the data: the long form of a short name, with dashes between its words."""
    name, dot, key = option.partition(".")
    # each short name belongs to one engine
    short = {short: long for about in known_engines().values() for short, long in about.get("short", {}).items()}
    return f"{short.get(name) or (name.replace('_', '-') if name.startswith('--') else name)}{dot}{key}"


@functools.cache
def settings_of(engine: str) -> Settings:
    """The settings of an engine. Raises `RegistryError` with every problem of the data."""
    return read_settings(launch_data(), engine)


def read_settings(document: Document, engine: str) -> Settings:
    """The settings of an engine in a document. Raises `RegistryError` with every problem, each with its place."""
    problems: list[Problem] = []
    found = {
        key: {
            name: _setting(document, (engine, key, name), value, problems)
            for name, value in document.data[engine].get(key, {}).items()
        }
        for key in ("options", "settings")
    }
    variables = found["settings"]
    for name, setting in variables.items():
        if setting.behind and setting.behind not in variables:
            help_ = did_you_mean(setting.behind, variables)
            place = (engine, "settings", name, "behind")
            problems.append(document.problem(place, f"{name}: unknown variable `{setting.behind}`", help_))
    if problems:
        raise RegistryError(problems)
    return Settings(found["options"], variables)


def _setting(document: Document, path: Path_, value: Any, problems: list[Problem]) -> Setting:
    if isinstance(value, str):
        return Setting(kind=value) if value in KINDS else Setting(facet=value)
    found = list(_problems(document, path, value))
    problems += found
    if found:
        return Setting()
    switches = not value.get("like") and (value.get("feature") or value.get("flag"))
    given: dict[str, Any] = {"takes": "switch" if switches else "", **value}
    return Setting(**{**given, "like": tuple(value.get("like", {}).items())})


def _problems(document: Document, path: Path_, value: Any) -> Iterator[Problem]:
    name = path[-1]
    if not isinstance(value, Mapping):
        yield document.problem(path, f"{name}: expected one of {', '.join(KINDS)}, a facet, or a mapping")
        return
    for key, item in value.items():
        kind = Mapping if key == "like" else str
        if key not in _KEYS:
            yield document.problem(
                (*path, key), f"{name}: unknown key `{key}`", did_you_mean(str(key), _KEYS), key=True
            )
        elif not isinstance(item, kind):
            what = "a mapping of texts to values" if key == "like" else "a word"
            yield document.problem((*path, key), f"{name}.{key}: expected {what}, got {item!r}")
        elif key == "takes" and item not in TAKES:
            help_ = did_you_mean(item, TAKES)
            yield document.problem((*path, key), f"{name}.{key}: expected one of {', '.join(TAKES)}", help_)
    if not {"facet", "feature", "flag"} & {*value}:
        yield document.problem(path, f"{name}: sets no facet, no feature and no flag")
