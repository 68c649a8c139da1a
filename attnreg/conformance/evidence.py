"""Evidence: the results of a backend's cases, and the signed JSON file that records them."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnreg.files import FileError, held, kind_of, read_json, write_text
from attnreg.language.facets import PROVEN
from attnreg.packages.records import MAX_BYTES, read_records, signed, signed_run
from attnreg.packages.signing import digest_of
from attnreg.version import __version__

if TYPE_CHECKING:
    from attnreg.conformance.claims import Size
    from attnreg.conformance.proof import CaseOutcome
    from attnreg.conformance.trial import Case
    from attnreg.platforms import Platform

# claim -> why a run on one device, or in Triton's interpreter, cannot prove it
WHY_UNPROVEN = {
    "adaptive_verification": "the host knows bounds of the query lengths alone while a graph is replayed",
    "bfloat16": "Triton's interpreter has none",
    "dcp": "ranks of a group share the cache",
    "kv_dtype": "the layer reads no latents in some of these formats",
    "pcp": "ranks of a group share a prompt",
    "variants": "the kernels of some are for another device",
}


@dataclass
class Tally:
    """The cases with one claimed value: their number, and the worst error, also as a share of its bound."""

    cases: int = 0
    error: float = 0.0
    share: float = 0.0

    def add(self, outcome: CaseOutcome) -> None:
        """Counts one more case."""
        self.cases += 1
        self.error, self.share = max(self.error, outcome.error), max(self.share, outcome.share)


@dataclass
class Evidence:
    """The proven and refuted claims of one backend on one device.

    - platform: the platform of the selection; the kernels may have run on a device of another platform.
    - claims: facet -> claimed value -> tally; features are a facet.
    - problems: the refutations, case by case.
    - smallest: refuted cases that were shrunk to the fewest features and the plainest values that fail.
    - undecided: the cases that a compiler or an interpreter failed to run, with its errors. They refute nothing and are
      not counted.
    - unproven: claimed features that no run on one device can prove, and claimed values that this device cannot run.
    - packages: the versions of the packages that the backend needs.
    - kernel: the digest of the kernel that ran, or None.
    - ran: the cases in words.
    - ended: how processes ended outside a case, which refutes nothing.
    """

    backend: str
    platform: Platform
    size: Size
    claims: dict[str, dict[str, Tally]] = field(default_factory=dict)
    cases: int = 0
    refused: int = 0
    problems: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    packages: dict[str, str] = field(default_factory=dict)
    kernel: str | None = None
    ran: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    smallest: list[str] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        """Whether the cases cover every claim, and none of them is refuted or undecided."""
        return bool(self.cases) and not self.problems and not self.undecided and not self.unproven

    def add(self, case: Case, outcome: CaseOutcome) -> None:
        """Counts a case for every claimed value that it has."""
        self.cases += 1
        self.ran.append(case.words)
        if outcome.problem:
            self.problems.append(f"{case.words}: {outcome.problem}")
        values = [(facet, getattr(case.request, facet)) for facet in PROVEN]
        for facet, value in [*values, *(("features", f) for f in sorted(case.request.features))]:
            if value is not None:
                self.claims.setdefault(facet, {}).setdefault(str(value), Tally()).add(outcome)

    def lines(self) -> Iterator[str]:
        """A summary as text: one line, and one more for each problem, undecided case and unproven claim."""
        if not self.cases and not self.undecided:
            yield f"{self.backend}: NOT VERIFIED; {'; '.join(self.problems) or 'no case was run'}"
            return
        worst = max((t.share for tallies in self.claims.values() for t in tallies.values()), default=0.0)
        verdict = "REFUTED" if self.problems else "NOT DECIDED" if self.undecided else "proven in part"
        counts = f"{self.cases} cases, {self.refused} refusals"
        counts += f", {len(self.undecided)} not decided" if self.undecided else ""
        yield f"{self.backend}: {'proven' if self.proven else verdict}; {counts}, worst error {worst:.0%} of its bound"
        yield from (f"  smallest case that fails: {case}" for case in self.smallest)
        yield from (f"  {problem}" for problem in self.problems)
        yield from (f"  not decided: {case}" for case in self.undecided)
        yield from (f"  not counted: {text}; another took its place" for text in self.ended)
        whys: dict[str, list[str]] = {}
        for word in self.unproven:
            whys.setdefault(WHY_UNPROVEN.get(word, "no run on one device shows it"), []).append(word)
        yield from (f"  not proven here: {', '.join(words)}; {why}" for why, words in whys.items())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, with the versions of the packages that ran."""
        claims = {
            facet: {
                value: {"cases": t.cases, "error": float(f"{t.error:.3g}"), "share": float(f"{t.share:.3g}")}
                for value, t in sorted(tallies.items(), key=lambda item: (len(item[0]), item[0]))
            }
            for facet, tallies in sorted(self.claims.items())
        }
        return {
            "versions": {**_versions(), **self.packages},
            "for": f"{self.platform.platform} {self.platform.arch}",
            "size": self.size,
            "cases": self.cases,
            "refused": self.refused,
            "unproven": self.unproven,
            "claims": claims,
        }


def read_record(path: Path, device: torch.device) -> dict[str, dict[str, Any]]:
    """The records in a device's file, of backends and of the runs of tools; empty without a file.

    Raises `attnreg.files.FileError`, with the place, for a file that `save` cannot have written: one of another form,
    of another device, or with an edited or incomplete record.
    """
    file = record_file(path, device)
    if not kind_of(file):
        if not file.parent.is_dir():
            raise FileError(str(file), f"cannot be written: there is no directory {file.parent}")
        return {"backends": {}, "runs": {}}
    found = read_records(file)
    if found.problems:
        where, message, help_ = found.problems[0].where, found.problems[0].message, found.problems[0].help
        raise FileError(str(file), f"{message}; {help_}" if help_ else message, where.line, where.column)
    if (found.device, found.machine) != (_title(device), _machine(device)):
        message = f"it has the records of {found.device} ({found.machine}), and this is {_title(device)}"
        raise FileError(str(file), f"{message} ({_machine(device)}): name another file")
    data: Any = read_json(file, MAX_BYTES)
    return {"backends": data["backends"], "runs": data.get("runs", {})}


def save(evidence: list[Evidence], path: Path, device: torch.device) -> None:
    """Writes evidence to a file, or to ``<device>.json`` in a directory, and keeps the other records there.

    A backend with a problem is removed from the file. An undecided backend's record stays as it is. Raises as
    `read_record` does.
    """
    parts = read_record(path, device)
    for record in evidence:
        if record.undecided and not record.problems:
            continue
        parts["backends"].pop(record.backend, None)
        if not record.problems:
            about = _title(device), _machine(device), record.backend
            cases = digest_of(record.ran)
            parts["backends"][record.backend] = signed(*about, record.to_dict(), record.kernel, cases)
    _write(parts, path, device)


def save_run(name: str, result: dict[str, Any], path: Path, device: torch.device, versions: dict[str, str]) -> None:
    """Writes the result of a tool that ran all kernels, such as a sanitizer or the fuzzer, like `save` writes evidence.

    versions: the tool's own versions, in addition to those of the packages.
    """
    with held(record_file(path, device)):
        parts = read_record(path, device)
        run = {"versions": {**_versions(), **versions}, **result}
        parts["runs"][name] = signed_run(_title(device), _machine(device), name, run)
        _write(parts, path, device)


def _write(parts: dict[str, dict[str, Any]], path: Path, device: torch.device) -> None:
    known = {name: dict(sorted(part.items())) for name, part in parts.items() if part or name == "backends"}
    text = json.dumps({"device": _title(device), "platform": _machine(device), **known}, indent=2)
    # one line for each claimed value, so that a diff of evidence is readable
    write_text(record_file(path, device), re.sub(r"\{[^{}]*\}", lambda m: " ".join(m[0].split()), text) + "\n")


def _machine(device: torch.device) -> str:
    """The platform of the device. PyTorch for ROCm also calls its devices cuda."""
    return "rocm" if device.type == "cuda" and torch.version.hip else device.type


def _versions() -> dict[str, str | None]:
    return {"attnreg": __version__, "torch": torch.__version__, "triton": _version("triton")}


def _title(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def record_file(path: Path, device: torch.device) -> Path:
    """The file of records of a device: the path itself, or a file in it if it is a directory."""
    return path / f"{re.sub('[^a-z0-9]+', '_', _title(device).lower())}.json" if path.is_dir() else path


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
