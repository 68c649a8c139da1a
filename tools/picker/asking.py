"""The question of a page, in the words of `attnreg explain`, answered: what the build and the browser both call."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from attnreg.cli.answers import explained
from attnreg.cli.command import command, option
from attnreg.cli.inputs import BackendInputs, PlatformInputs, RegistryInputs, RequestInputs
from attnreg.cli.names import engine_notes
from attnreg.cli.options import backend_options, platform_options, registry_options, request_options
from attnreg.cli.refusals import describe
from attnreg.compile.inputs.configs import find_config
from attnreg.loader import load_registry
from attnreg.registry import Registry
from picker.program import program
from picker.view import view

# how a bundled registry is loaded: a page has it compiled
_loading: Callable[[str], Registry] = load_registry
_loaded: dict[str, Registry] = {}
# a page keeps one registry with overlays or choices, that of the last question: it is compiled anew for another
_changed: dict[object, Registry] = {}


def load_with(loading: Callable[[str], Registry]) -> None:
    """Let bundled registries be loaded by a function."""
    global _loading
    _loading = loading


def bundled(name: str) -> Registry:
    """A bundled registry, loaded once."""
    if name not in _loaded:
        _loaded[name] = _loading(name)
    return _loaded[name]


@dataclass(frozen=True, kw_only=True)
class _Kept(RegistryInputs):
    """The options of a registry, which is loaded once for the questions of a page."""

    def load(
        self, choices: Sequence[Mapping[str, Any]] = (), *, default: str | None = None, quiet: bool = False
    ) -> Registry:
        if not (choices or self.overlay):
            loaded = bundled(self.registry or "default")
            return loaded.selector if self.selector else loaded
        texts = [Path(file).read_text(encoding="utf-8") for file in self.overlay]
        key = (self, *texts, repr(choices))
        if key not in _changed:
            _changed.clear()
            _changed[key] = super().load(choices, default=default, quiet=quiet)
        return _changed[key]


@command()
@platform_options
@request_options
@backend_options
@registry_options
@option("--selector", is_flag=True, help="Ask the engine's selector alone, without what its start changes.")
def _ask(
    registry_inputs: RegistryInputs,
    platform_inputs: PlatformInputs,
    request_inputs: RequestInputs,
    backend_inputs: BackendInputs,
) -> dict[str, Any]:
    # the engine's name has become the registry's
    kept = _Kept(**{**vars(registry_inputs), "engine": None})
    _, explanation = explained(kept, platform_inputs, request_inputs, backend_inputs)
    answer = view(explanation)
    # where a config lies is no news to a reader of the page
    named = [name for name in (request_inputs.model, request_inputs.draft) if name not in (None, "mtp")]
    places = {f"{name} is {find_config(name)}" for name in named if name}
    # the page has a list of engines
    places |= {*engine_notes(registry_inputs.engine, explanation.registry, own=registry_inputs.bundled_default)}
    answer["notes"] = [note for note in answer["notes"] if note not in places]
    return answer | {"program": program(explanation, kept, backend_inputs)}


def answer(words: Sequence[str]) -> dict[str, Any]:
    """What a page shows of the answer to the options of `attnreg explain`; or ``error``, the command's message."""
    try:
        with redirect_stderr(io.StringIO()):
            shown: dict[str, Any] = _ask.main(list(words), prog_name="attnreg explain", standalone_mode=False)
    except (click.ClickException, ValueError, OSError) as e:
        return {"error": describe(e).removeprefix("attnreg: ")}
    return shown
