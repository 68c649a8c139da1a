"""Writes the command line that repeats the question of a run on any machine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from attnreg.environment import REGISTRY_VARIABLE

if TYPE_CHECKING:
    from attnreg.platforms import Platform

# options of the output are left out; those of the platform get the detected values
_LEFT_OUT = ("as_json", "brief")
_PLATFORM = ("platform", "arch", "device", "flags", "packages")


def command_line(context: click.Context, platform: Platform | None) -> str:
    """The command of a context with its options.

    platform: the detected platform; its words replace the options of a platform. None: options name the platform.
    $ATTNREG_REGISTRY becomes the option ``--registry``.
    """
    values = dict(context.params)
    values["registry"] = values.get("registry") or os.environ.get(REGISTRY_VARIABLE)
    if platform is not None:
        versions = [f"{name}=={version}" if version else name for name, version in platform.packages or ()]
        packages = versions or ([] if platform.packages is None else ["none"])
        device = () if platform.device is None else (platform.device,)
        detected = (platform.platform, (platform.arch,), device, sorted(platform.flags), packages)
        values |= dict(zip(_PLATFORM, detected, strict=True))
    words = context.command_path.split()
    for param in context.command.params:
        if param.name not in _LEFT_OUT:
            words += _words(param, values.get(param.name or ""))
    return shlex.join(words)


def _words(param: click.Parameter, value: Any) -> Iterator[str]:
    """The words of one option; empty for an option with its default value."""
    if value is None or value is False or value == param.default:
        return
    if value is True:
        yield param.opts[0]
        return
    for each in value if param.multiple else (value,):
        yield from (param.opts[0], str(each))
