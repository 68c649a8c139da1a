"""Keeps attnreg off classes of transformers that compute attention outside its attention interface.

Such a class never calls an attention function, looks the implementation's name up in a table of its own, or adds masks
to its scores. Under attnreg's name it would end in a KeyError or in wrong numbers. transformers' own
``set_attn_implementation`` leaves such a class on eager, with a warning; loading a model does not. So attnreg wraps the
method in which transformers chooses a class's implementation, for attnreg's names only.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from attnreg.integrations.transformers.engine import Engine
from attnreg.integrations.transformers.forms.releases import part
from attnreg.integrations.transformers.latent.lazy import stand_between
from attnreg.integrations.transformers.weights import refuse_weights
from attnreg.runtime.interface import UnclaimedError

_log = logging.getLogger("attnreg.integrations.transformers")
_told: set[type[Any]] = set()
# the method in which transformers chooses the implementation of a class
DECIDE = "get_correct_attn_implementation"
_ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\((?:torch\.)?nn\.Module\):", re.MULTILINE)
_INTERFACE = re.compile(r"\bALL_ATTENTION_FUNCTIONS(?:\.get_interface\(|\[)")
# a look-up in a table of classes by the implementation's name: such a table lacks registered names
_TABLE = re.compile(r"(?<!FUNCTIONS)\[(?:self\.)?config\._attn_implementation\]")


def stand_aside(engines: Mapping[str, Engine]) -> None:
    """Makes classes outside the interface run their own eager code if a model is built under a name of ``engines``.

    It logs each class once, as a warning. For an engine with dense=False it raises `UnclaimedError` instead.
    """
    decide = part(PreTrainedModel, DECIDE)
    if hasattr(decide, "attnreg"):
        return

    @functools.wraps(decide)
    def decided(self: Any, *args: Any, **kwargs: Any) -> str:
        name: str = decide(self, *args, **kwargs)
        engine = engines.get(name)
        if engine is None:
            return name
        if not is_outside(type(self)):
            refuse_weights(self, engines)
            stand_between(type(self), engines)
            return name
        said = f"{type(self).__name__} computes attention by itself, outside transformers' attention interface"
        if not engine.dense:
            raise UnclaimedError(f'{said}, and dense attention is off (dense=False); load it with "eager"', name)
        if type(self) not in _told:
            _told.add(type(self))
            _log.warning("%s: it runs by its own eager code, and attnreg decides nothing for it", said)
        return "eager"

    decided.attnreg = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, DECIDE, decided)


def is_outside(cls: type[PreTrainedModel]) -> bool:
    """Whether a class, or a class that it inherits from, stands in a module with attention outside the interface."""
    models = (base for base in cls.__mro__ if issubclass(base, PreTrainedModel) and base is not PreTrainedModel)
    return any(_has_its_own_attention(base.__module__) for base in models)


@functools.cache
def _has_its_own_attention(module: str) -> bool:
    """Whether the source of a module has attention outside the interface; True if there is no source to read."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return True
    return bool(_TABLE.search(source) or (_ATTENTION_CLASS.search(source) and not _INTERFACE.search(source)))
