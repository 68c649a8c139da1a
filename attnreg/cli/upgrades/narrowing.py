"""The layers that ``--facet`` of `attnreg diff` selects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnreg.cli.inputs import Value, facet_value
from attnreg.cli.names import names_of_models
from attnreg.cli.refusals import BadInput

if TYPE_CHECKING:
    from attnreg.analysis.moves import AskedGroup
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest

# facet of a platform -> its option
_PLATFORM_OPTIONS = {"platform": "--platform", "arch": "--arch", "device": "--device-name", "flags": "--flag"}
_PLATFORM_OPTIONS |= {"packages": "--package"}


def wanted_of(only: Iterable[str]) -> dict[str, list[Value]]:
    """Facet -> the values of ``--facet``. Raises `BadInput` for a facet of a platform, which has its own option."""
    wanted: dict[str, list[Value]] = {}
    for name, value in (facet_value("--facet", text) for text in only):
        facet = {"feature": "features", "flag": "flags", "package": "packages"}.get(name, name)
        if facet in _PLATFORM_OPTIONS:
            raise BadInput(f"--facet {name}: no layer asks for it", f"use {_PLATFORM_OPTIONS[facet]} {value}")
        wanted.setdefault(facet, []).append(value)
    return wanted


def narrowed(
    asked: Sequence[AskedGroup], wanted: Mapping[str, Sequence[Value]], registries: Sequence[Registry]
) -> Sequence[AskedGroup]:
    """The layers that ask for one of the values of each facet. Raises `BadInput` if no layer does."""
    for facet, values in wanted.items():
        _validate_facet(facet, values, registries)
        left = [item for item in asked if any(r and _asks(r, facet, values) for r in item.requests)]
        if not left:
            raise _nobody_asks(asked, wanted, facet)
        asked = left
    return asked


def _asks(request: AttentionRequest, facet: str, values: Sequence[Value]) -> bool:
    value = request.facts().get(facet)
    return value >= set(values) if isinstance(value, frozenset) else value in values


def _validate_facet(facet: str, values: Sequence[Value], registries: Sequence[Registry]) -> None:
    from attnreg.errors import did_you_mean

    facets = [f for r in registries if (f := r.vocabulary.facets.get(facet)) is not None and f.of == "request"]
    if not facets:
        names = {name for r in registries for name, f in r.vocabulary.facets.items() if f.of == "request"}
        raise BadInput(f"no request has a facet {facet!r}", did_you_mean(facet, names, 40))
    for value in values if facets[0].kind == "integer" else ():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise BadInput(f"--facet {facet}: expected an integer, got {shown_facet(value)}")
    known = {word for f in facets for word in f.known}
    for value in values if known else ():
        if value is not None and value not in known:
            raise BadInput(f"unknown {facet} {value!r}", did_you_mean(value, map(str, known)))


def _nobody_asks(asked: Sequence[AskedGroup], wanted: Mapping[str, Sequence[Value]], facet: str) -> BadInput:
    """The error if no layer asks for a facet's values; its text has the values that the layers ask for."""
    from attnreg.language.facets import CORE

    text = f"{facet} {' or '.join(map(shown_facet, wanted[facet]))}"
    requests = [r for item in asked for r in item.requests if r]
    stated = dict.fromkeys(shown_facet(r.facts().get(facet)) for r in requests)
    others = f", only for {', '.join(stated)}" if 0 < len(stated) <= 6 else ""
    before = [f"{name} {' or '.join(map(shown_facet, wanted[name]))}" for name in [*wanted][: [*wanted].index(facet)]]
    also = f" that asks for {' and '.join(before)}" if before else ""
    message = f"no layer of {names_of_models([item.model for item in asked])}{also} asks for {text}{others}"
    core = CORE.get(facet)
    if facet == "features":
        option_ = " ".join(f"--feature {word}" for word in wanted[facet])
    elif core is not None and core.help:
        option_ = f"--{facet.replace('_', '-')} {shown_facet(wanted[facet][0])}"
    else:
        option_ = f"--set {facet}={shown_facet(wanted[facet][0])}"
    as_if = f"to ask as if they did, use {option_}"
    return BadInput(message, "name another model with --model" if facet == "model" else as_if)


def shown_facet(value: Any) -> str:
    """The value of a facet as words."""
    if isinstance(value, frozenset):
        return ", ".join(sorted(value)) or "no feature"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
