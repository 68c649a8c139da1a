"""The device to measure: its name in PyTorch, its driver's name, and its platform."""

from __future__ import annotations

import platform as host
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnreg.conformance.devices import cannot_use, platform_of, torch_name, word_of
from attnreg.errors import RequestError
from attnreg.machine.detect import detect
from attnreg.platforms import Platform

if TYPE_CHECKING:
    from attnreg.registry import Registry

_CPUINFO = Path("/proc/cpuinfo")
_HELP = "name another with --device, as cpu or cuda:1; `attnreg doctor` prints this machine"


class Device(NamedTuple):
    """A device: its name in PyTorch, the name that its driver or Linux prints, and its platform."""

    torch: str
    name: str
    platform: Platform


def device_of(name: str, registry: Registry) -> Device:
    """The device with a name in PyTorch; by default the first of this machine.

    This process computes nothing on it: a GPU may accept a single process, and that must be one that times backends.
    Raises `RequestError` for a device that PyTorch does not know or cannot use here. Raises it also if attnreg does not
    find the platform: the device is gone, or PyTorch is built without it.
    """
    name = name or torch_name(detect(registry.vocabulary))
    try:
        device = torch.device(name)
        printed = _printed(device)
    # PyTorch raises AssertionError without support for the device, and a driver may raise anything
    except Exception as e:
        raise cannot_use(name, e, _HELP) from None
    platform = platform_of(device, registry)
    if platform is None:
        raise RequestError(f"attnreg finds no platform {word_of(device)} here, which the device {name!r} is of", _HELP)
    return Device(name, printed, platform)


def _printed(device: torch.device) -> str:
    """The name of a device, from its driver or from Linux. It passes on PyTorch's exceptions."""
    if device.type in ("cuda", "xpu"):
        return str(getattr(torch, device.type).get_device_name(device))
    try:
        text = _CPUINFO.read_text(errors="replace")
        model = next(
            (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), ""
        )
    except OSError:
        model = ""
    return model or host.processor() or host.machine()
