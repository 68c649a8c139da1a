"""A program in Python that asks the selector what an explanation asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnreg.cli.inputs import BackendInputs, RegistryInputs
from attnreg.explain.answers import Explanation

_IMPORTS = "from attnreg import AttentionRequest, NoBackendError, Platform, load_registry, select"


def program(explanation: Explanation, registry: RegistryInputs, backends: BackendInputs) -> str:
    """A program that selects for the requests of an explanation, each once, on its platform."""
    selections = [v.selection for a in explanation.answers for v in a.verdicts]
    if not selections:
        return "# no layer of this model computes softmax attention"
    requests = dict.fromkeys(f"    AttentionRequest({_arguments(s.request.to_dict())})," for s in selections)
    platform = _arguments({k: v for k, v in selections[0].platform.to_dict().items() if v not in (None, [])})
    named = repr(backends.backend)
    if backends.draft_backend is not None:
        named = f'{backends.draft_backend!r} if request.role == "draft" else {named}'
    asked = "request, platform, registry" + (f", {named}" if named != "None" else "")
    return "\n".join(
        [
            _IMPORTS,
            "",
            f"registry = {_loaded(registry, backends)}  # written for {explanation.registry.title}",
            f"platform = Platform({platform})",
            "requests = [",
            *requests,
            "]",
            "for request in requests:",
            "    try:",
            f"        print(select({asked}))",
            "    except NoBackendError as error:",
            "        print(error)",
        ]
    )


def _loaded(registry: RegistryInputs, backends: BackendInputs) -> str:
    choices = [{"choices": backends.choices}] if backends.choices else []
    overlays = [*registry.overlay, *choices]
    more = f", {overlays!r}" if overlays else ""
    return f"load_registry({registry.registry or 'default'!r}{more}){'.selector' if registry.selector else ''}"


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_literal(value)}" for name, value in values.items())


def _literal(value: Any) -> str:
    """A value of JSON as Python; a list is a set, as features and flags are."""
    if isinstance(value, list):
        return f"{{{', '.join(map(_literal, value))}}}" if value else "set()"
    return repr(value)
