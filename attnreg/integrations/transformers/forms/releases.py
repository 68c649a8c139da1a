"""The differences between releases of transformers, found in the installed one; and the newest tested release."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from packaging.version import Version
from transformers.masking_utils import create_causal_mask

from attnreg.runtime.interface import UnclaimedError

_log = logging.getLogger("attnreg.integrations.transformers")

# the newest release that the tests of this integration have run with
NEWEST = "5.24.0"
# the argument of a model's forward and of ``generate`` that takes a cache: 5.24 renamed it
_CACHES = ("cache", "past_key_values")
CACHE = next((name for name in _CACHES if name in inspect.signature(create_causal_mask).parameters), _CACHES[0])
# arguments that say how to make a mask, or repeat another argument
HOW = frozenset(
    {
        "allow_is_bidirectional_skip", "allow_is_causal_skip", "allow_torch_fix", "config", "dtype", "local_size",
        "use_vmap",
    }
)  # fmt: skip
_told: set[str] = set()


def tell_newer() -> None:
    """Logs once a process that transformers is newer than the newest release that is tested."""
    here = transformers.__version__
    if Version(here) > Version(NEWEST) and here not in _told:
        _told.add(here)
        _log.warning(
            "transformers %s is newer than %s, the newest release that attnreg is tested with; attnreg serves the "
            "forms that it knows, and refuses others",
            here,
            NEWEST,
        )


def unrecognised(what: str, engine: str = "attnreg") -> UnclaimedError:
    """The error for a form of transformers that attnreg does not know. what: the form, as a sentence."""
    return UnclaimedError(
        f"transformers {transformers.__version__}: {what}, which attnreg does not know; install transformers {NEWEST}, "
        'or use attn_implementation="eager" or "sdpa" without attnreg',
        engine,
    )


@contextmanager
def recognising(what: str) -> Iterator[None]:
    """A context for reading attributes of transformers' own objects: a missing one raises `UnclaimedError`."""
    try:
        yield
    except UnclaimedError:
        raise
    except (AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
        raise unrecognised(f"{what} has another form ({type(error).__name__}: {error})") from error


def part(owner: Any, name: str) -> Any:
    """The attribute ``name`` of a class or module of transformers, which attnreg calls or replaces."""
    found = getattr(owner, name, None)
    if found is None:
        raise unrecognised(f"{owner.__name__} has no {name}")
    return found


def submodule(name: str) -> Any:
    """A module of transformers."""
    with recognising(f"transformers.{name}"):
        return importlib.import_module(f"transformers.{name}")
