"""Reads the words of a command that runs an engine: its options, its model, and the variables before it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from attnreg.engines.deploy.launch import MOST_WORDS, EngineLaunch, GivenOption, GivenVariable, LaunchError
from attnreg.engines.deploy.places import PlacedWord, Yaml, as_text, json_places
from attnreg.engines.settings import full_name, known_engines
from attnreg.errors import Location, Problem

ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
# shell variables that hold options, by their names: `$@`, `${ARGS[@]}`, `$EXTRA_ARGS`
_HOLDS_OPTIONS = re.compile(
    r"\$\{?[@*]|\[[@*]\]|\$\{?(?:\w*_)?(?:ARGS?|OPTS?|OPTIONS?|EXTRAS?|FLAGS?|PARAMS?)(?:_\w*)?(?!\w)", re.IGNORECASE
)
# characters that look like a hyphen, as word processors write them
DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"
# a word after an option that is another option; a negative number is a value
_OPTION = re.compile(rf"[-{DASHES}][^\d.]")
# an option with other dashes than two hyphens; the short names of options are not meant
_OTHER_DASHES = re.compile(rf"-?[{DASHES}]-?[^\d.]|-[A-Za-z]+[-_]\w")
# an expression of a template (Helm, Jinja): a manifest with it is no manifest yet
_TEMPLATE = re.compile(r"\{\{-?\s*[.$\w]")
# an expression of Helm alone; Jinja's may be the text of a chat's template
_CHART = re.compile(r"\{\{-?\s*(?:[.$]|(?:if|else|end|include|range|template|toYaml|tpl|with)\b)")
# a release, or what is built before or after one
_VERSION = r"\d+\.\d+(?:\.\d+)?(?:[-.]?(?:rc|dev|post)\d+)?"
# a tag that names a release of the engine
_RELEASE_TAG = re.compile(rf"(?:.*_(?:vllm|sglang)[-_])?v?({_VERSION})(?:[-_.+].*)?")
# a requirement that pins the engine, as in `uvx --from vllm==0.33.0 vllm serve`
_PINNED = re.compile(rf"(?:\S+=)?(\w+)(?:\[[\w,-]*\])?={{2,3}}({_VERSION})(?:\+\S*)?")
# words that may precede the first word of a command
_BEFORE = {"!", "{", "do", "else", "elif", "exec", "if", "nohup", "sudo", "then", "time", "until", "while"}
# commands that install packages, and the word after them that says so
_INSTALLERS = {"pip", "pip3", "uv"}
# commands that only print or search for their words
_SAYS = {"echo", "grep", "logger", "pgrep", "pkill", "printf"}


def is_written(value: str) -> bool:
    """Whether a value is literal, without variables and commands of a shell."""
    return "$" not in value and "`" not in value


def is_template(value: str) -> bool:
    """Whether a value has an expression of a template."""
    return _TEMPLATE.search(value) is not None


def is_chart(value: str) -> bool:
    """Whether a value has an expression of a Helm chart."""
    return _CHART.search(value) is not None


def command_word(word: str) -> str:
    """The name of a command or a module in a word, without the directory."""
    name = word.lstrip("`").removeprefix("-m").rstrip("`")
    return PurePosixPath(name).name if "/" in name and len(name.split()) == 1 else name


def only_says(words: Sequence[PlacedWord]) -> bool:
    """Whether a command only prints its words or searches for them."""
    names = (command_word(word.text) for word in words if not ASSIGNMENT.fullmatch(word.text))
    return next((name for name in names if name and name not in _BEFORE), "") in _SAYS


def may_run(text: str) -> bool:
    """Whether a text has the first word of an engine's command, or its image."""
    return any(name in text for name in _names(True))


def mentions(text: str) -> bool:
    """Whether a text contains the command or the image of an engine, also inside quotes."""
    return any(name in text for name in _names(False))


@functools.cache
def _names(first: bool) -> tuple[str, ...]:
    """The commands of engines, or their first words, and their images."""
    known = known_engines().values()
    names = (name for about in known for name in (*about["commands"], *about.get("images", ())))
    return tuple(dict.fromkeys(name.split()[0] if first else name for name in names))


def installed(words: Sequence[PlacedWord]) -> dict[str, PlacedWord]:
    """The releases that `pip install` or `uv pip install` pins in a command, each under its engine and "=="."""
    plain = [word.text for word in words]
    if not any(name in ("install", "add") and command_word(pip) in _INSTALLERS for pip, name in pairwise(plain)):
        return {}
    pinned = ((_PINNED.fullmatch(word.text), word) for word in words)
    found = {match[1]: word._replace(text=match[2]) for match, word in pinned if match is not None}
    return {f"{engine}==": word for engine, word in found.items() if engine in known_engines()}


def engine_of(words: Sequence[PlacedWord]) -> str:
    """The engine that a command line runs, else ""."""
    return "" if only_says(words) else _found_in(words)[0]


def image_of(image: str) -> tuple[str, bool, str]:
    """The engine of a container image, whether the image takes the engine's options, and the release of its tag.

    Each is empty for an image that is not the engine's own. A tag such as `latest` names no release.
    """
    name, _, tag = image.partition("@")[0].rpartition(":")
    if not name or "/" in tag:
        name, tag = image.partition("@")[0], ""
    for engine, about in known_engines().items():
        for takes, images in ((True, about.get("images", ())), (False, about.get("bases", ()))):
            if any(f"/{name}".endswith(f"/{known}") for known in images):
                release = _RELEASE_TAG.fullmatch(tag)
                return engine, takes, release[1] if release else ""
    return "", False, ""


def _found_in(words: Sequence[PlacedWord]) -> tuple[str, int]:
    """The engine whose command is in some words, and the index of the next word; "" and 0 without one."""
    plain = [command_word(word.text) for word in words]
    for engine, about in known_engines().items():
        for parts in map(str.split, about["commands"]):
            for i, word in enumerate(plain):
                is_module = word.startswith(f"{parts[0]}.") and "." in parts[0]
                if plain[i : i + len(parts)] == parts or is_module:
                    return engine, i + len(parts)
    if "run" not in plain:
        return "", 0
    if (entry := _entry(words)) is not None:
        return _behind_entry(entry, words)
    found = ((image_of(word.text), i) for i, word in enumerate(words, 1))
    return next(((engine, i) for (engine, takes, _), i in found if takes), ("", 0))


def _entry(words: Sequence[PlacedWord]) -> str | None:
    """The name of the command that `docker run` starts in place of an image's own entry; None if it names none."""
    pairs = pairwise((*(word.text for word in words), ""))
    given = (text.partition("=")[2] or after for text, after in pairs if text.partition("=")[0] == "--entrypoint")
    entry = next(given, None)
    return None if entry is None else command_word(entry)


def _behind_entry(entry: str, words: Sequence[PlacedWord]) -> tuple[str, int]:
    """The engine of `docker run --entrypoint vllm IMAGE serve`, and the index of the next word; "" and 0 without one.

    The value of an option of `docker run` is no word of the command.
    """
    commands = ((engine, part) for engine, about in known_engines().items() for part in about["commands"])
    for engine, (first, *rest) in ((engine, part.split()) for engine, part in commands):
        for i, (before, word) in enumerate(pairwise(words), 2):
            if rest == [word.text] and first == entry and not before.text.startswith("-"):
                return engine, i
    return "", 0


def read_words(words: Sequence[PlacedWord], launch: EngineLaunch) -> None:
    """Read the words of a command: the variables before it, its options, and words with shell variables.

    Words without an engine's command are options alone. Raises `LaunchError` for a command of too many words, and for
    a template in place of a command.
    """
    if len(words) > MOST_WORDS:
        raise LaunchError([Problem(words[0].where, f"a command of more than {MOST_WORDS:,} words")])
    engine, behind = _found_in(words)
    launch.engine = launch.engine or engine
    for word in words[:behind]:
        pinned = _PINNED.fullmatch(word.text)
        if pinned is not None and pinned[1] == launch.engine:
            launch.version = pinned[2]
        elif (image := image_of(word.text))[0]:
            launch.version = image[2]
    # `vllm serve MODEL`, or an image that runs it and its words; a module takes the model by an option
    command = [command_word(word.text) for word in words[max(behind - 1, 0) : behind]]
    of_image = bool(behind) and image_of(words[behind - 1].text)[1]
    takes_model = launch.engine == "vllm" and (command[-1:] == ["serve"] or of_image or not behind)
    for i, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        option = full_name(name)
        before = words[i - 1].text if i > behind else ""
        assigned = word.text.removeprefix("--env=") if i < behind else word.text
        if (parts := ASSIGNMENT.fullmatch(assigned)) is not None:
            launch.variables.append(GivenVariable(parts[1], parts[2], word.where))
        elif i < behind:
            continue
        elif option.startswith("--") or _OTHER_DASHES.match(option):
            source, maybe = word, word.maybe
            if not equals and i + 1 < len(words) and not _OPTION.match(words[i + 1].text):
                source = words[i + 1]
                value, maybe = source.text, maybe or source.maybe
            places = json_places(source.as_text, len(source.text) - len(value)) if value.startswith("{") else {}
            add_option(launch, option, value, word.where, maybe=maybe, places=places)
        elif is_template(word.text) and not _takes_value(before):
            raise LaunchError([template_problem(word.where)])
        elif i == behind and takes_model:
            _name_model(launch, word.text, word.where, word.maybe)
            launch.expansions += [word.text] if _HOLDS_OPTIONS.search(word.text) else []
        elif is_written(word.text):
            continue
        # any other word with a shell variable, except the value of an option
        elif _HOLDS_OPTIONS.search(word.text) or not _takes_value(before):
            launch.expansions.append(word.text)


def take_release(words: Iterable[PlacedWord], launches: Iterable[EngineLaunch]) -> None:
    """Give launches without a release that of the image among the words of the command that runs them."""
    engine, _, release = next((found for word in words if (found := image_of(word.text))[0]), ("", False, ""))
    for launch in launches:
        if launch.engine == engine and not launch.version:
            launch.version = release


def template_problem(where: Location) -> Problem:
    """The refusal of a template."""
    help_ = "render it first, such as with `helm template NAME CHART > rendered.yaml`, and check the result"
    return Problem(where, "this is a template: the values behind {{ }} are not known", help_)


def _takes_value(word: str) -> bool:
    """Whether a word is an option whose value is the next word."""
    return word.startswith("-") and "=" not in word


def add_option(
    launch: EngineLaunch,
    option: str,
    value: Any,
    where: Location,
    *,
    maybe: bool = False,
    places: Mapping[tuple[str, ...], Location],
) -> None:
    """Add an option; one with a JSON object or a mapping becomes one option for each key. Raises `LaunchError`.

    places: the place of each key. ``where``, the place of the option, is that of a key without one.
    """
    for path, text in _options((), value):
        name = ".".join((option, *path))
        if len(launch.options) >= MOST_WORDS:
            raise LaunchError([Problem(where, f"more than {MOST_WORDS:,} options")])
        about = known_engines().get(launch.engine, {}).get("options", {}).get(name)
        if about is not None and is_template(text):
            raise LaunchError([template_problem(where)])
        if about == "model" and text:
            _name_model(launch, text, where, maybe)
        launch.options.append(GivenOption(name, text, places.get(path, where), maybe))


def _name_model(launch: EngineLaunch, name: str, where: Location, maybe: bool) -> None:
    """Name the launch's model; one that a branch decides is not known."""
    launch.named_model, launch.places["named_model"] = "$model" if maybe else name, where


def _options(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            yield path, value
            return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _options((*path, str(key)), inner)
    else:
        yield path, as_text(value)


def mapped_options(launch: EngineLaunch, yaml: Yaml, *path: str | int, without: Container[str] = ()) -> None:
    """Add the options of a mapping, whose names may lack the dashes. without: options that are left out."""
    for key, value in yaml.value(*path).items():
        name = str(key)
        option, at = full_name(name if name.startswith("-") else f"--{name}"), (*path, key)
        if not option.startswith("--") or option in without:
            continue
        if isinstance(value, str):
            text = yaml.text(*at)
            add_option(launch, option, text.text, yaml.key_at(*at), places=json_places(text, 0))
        else:
            add_option(launch, option, value, yaml.key_at(*at), places=yaml.keys_below(*at))
