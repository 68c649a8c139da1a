"""Refuses requests for attention weights.

attnreg's attention function returns no weights. Some classes pass output_attentions on to it, and it refuses. Most
collect the results of their attention modules, and would silently return no weights. So a model under attnreg's name
has a hook before its forward that refuses.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import Any

from transformers import PreTrainedModel

from attnreg.runtime.interface import UnclaimedError

# output_attentions, output_cross_attentions, ...
_ASKED = re.compile(r"output_(\w+_)?attentions\Z")
# the names of attnreg's registrations
_names: set[str] = set()


def refuse_weights(model: PreTrainedModel, names: Collection[str]) -> None:
    """Makes a model refuse output_attentions while its attention is one of ``names``."""
    _names.update(names)
    if _before_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before_forward, with_kwargs=True)


def _before_forward(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if model.config._attn_implementation not in _names:
        return
    given = {"output_attentions": getattr(model.config, "output_attentions", None), **kwargs}
    if len(args) > 1:
        given |= zip(_positions(type(model).forward), args, strict=False)
    for name, value in given.items():
        if isinstance(value, int) and value and _ASKED.match(name):
            raise UnclaimedError(
                f"{type(model).__name__} is asked for attention weights ({name}), and attnreg computes none; use "
                'attn_implementation="eager"',
                "attnreg",
            )


@functools.cache
def _positions(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the arguments of a class's forward, in order."""
    return tuple(inspect.signature(forward).parameters)[1:]
