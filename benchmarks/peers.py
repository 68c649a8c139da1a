"""Backends of the registry as peers of a benchmark: the kernel modules of rows that serve a case and load here."""

from __future__ import annotations

from types import ModuleType

from attnreg.loader import default_registry, load_kernel, unloadable
from attnreg.machine.detect import detect
from attnreg.request import AttentionRequest
from attnreg.selection.selector import evaluate


def module_of(title: str, request: AttentionRequest) -> ModuleType | str:
    """The kernel module of a backend or variant (``FLASH_ATTN/FA3``) for a request; else the reasons."""
    selection = evaluate(request, detect(), default_registry(), title, unloadable=unloadable)
    if selection.backend is None:
        return "; ".join(selection.against(title))
    return load_kernel(selection.registry, selection.backend.title)
