"""Finds the option that a person meant by an unknown one."""

from __future__ import annotations

import functools
from difflib import SequenceMatcher

from attnreg.engines.settings import known_engines, settings_of

# the least similarity to a known option at which a long unknown one counts as a typing error
_ALIKE = 0.9
_MOST_LETTERS = 80


@functools.lru_cache(maxsize=4096)
def meant(engine: str, option: str) -> str:
    """The known option that an unknown one resembles; "" if none does, and for an option of the engine's own.

    One letter more, less or other makes a typing error, and so do two letters in the wrong order.
    """
    known, others = settings_of(engine).options, known_engines()[engine].get("others", ())
    if option in known or option in others or len(option) > _MOST_LETTERS:
        return ""
    # an object's own name, such as --attention-config, is known by its keys
    names = dict.fromkeys([*known, *(name.rpartition(".")[0] for name in known if "." in name)])
    if option in names:
        return ""
    near = (name for test in (_one_apart, _alike) for name in names if test(option, name))
    return next(near, "")


def _one_apart(text: str, other: str) -> bool:
    """Whether one letter is added, left out or replaced, or two neighbours are swapped."""
    if abs(len(text) - len(other)) > 1:
        return False
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    rest, of_other = text[same:], other[same:]
    swapped = len(rest) == len(of_other) > 1 and rest[:2] == of_other[1::-1] and rest[2:] == of_other[2:]
    return swapped or rest[1:] == of_other[1:] or rest[1:] == of_other or rest == of_other[1:]


def _alike(text: str, other: str) -> bool:
    if len(other) <= len("--dtype") or abs(len(text) - len(other)) > 1:
        return False
    return SequenceMatcher(None, text, other).ratio() > _ALIKE
