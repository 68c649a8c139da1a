"""The mapping between PyTorch's devices and attnreg's platforms, and the check that a device works."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnreg.errors import RequestError
from attnreg.machine.detect import detect_all
from attnreg.platforms import Platform

if TYPE_CHECKING:
    from attnreg.registry import Registry

# platform -> PyTorch's name of its devices; all other platforms are `cpu`
_NAMES = {"cuda": "cuda", "rocm": "cuda", "xpu": "xpu"}


def torch_name(platform: Platform) -> str:
    """PyTorch's name of the first device of a platform."""
    return _NAMES.get(platform.platform, "cpu")


def word_of(device: torch.device) -> str:
    """attnreg's word for the platform of a device; the device need not exist."""
    return {"cuda": "rocm" if torch.version.hip else "cuda"}.get(device.type, device.type)


def platform_of(device: torch.device, registry: Registry) -> Platform | None:
    """This machine's platform for a device, None if attnreg finds none.

    Among several GPUs the architecture decides, then the device's name.
    """
    word = word_of(device)
    platforms = [p for p in detect_all(registry.vocabulary) if p.platform == word]
    if word == "cuda" and len(platforms) > 1:
        arch = "sm{}{}".format(*torch.cuda.get_device_capability(device))
        platforms = [p for p in platforms if p.arch == arch]
    if word == "cuda" and len(platforms) > 1:
        name = registry.vocabulary.device(torch.cuda.get_device_name(device))
        platforms = [p for p in platforms if p.device == name] or platforms
    return platforms[0] if platforms else None


def usable(name: str, help_: str) -> torch.device:
    """The device with a name, after a small computation on it.

    Raises `RequestError` with ``help_`` for a device that PyTorch does not know or cannot use here.
    """
    try:
        found = torch.device(name)
        torch.zeros(1, device=found).tolist()
    # PyTorch's exceptions depend on the device, and may even be AssertionError
    except Exception as e:
        raise cannot_use(name, e, help_) from None
    return found


def cannot_use(name: str, error: Exception, help_: str) -> RequestError:
    """The error for a device that PyTorch cannot use, with the first line of PyTorch's message."""
    reason = str(error).partition("\n")[0] or type(error).__name__
    return RequestError(f"PyTorch cannot use the device {name!r} here: {reason}", help_)
