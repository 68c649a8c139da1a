"""Keeps attnreg off classes of transformers that compute attention outside its attention interface.

Such a class never calls an attention function, looks the implementation's name up in a table of its own, or adds masks
to its scores. Under attnreg's name it would end in a KeyError or in wrong numbers. transformers' own
``set_attn_implementation`` leaves such a class on eager, with a warning; loading a model does not. So attnreg wraps the
method in which transformers chooses a class's implementation, for attnreg's names only.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from attnreg.integrations.transformers.engine import Engine
from attnreg.runtime.interface import UnclaimedError

_log = logging.getLogger("attnreg.integrations.transformers")
_told: set[type[Any]] = set()


def stand_aside(engines: Mapping[str, Engine]) -> None:
    """Makes classes outside the interface run by their own eager code where they are built under a name of ``engines``.

    Each class is logged once, as a warning. An engine with dense=False raises `UnclaimedError` instead.
    """
    decide = PreTrainedModel.get_correct_attn_implementation
    if hasattr(decide, "attnreg"):
        return

    @functools.wraps(decide)
    def decided(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        name: str = decide(self, requested_attention, *args, **kwargs)
        engine = engines.get(name)
        if engine is None or type(self)._can_set_attn_implementation():
            return name
        said = f"{type(self).__name__} computes attention by itself, outside transformers' attention interface"
        if not engine.dense:
            raise UnclaimedError(f'{said}, and dense attention is off (dense=False); load it with "eager"', name)
        if type(self) not in _told:
            _told.add(type(self))
            _log.warning("%s: it runs by its own eager code, and attnreg decides nothing for it", said)
        return "eager"

    decided.attnreg = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = decided  # type: ignore[method-assign]
