"""The kernel module that serves a layer of vLLM: attnreg's own row for the platform, with its proven claims."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import attnreg
from attnreg.integrations.vllm.layers import machine
from attnreg.integrations.vllm.registries import NAME
from attnreg.loader import load_kernel
from attnreg.packages.installed import installed_packages

# by platform, the rows of attnreg's own registry whose kernels the backend uses. The first that serves a layer runs it;
# the last serves every layer that the backend claims
KERNELS = {"cuda": ("HOPPER_ATTN", "TRITON_ATTN"), "rocm": ("TRITON_ATTN",)}

# below vLLM's own logger, so that its level and its handlers apply
_log = logging.getLogger("vllm.attnreg")
_told: set[str] = set()


def select_kernel(request: attnreg.AttentionRequest) -> attnreg.Selection:
    """The selection of the row that computes a layer. Raises ValueError, with every reason, if none does.

    It logs once which row it is, and why the rows before it cannot.
    """
    return _first_of(request, to_run=True)


def why_unusable() -> str:
    """Why attnreg's kernels cannot run in this process, else "". It initialises no device: vLLM may fork later."""
    plain = attnreg.AttentionRequest(head_size=128, num_heads=8, block_size=16)
    try:
        selection = _first_of(plain)
        if selection.backend is not None:
            load_kernel(selection.registry, selection.backend.title)
    except (ImportError, ValueError) as e:
        return f"its kernels cannot run here: {e}"
    return ""


def _first_of(request: attnreg.AttentionRequest, *, to_run: bool = False) -> attnreg.Selection:
    registry, platform = _registry(), here()
    refusals: dict[str | None, Exception] = {}
    for name in KERNELS.get(platform.platform, (None,)):
        try:
            selection = attnreg.select(request, platform, registry, name, to_run=to_run)
        except (attnreg.NoBackendError, attnreg.RequestError) as e:
            refusals[name] = e
        else:
            if to_run:
                _tell(selection, refusals)
            return selection
    # the last row's refusal, which has the fewest reasons
    *_, last = refusals.values()
    raise ValueError(f"attnreg ({NAME}): {last}") from last


def _tell(selection: attnreg.Selection, refusals: Mapping[str | None, Exception]) -> None:
    """Logs which row computes a layer, and why the rows before it cannot; the same answer once."""
    against = [f"{name} does not: {_reasons(e)}" for name, e in refusals.items()]
    text = ". ".join((f"{selection.title} computes the layers of {NAME}", *against))
    if text not in _told:
        _told.add(text)
        _log.info("attnreg: %s", text)


def _reasons(refusal: Exception) -> str:
    if not isinstance(refusal, attnreg.NoBackendError):
        return str(refusal)
    return "; ".join(reason.text for candidate in refusal.selection.candidates for reason in candidate.reasons)


@functools.cache
def _registry() -> attnreg.Registry:
    """attnreg's own registry, whichever registry decides for vLLM."""
    return attnreg.load_registry("default")


@functools.cache
def here() -> attnreg.Platform:
    """The platform that vLLM runs on, in the words of attnreg's own registry."""
    from vllm.platforms import current_platform

    registry = _registry()
    return machine(type(current_platform), registry, installed_packages(registry.vocabulary.packages))
