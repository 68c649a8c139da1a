"""Finding: one fault of a registry, with a configuration that shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnreg.selection.trace import trace_lines

if TYPE_CHECKING:
    from attnreg.errors import Location
    from attnreg.selection.trace import Selection


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of a registry that loads: its kind and line, how to mend it, and a configuration that shows it.

    ``about`` are facets; the example cites the chosen backend's claims on them. A note (``is_note``) is not a fault.
    """

    kind: str
    where: Location
    message: str
    help: str = ""
    example: Selection | None = None
    about: tuple[str, ...] = ()
    is_note: bool = False

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.message}"]
        if self.example is not None:
            lines += [f"  {line}" for line in example_lines(self.example, self.about)]
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)


def example_lines(selection: Selection, about: Sequence[str] = ()) -> list[str]:
    """A configuration, the claims by which the chosen backend accepts it, and its trace, in plain text."""
    platform, request = selection.platform, selection.request
    device = f" {platform.device}" if platform.device else ""
    flags = f" flags={','.join(sorted(platform.flags))}" if platform.flags else ""
    shown = " ".join(f"{k}={_value_text(v)}" for k, v in request.to_dict().items())
    missing = ""
    if platform.packages is not None:
        installed = {name for name, _ in platform.packages}
        absent = sorted(set(selection.registry.vocabulary.packages) & _missing_packages(selection) - installed)
        missing = f" without packages {', '.join(absent)}" if absent else ""
    lines = [f"for example: {platform.platform} {platform.arch}{device}{flags}{missing} {shown}"]
    lines.append(f"  chosen: {selection.backend.name if selection.backend else 'none'}")
    lines += [f"    accepts {claim}" for claim in _claims(selection, about)]
    return lines + [f"  {line}" for line in trace_lines(selection)]


def _claims(selection: Selection, about: Sequence[str]) -> Iterator[str]:
    """The chosen variant's claims on the facets of the request, each with its line."""
    chosen = selection.backend
    if chosen is None:
        return
    variant = next(v for v in chosen.row.variants if v.name == chosen.variant)
    facets = selection.registry.vocabulary.facets
    stated = {claim.facet: (claim.matcher.text, claim.where) for claim in variant.claims}
    stated |= {
        name: ("any", variant.open[f.claim]) for name, f in facets.items() if f.claim and f.claim in variant.open
    }
    given = selection.request.to_dict()
    for facet in about:
        if facet in stated and facet in given:
            text, where = stated[facet]
            # `attention` is stated by the row itself
            claim = facets[facet].claim or facet
            yield f"{facet} {_value_text(given[facet])} by {claim}: {text}  [{where.short}]"


def _value_text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{k}:{_value_text(v)}" for k, v in value.items())
    return ",".join(value) if isinstance(value, list) else "none" if value is None else str(value)


def _missing_packages(selection: Selection) -> set[str]:
    """The packages in the reasons of all candidates."""
    return {str(r.asked) for c in selection.candidates for r in c.reasons if "packages" in r.facets}
