"""The kernel module that serves a layer of vLLM: attnreg's own row for the platform, with its proven claims."""

from __future__ import annotations

import functools
import logging

import attnreg
from attnreg.integrations.kernels import OwnKernels, own_registry
from attnreg.integrations.vllm.layers import machine
from attnreg.integrations.vllm.registries import NAME
from attnreg.loader import load_kernel
from attnreg.packages.installed import installed_packages

KERNELS = {"cuda": ("HOPPER_ATTN", "TRITON_ATTN"), "rocm": ("TRITON_ATTN",)}
_own = OwnKernels(NAME, KERNELS, logging.getLogger("vllm.attnreg"), set())


def select_kernel(request: attnreg.AttentionRequest) -> attnreg.Selection:
    """The selection of the row that computes a layer. Raises ValueError, with every reason, if none does.

    It logs once which row it is, and why the rows before it cannot.
    """
    return _own.select(request, here(), to_run=True)


def why_unusable() -> str:
    """Why attnreg's kernels cannot run in this process, else "". It initialises no device: vLLM may fork later."""
    plain = attnreg.AttentionRequest(head_size=128, num_heads=8, block_size=16)
    try:
        selection = _own.select(plain, here())
        if selection.backend is not None:
            load_kernel(selection.registry, selection.backend.title)
    except (ImportError, ValueError) as e:
        return f"its kernels cannot run here: {e}"
    return ""


@functools.cache
def here() -> attnreg.Platform:
    """The platform that vLLM runs on, in the words of attnreg's own registry."""
    from vllm.platforms import current_platform

    registry = own_registry()
    return machine(type(current_platform), registry, installed_packages(registry.vocabulary.packages))
