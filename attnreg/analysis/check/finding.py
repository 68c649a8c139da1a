"""Finding: one fault of a registry, with a configuration that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnreg.selection.trace import trace_lines

if TYPE_CHECKING:
    from attnreg.errors import Location
    from attnreg.selection.trace import Selection


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of a registry that loads: its kind and line, how to mend it, and a configuration that shows it."""

    kind: str
    where: Location
    message: str
    help: str = ""
    example: Selection | None = None

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.message}"]
        if self.example is not None:
            lines += [f"  {line}" for line in example_lines(self.example)]
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)


def example_lines(selection: Selection) -> list[str]:
    """A configuration and its trace, in plain text."""
    platform, request = selection.platform, selection.request
    flags = f" flags={','.join(sorted(platform.flags))}" if platform.flags else ""
    shown = " ".join(f"{k}={_value_text(v)}" for k, v in request.to_dict().items())
    missing = ""
    if platform.packages is not None:
        installed = {name for name, _ in platform.packages}
        absent = sorted(set(selection.registry.vocabulary.packages) & _missing_packages(selection) - installed)
        missing = f" without packages {', '.join(absent)}" if absent else ""
    lines = [f"for example: {platform.platform} {platform.arch}{flags}{missing} {shown}"]
    lines.append(f"  chosen: {selection.backend.name if selection.backend else 'none'}")
    return lines + [f"  {line}" for line in trace_lines(selection)]


def _value_text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{k}:{_value_text(v)}" for k, v in value.items())
    return ",".join(value) if isinstance(value, list) else "none" if value is None else str(value)


def _missing_packages(selection: Selection) -> set[str]:
    """The packages that some reason names."""
    return {str(r.asked) for c in selection.candidates for r in c.reasons if "packages" in r.facets}
