"""Records: proofs of claims, and speeds beside peers; and the page with the pictures of both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from docs.registries import bundled

from attnreg.compile.inputs.bundled import registry_root
from attnreg.language.facets import PROVEN
from attnreg.packages.records import Record, whole_records
from attnreg.registry import Backend
from docs_site.frame import Asset, Page, Site
from docs_site.pictures import bars, heat_map


@dataclass(frozen=True)
class Proof:
    """One run of `attnreg verify` for a backend. ``earlier``: it ran an earlier kernel, and does not prove today's."""

    record: Record
    earlier: bool

    @property
    def result(self) -> Mapping[str, Any]:
        return self.record.result

    @property
    def worst(self) -> float:
        """The largest ratio of an error to its bound."""
        return max((t["share"] for facet in self.result["claims"].values() for t in facet.values()), default=0.0)

    @property
    def claims(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Each facet with the tallies of its values, in the order of the proofs; empty for an earlier kernel."""
        claims = {} if self.earlier else self.result["claims"]
        return [(name, claims[name]) for name in (*PROVEN, "features") if name in claims]

    @property
    def versions(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.result["versions"].items())


@cache
def proofs() -> Mapping[str, list[Proof]]:
    """Backend of the default registry -> its runs. Raises `RecordsError` if a record has a problem."""
    out: dict[str, list[Proof]] = {}
    registry = bundled("default")
    for record in (record for file in whole_records(registry_root()) for record in file.rows):
        proof = Proof(record, earlier=not record.is_current(registry))
        out.setdefault(record.title.partition("/")[0], []).append(proof)
    return out


def figures(root: Path) -> tuple[str, list[dict[str, Any]]]:
    """The machine of the recorded attention benchmarks in words; and the figures, each with its backend's name."""
    record = json.loads((root / "benchmarks/results/attention.json").read_text(encoding="utf-8"))
    machine = record["machine"]
    out = []
    for figure in record["figures"]:
        # a case of another backend begins with its name
        first, _, rest = figure["case"].partition(" ")
        backend, case = (first, rest) if first.isupper() else ("TRITON_ATTN", figure["case"])
        out.append({**figure, "backend": backend, "case": case})
    return f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, {machine['date']}", out


def speed(root: Path, row: Backend) -> tuple[str, list[dict[str, Any]]]:
    """The machine, and the figures of one backend."""
    machine, every = figures(root)
    return machine, [figure for figure in every if figure["backend"] == row.name]


def pages(site: Site) -> Iterator[Page | Asset]:
    """The page of everything that was measured."""
    machine, every = figures(site.root)
    by_backend: dict[str, list[dict[str, Any]]] = {}
    for figure in every:
        by_backend.setdefault(figure["backend"], []).append(figure)
    registry = site.registries["default"]
    values = {
        "machine": machine,
        "map": heat_map(registry, proofs(), site.serving("default")),
        "bars": [(name, bars(f"speed-{name.lower()}", name, machine, some)) for name, some in by_backend.items()],
        "every": every,
        "runs": [(name, proof) for name, some in proofs().items() for proof in some],
    }
    yield Page("measured.html", "measured.html.j2", "What was measured", values, "measured", "default")
