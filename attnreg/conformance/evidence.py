"""The evidence for a backend's claims: the results of its cases, counted by claimed value, and the file of them."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnreg.language.facets import PROVEN
from attnreg.version import __version__

if TYPE_CHECKING:
    from attnreg.conformance.claims import Size
    from attnreg.conformance.proof import Outcome
    from attnreg.conformance.trial import Case
    from attnreg.platforms import Platform


@dataclass
class Tally:
    """The cases that hold one claimed value: how many there are, and the worst error of an output."""

    cases: int = 0
    error: float = 0.0
    share: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count one more case."""
        self.cases += 1
        self.error, self.share = max(self.error, outcome.error), max(self.share, outcome.share)


@dataclass
class Evidence:
    """The evidence for one backend on one device.

    platform: what it was selected for; its kernels may have run on another device than that has. claims: facet ->
    claimed value -> tally; features are a facet. problems: what was refuted, case by case. unproven: claimed features
    that no run on one device can prove; claimed values that this device could not try.
    """

    backend: str
    platform: Platform
    size: Size
    claims: dict[str, dict[str, Tally]] = field(default_factory=dict)
    cases: int = 0
    refused: int = 0
    problems: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        """Whether nothing was refuted and nothing left out."""
        return not self.problems and not self.unproven

    def add(self, case: Case, outcome: Outcome) -> None:
        """Count a case for every claimed value that it holds."""
        self.cases += 1
        if outcome.problem:
            self.problems.append(f"{case.words}: {outcome.problem}")
        values = [(facet, getattr(case.request, facet)) for facet in PROVEN]
        for facet, value in [*values, *(("features", f) for f in sorted(case.request.features))]:
            if value is not None:
                self.claims.setdefault(facet, {}).setdefault(str(value), Tally()).add(outcome)

    def lines(self) -> Iterator[str]:
        """The result in words: one line, and one more for each problem and for each claim left unproven."""
        worst = max((t.share for tallies in self.claims.values() for t in tallies.values()), default=0.0)
        verdict = "proven" if self.proven else "REFUTED" if self.problems else "proven in part"
        counts = f"{self.cases} cases, {self.refused} refusals"
        yield f"{self.backend}: {verdict}; {counts}, worst error {worst:.0%} of its bound"
        yield from (f"  {problem}" for problem in self.problems)
        yield from (f"  not proven here: {word}" for word in self.unproven)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, with the versions that they were found with."""
        claims = {
            facet: {
                value: {"cases": t.cases, "error": float(f"{t.error:.3g}"), "share": float(f"{t.share:.3g}")}
                for value, t in sorted(tallies.items(), key=lambda item: (len(item[0]), item[0]))
            }
            for facet, tallies in sorted(self.claims.items())
        }
        return {
            "versions": {"attnreg": __version__, "torch": torch.__version__, "triton": _version("triton")},
            "for": f"{self.platform.platform} {self.platform.arch}",
            "size": self.size,
            "cases": self.cases,
            "refused": self.refused,
            "unproven": self.unproven,
            "claims": claims,
        }


def save(found: list[Evidence], place: Path, device: torch.device) -> None:
    """Write evidence to a file, or to a directory's ``<device>.json``, beside what is there of other backends.

    A backend with a problem is struck from the file.
    """
    title = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    file = place / f"{re.sub('[^a-z0-9]+', '_', title.lower())}.json" if place.is_dir() else place
    backends: dict[str, Any] = json.loads(file.read_text())["backends"] if file.exists() else {}
    for evidence in found:
        backends.pop(evidence.backend, None)
        if not evidence.problems:
            backends[evidence.backend] = evidence.to_dict()
    # PyTorch for ROCm calls its devices cuda too
    machine = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    data = {"device": title, "platform": machine}
    text = json.dumps({**data, "backends": dict(sorted(backends.items()))}, indent=2)
    # a line for each claimed value: what a change of evidence is read by
    file.write_text(re.sub(r"\{[^{}]*\}", lambda m: " ".join(m[0].split()), text) + "\n")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
