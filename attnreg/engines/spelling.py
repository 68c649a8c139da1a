"""Finds the option that a person meant by an unknown one."""

from __future__ import annotations

import functools
import re
from difflib import SequenceMatcher
from typing import NamedTuple

from attnreg.engines.deploy.launch import BROKEN_LINE
from attnreg.engines.deploy.words import DASHES
from attnreg.engines.settings import full_name, known_engines, settings_of

# the least similarity to a known option at which an unknown one counts as a typing error
_ALIKE = 0.82
_MOST_LETTERS = 80
# one of these words makes an unknown option one about attention
_ABOUT = re.compile(r"(?<![a-z])(attn|attention|kv|kvcache)(?![a-z])")


class Slip(NamedTuple):
    """What is wrong with a word of a command: the code of the finding, a sentence, and the cure."""

    code: str
    message: str
    help: str


def slip(engine: str, option: str, shown: str) -> Slip | None:
    """What is wrong with an option that has no setting; None for one that has nothing to do with attention."""
    if option == BROKEN_LINE:
        message = "a blank stands behind the backslash: the command ends here, without the options below"
        return Slip("broken-line", message, "remove the blank")
    name, *more = option.split(maxsplit=1)
    if more and (_names(engine).get(full_name(name)) or meant(engine, name)):
        message = f"unknown option {shown}: it is one word with its value"
        return Slip("unknown-option", message, f"write two words, or `{name}=…`")
    if option.startswith("--"):
        known = meant(engine, option)
        return Slip("unknown-option", f"unknown option {shown}", f"did you mean `{known}`?") if known else None
    name = f"--{full_name(option).lstrip(f'-{DASHES}')}"
    known = name if _names(engine).get(name) else meant(engine, name)
    message = f"unknown option {shown}: an option begins with two hyphens"
    return Slip("unknown-option", message, f"write `{known}`") if known else None


@functools.lru_cache(maxsize=4096)
def meant(engine: str, option: str) -> str:
    """The known option that an unknown one stands for; "" for an option that has nothing to do with attention.

    An unknown option counts if it resembles a known one, or if one of its words is about attention.
    """
    names = _names(engine)
    # the parser adds an option with `--no-` to each switch
    negated = f"--{option.removeprefix('--no-')}"
    if option in names or negated in names or len(option) > _MOST_LETTERS or abbreviated(engine, option):
        return ""
    parent, _, key = option.rpartition(".")
    if parent and parent not in names:
        known = meant(engine, parent)
        return f"{known}.{key}" if known else ""
    # a key is compared with the keys beside it
    beside = [name for name in names if name.rpartition(".")[0] == parent]
    # of the names that are one letter away, those with a setting come first
    apart = {name: _one_apart(option, name) for name in beside}
    ranked = sorted(
        beside, key=lambda name: (not apart[name], apart[name] and not names[name], -_likeness(option, name))
    )
    if not ranked:
        return ""
    near = ranked[0]
    if apart[near] or (len(near) > len("--dtype") and _likeness(option, near) > _ALIKE):
        return near if names[near] else ""
    about = _ABOUT.search(option.partition(".")[0].replace("_", "-"))
    return next((name for name in ranked if names[name]), "") if about else ""


def abbreviated(engine: str, option: str) -> bool:
    """Whether an unknown option is the beginning of known ones: the engines' parsers take it for one that is alone."""
    names = _names(engine)
    longer = (name for name, known in names.items() if known and "." not in name and name.startswith(option))
    return len(option) > len("--") and option not in names and any(longer)


@functools.cache
def _names(engine: str) -> dict[str, bool]:
    """The options of an engine. True: one with a setting; an object is known by its keys. False: another option."""
    known, others = settings_of(engine).options, known_engines()[engine].get("others", ())
    parents = (name.rpartition(".")[0] for name in known if "." in name)
    return {**dict.fromkeys(others, False), **dict.fromkeys([*known, *parents], True)}


def _likeness(text: str, other: str) -> float:
    return SequenceMatcher(None, _spelled(text), _spelled(other), autojunk=False).ratio()


def _spelled(option: str) -> str:
    return re.sub(r"\battn\b", "attention", option)


def _one_apart(text: str, other: str) -> bool:
    """Whether one letter is added, left out or replaced, or two neighbours are swapped."""
    if abs(len(text) - len(other)) > 1:
        return False
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    rest, of_other = text[same:], other[same:]
    swapped = len(rest) == len(of_other) > 1 and rest[:2] == of_other[1::-1] and rest[2:] == of_other[2:]
    return swapped or rest[1:] == of_other[1:] or rest[1:] == of_other or rest == of_other[1:]
