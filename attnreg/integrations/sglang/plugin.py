"""A plug-in for SGLang: attnreg's backend under its own name, or in the place of ``triton``; off until switched on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from attnreg.environment import SGLANG_VARIABLE

# below SGLang's own logger, so that its level and its handlers apply
_log = logging.getLogger("sglang.attnreg")
Factory = Callable[[Any], Any]


def register() -> None:
    """Adds attnreg's backend to SGLang, if $ATTNREG_SGLANG asks for it.

    SGLang calls this in each of its processes, as the entry point ``attnreg`` of the group ``sglang.srt.plugins``. A
    second call changes nothing. If the variable is not set, empty or 0, SGLang stays as it is. 1 adds the name
    ``attnreg`` for ``--attention-backend``; a run that attnreg does not serve is then an error. ``triton`` also puts
    attnreg in the place of SGLang's backend of that name. A run that attnreg does not serve gets SGLang's own, and the
    log says why. ``require`` is the same, but such a run is an error.

    In a SGLang whose interfaces differ from the recorded ones, attnreg steps aside: it logs that, and changes only the
    names that require it. SGLang logs an exception of a plug-in and starts without it. So a value that is not known
    is an error when SGLang builds a backend that attnreg might have been.
    """
    value = os.environ.get(SGLANG_VARIABLE, "")
    if value in ("", "0"):
        return
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from attnreg.integrations.sglang.record import moved_interfaces
    from attnreg.integrations.sglang.registries import IN_PLACE, NAME, REQUIRED, TAKEN, SglangError, mode_of

    if NAME in ATTENTION_BACKENDS:
        return
    try:
        mode = mode_of(value)
    except SglangError as e:
        _log.error("attnreg: %s", e)
        _add(ATTENTION_BACKENDS, _refuse(str(e)), (NAME, TAKEN))
        return
    if moved := moved_interfaces():
        message = _aside(moved)
        _log.warning("attnreg: %s", message)
        _add(ATTENTION_BACKENDS, _refuse(message), (NAME, TAKEN) if mode == REQUIRED else (NAME,))
        return
    own = ATTENTION_BACKENDS[TAKEN]
    _add(ATTENTION_BACKENDS, _required, (NAME,))
    if mode == REQUIRED:
        ATTENTION_BACKENDS[TAKEN] = _required
    elif mode == IN_PLACE:
        ATTENTION_BACKENDS[TAKEN] = _in_place_of(own)


def _required(runner: Any) -> Any:
    """attnreg's backend for a model runner. Raises `SglangError`, with every reason, for one that it does not serve."""
    from attnreg.integrations.sglang.backend import SglangBackend

    backend = SglangBackend(runner)
    _log.info("attnreg: its kernels serve the layers of this run, over pages of %d", backend.page_size)
    if backend.page_size % 16:
        # HOPPER_ATTN reads pages of whole tiles
        _log.info("attnreg: pages of 16 or 64 tokens are faster on NVIDIA GPUs: give --page-size 64")
    return backend


def _in_place_of(own: Factory) -> Factory:
    """attnreg's backend for each runner that it serves, else SGLang's own, with the reason in the log."""

    def create(runner: Any) -> Any:
        from attnreg.integrations.sglang.registries import SglangError

        try:
            return _required(runner)
        except SglangError as e:
            _log.warning("%s. SGLang's own backend serves it", e)
        except Exception:
            # nothing of the runner has been changed, so SGLang's own starts as without attnreg
            _log.exception("attnreg: failed to build its backend. SGLang's own serves this run")
        return own(runner)

    return create


def _refuse(message: str) -> Factory:
    def create(runner: Any) -> Any:
        from attnreg.integrations.sglang.registries import SglangError

        raise SglangError(f"attnreg: {message}")

    return create


def _add(backends: dict[str, Factory], create: Factory, names: tuple[str, ...]) -> None:
    """Puts a factory under these names. SGLang's command line learns the name ``attnreg``."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices

    from attnreg.integrations.sglang.registries import NAME

    if NAME in names:
        add_attention_backend_choices([NAME])
    backends.update(dict.fromkeys(names, create))


def _aside(moved: list[str]) -> str:
    import sglang

    from attnreg.integrations.sglang.record import VERSION

    return (
        f"steps aside, and SGLang {sglang.__version__} runs as without it: "
        f"it was written for SGLang {VERSION}, since when {'; '.join(moved)}"
    )
