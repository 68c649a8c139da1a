"""What a launch is checked with: the registry of its release, its GPU and its models, with what had to be assumed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from attnreg.compile.inputs.bundled import bundled_registries, nearest_release, release_name
from attnreg.compile.source.quoting import cut
from attnreg.engines.deploy.launch import EngineLaunch, LaunchError
from attnreg.engines.deploy.words import is_written
from attnreg.errors import Problem, RequestError
from attnreg.loader import load_registry
from attnreg.models.questions import MTP

if TYPE_CHECKING:
    from attnreg.language.vocabulary import Architecture
    from attnreg.registry import Registry

# the end of the methods of speculation whose draft is a part of the model
_OWN_DRAFTS = "mtp"
# methods with that end whose draft is a model of its own
_WITH_MODEL = ("gemma4_mtp",)


@dataclass(frozen=True, kw_only=True)
class LaunchSurroundings:
    """What the caller states of every launch.

    registry: the name of a bundled release, or of an engine, in place of each launch's own. arch and model: those of
    launches that state none. find: the config of a model by one of its names, and a note on it; None for an unknown
    model.
    """

    registry: str | None = None
    arch: str | None = None
    model: str | None = None
    find: Callable[[list[str]], tuple[str, str] | None] = lambda _: None

    @property
    def engine(self) -> str:
        """The engine of ``registry``; "" without one."""
        return (self.registry or "").partition("-")[0]


@dataclass
class Surrounded:
    """The registry, the GPU and the configs for a launch.

    ``missing`` are reasons why it is not checked whole, ``unknown`` what is not known of it.
    """

    registry: Registry
    architecture: Architecture | None = None
    model: str = ""
    draft: str = ""
    assumed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


@functools.lru_cache(maxsize=16)
def loaded(name: str) -> Registry:
    """The bundled registry of a name, loaded once."""
    return load_registry(name)


def surround(launch: EngineLaunch, around: LaunchSurroundings) -> Surrounded:
    """What a launch is checked with. Raises `LaunchError` for a GPU or a model of a recipe that is not known."""
    name, assumed = _release(launch, around)
    found = Surrounded(loaded(name), assumed=[*assumed, *launch.notes])
    _find_architecture(launch, around, found)
    _find_model(launch, around, found)
    return found


def _release(launch: EngineLaunch, around: LaunchSurroundings) -> tuple[str, list[str]]:
    """The registry of a launch's release, and what had to be assumed."""
    given = around.registry
    if given is not None and release_name(given) in bundled_registries():
        return release_name(given), []
    if not launch.version:
        newest = release_name(f"{launch.engine}-0")
        return newest, [f"no release is named: {newest} is assumed"]
    name = release_name(f"{launch.engine}-{launch.version}")
    if name in bundled_registries():
        return name, []
    name = nearest_release(launch.engine, launch.version)
    return name, [f"{launch.engine} {cut(launch.version)} has no table: {name} is the nearest that is bundled"]


def _find_architecture(launch: EngineLaunch, around: LaunchSurroundings, found: Surrounded) -> None:
    vocabulary = found.registry.vocabulary
    if launch.arch:
        found.architecture = vocabulary.architecture(launch.arch)
        if found.architecture is None and "arch" in launch.places:
            message, help_ = f"unknown architecture {cut(launch.arch)}", vocabulary.help_for("arch", launch.arch)
            raise LaunchError([Problem(launch.places["arch"], message, help_)])
    if found.architecture is None and around.arch is not None and not launch.fixed_arch:
        found.architecture = vocabulary.architecture(around.arch)
        if found.architecture is None:
            raise RequestError(f"unknown architecture {around.arch!r}", vocabulary.help_for("arch", around.arch))
        if launch.arch:
            found.assumed.append(f"{launch.shown(launch.arch)} is no GPU of the table: --arch is taken in its place")
    if found.architecture is None:
        name = launch.shown(launch.arch) if launch.arch else ""
        what = f"{name} is no GPU of the table" if name else "no GPU is named"
        found.missing.append(
            f"it is for {name}, which is no single GPU" if launch.fixed_arch else f"{what}: give --arch"
        )


def _find_model(launch: EngineLaunch, around: LaunchSurroundings, found: Surrounded) -> None:
    named = launch.named_model if is_written(launch.named_model) else ""
    known = _config(named, around, found) if named and not launch.model else ""
    found.model = launch.model or known or around.model or ""
    if not found.model and launch.named_model and not named:
        found.missing.append("only the shell knows the model: give --model")
    elif not found.model:
        what = f"the config of {launch.shown(named)} is not here" if named else "no model is named"
        found.missing.append(f"{what}: give --model")
    draft, method = (
        next((option.value for option in reversed(launch.options) if option.name in names), "")
        for names in (
            ("--speculative-config.model", "--speculative-draft-model-path", "--speculative-draft-model"),
            ("--speculative-config.method",),
        )
    )
    if draft and found.model and is_written(draft):
        found.draft = _config(draft, around, found)
        if not found.draft:
            found.assumed.append(f"the config of the draft {launch.shown(draft)} is not here: it is left out")
    elif method.endswith(_OWN_DRAFTS) and method not in _WITH_MODEL and found.model:
        found.draft = MTP


def _config(name: str, around: LaunchSurroundings, found: Surrounded) -> str:
    """The config of a model that a command names: a directory with one, or a model that is known here."""
    if os.path.isfile(os.path.join(name, "config.json")):
        return name
    known = around.find([name, name.rstrip("/").rpartition("/")[2]])
    if known is None:
        return ""
    # an example under its own name is no assumption
    found.assumed += [known[1]] if known[1] and Path(known[0]).parent.name != name else []
    return known[0]
