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
    named = {s.request: s.requested or (s.gave_way.title if s.gave_way else None) for s in selections}
    written = {request: f"AttentionRequest({_arguments(request.to_dict())})" for request in named}
    # options reach layers apart, so that each request may have a backend of its own
    apart = len({*named.values()}) > 1
    requests = [f"    ({text}, {named[r]!r})," if apart else f"    {text}," for r, text in written.items()]
    platform = _arguments({k: v for k, v in selections[0].platform.to_dict().items() if v not in (None, [])})
    one = next(iter(named.values()))
    asked = "request, platform, registry" + (", backend" if apart else f", {one!r}" if one else "")
    return "\n".join(
        [
            _IMPORTS,
            "",
            f"registry = {_loaded(registry, backends)}  # written for {explanation.registry.title}",
            f"platform = Platform({platform})",
            "requests = [",
            *requests,
            "]",
            f"for request{', backend' if apart else ''} in requests:",
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
