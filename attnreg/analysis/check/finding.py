"""Finding: one fault of a registry or of a launch recipe, with a configuration that shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attnreg.errors import escaped
from attnreg.selection.trace import trace_lines

if TYPE_CHECKING:
    from attnreg.errors import Location
    from attnreg.selection.trace import Selection


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of a registry that loads: what and where it is, how to mend it, and a configuration that shows it.

    ``code`` is one of `codes.codes`. ``subject`` names the data at fault, such as a backend and an order. Both are
    stable; the message may be reworded at any time. ``about`` are facets: the example cites the chosen backend's
    claims on them. A note (``is_note``) is not a fault.
    """

    code: str
    subject: tuple[str, ...]
    where: Location
    message: str
    help: str = ""
    example: Selection | None = None
    about: tuple[str, ...] = ()
    is_note: bool = False

    @property
    def title(self) -> str:
        """``unreachable-entry [FLASHINFER, cuda/vision]``."""
        return titled(self.code, self.subject)

    @property
    def line(self) -> str:
        """The finding without its example and its help."""
        return f"{self.where}: {self.title}: {escaped(self.message)}"

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON-ready values."""
        return {
            "code": self.code,
            "subject": list(self.subject),
            "where": str(self.where),
            "message": self.message,
            "help": self.help,
        }

    def __str__(self) -> str:
        lines = [self.line]
        if self.example is not None:
            lines += [f"  {line}" for line in example_lines(self.example, self.about)]
        if self.help:
            lines.append(f"  help: {escaped(self.help)}")
        return "\n".join(lines)


def titled(code: str, subject: Sequence[str]) -> str:
    """A code and a subject, as findings print them."""
    return f"{code} [{escaped(', '.join(subject))}]"


def told_apart(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, each with a subject of its own: the second one with a code and subject has ``2`` at its end.

    So an accepted finding never accepts another one.
    """
    seen, out = Counter[tuple[str, tuple[str, ...]]](), []
    for finding in findings:
        seen[key := (finding.code, finding.subject)] += 1
        number = seen[key]
        out.append(finding if number == 1 else replace(finding, subject=(*finding.subject, str(number))))
    return out


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
