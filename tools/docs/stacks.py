"""The generated blocks of docs/stacks.md: what was proven in each stack of tox.toml."""

from __future__ import annotations

import gzip
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stacks
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from attnreg.packages.records import Record, whole_records
from docs.markdown import plain, table
from docs.registries import bundled

# the packages with a column of their own
SHOWN = ("torch", "triton", "transformers", "diffusers", "flashinfer-python")


@dataclass(frozen=True)
class Stack:
    """A stack of tox.toml, and the record of its last run, if there is one for the same versions.

    pinned: the version of each package, and of Python, in tox.toml or constraints.txt.
    """

    name: str
    description: str
    pinned: Mapping[str, str]
    record: Mapping[str, Any] | None

    @classmethod
    def read(cls, root: Path, name: str, row: Mapping[str, Any]) -> Stack:
        """A stack with its record. A record with other versions than the pinned ones is left out."""
        pinned = {"python": row["base_python"][0], **stacks.pins(row)}
        if name == stacks.CI:
            lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
            pinned |= {package: version for package, _, version in (line.partition("==") for line in lines) if version}
        file = root / stacks.RECORDS / f"{name}.json"
        record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        return cls(name, row["description"], pinned, record if record and _holds(root, pinned, record) else None)

    def version(self, package: str) -> str:
        """The public version of a package, such as 2.14.0 for 2.14.0+cpu; "" if it is not known."""
        found = self.record["versions"].get(package, "") if self.record else self.pinned.get(package, "")
        return found and Version(found).public


@dataclass(frozen=True)
class Proof:
    """Rows whose claims were proven on a GPU, with the same versions.

    earlier: whether the proof is of an earlier version of the kernels.
    """

    device: str
    versions: tuple[tuple[str, str], ...]
    rows: tuple[str, ...]
    cases: int
    earlier: bool

    @property
    def triton(self) -> str:
        return dict(self.versions).get("triton", "")

    @property
    def torch(self) -> str:
        return dict(self.versions)["torch"]


def _holds(root: Path, pinned: Mapping[str, str], record: Mapping[str, Any]) -> bool:
    """Whether a record has the versions that a stack pins and that pyproject.toml allows."""
    found = {"python": ".".join(record["python"].split(".")[:2]), **record["versions"]}
    if any(Version(found.get(name, "0")).public != version for name, version in pinned.items() if name in found):
        return False
    if any(name in SHOWN and name not in found for name in pinned):
        return False
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["kernels"]])
    return all(r.specifier.contains(found[canonicalize_name(r.name)], prereleases=True) for r in required)


def stacks_blocks(root: Path) -> dict[str, str]:
    """Name of each generated block -> its Markdown."""
    rows = [Stack.read(root, name, row) for name, row in stacks.stacks(root).items()]
    evidence = [*_evidence(root)]
    return {
        "stacks": "\n\n".join([_versions(rows), _proven(root, rows, evidence)]),
        "gpus": _gpus(evidence),
        "details": "\n\n".join(map(_details, rows)),
    }


def _versions(rows: list[Stack]) -> str:
    columns = [("stack", 8), ("what it is", 40), ("Python", 7), *((name, 12) for name in SHOWN)]
    python = [row.record["python"] if row.record else row.pinned["python"] for row in rows]
    lines = [
        [f"`{row.name}`", plain(row.description), found, *(row.version(name) or "—" for name in SHOWN)]
        for row, found in zip(rows, python, strict=True)
    ]
    return table(columns, lines)


def _proven(root: Path, rows: list[Stack], evidence: list[Proof]) -> str:
    columns = (("stack", 8), ("tests on a processor", 40), ("kernels compiled", 30), ("on GPUs", 40))
    return table(
        columns, [[f"`{r.name}`", _tests(r), _compiled(root, r.version("triton")), _on_gpus(r, evidence)] for r in rows]
    )


def _tests(row: Stack) -> str:
    if row.record is None:
        return "not recorded"
    passed, failed, skipped = row.record["passed"], len(row.record["failed"]), sum(row.record["skipped"].values())
    return f"{passed:,} passed, {failed:,} failed, {skipped:,} skipped ({row.record['date']})"


def _compiled(root: Path, triton: str) -> str:
    file = root / "tests/data/compiled" / f"triton-{triton}.jsonl.gz"
    if not file.is_file():
        return "not recorded"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        spills = [json.loads(line)["spills"] for line in lines]
    return f"{len(spills):,} kernels; registers spill in {sum(map(bool, spills)):,}"


def _evidence(root: Path) -> Iterator[Proof]:
    """The records of GPUs in registry/evidence, by device and versions. Raises `RecordsError` if one has a problem."""
    registry = bundled("default")
    for file in whole_records(root / "registry"):
        if file.machine == "cpu":
            continue
        groups: dict[tuple[bool, tuple[tuple[str, str], ...]], list[Record]] = {}
        for record in file.rows:
            versions = {
                name: Version(v).public if v else ""
                for name, v in record.result["versions"].items()
                if name != "attnreg"
            }
            groups.setdefault((not record.is_current(registry), tuple(versions.items())), []).append(record)
        for (earlier, same), records in groups.items():
            cases = sum(record.result["cases"] for record in records)
            yield Proof(file.device, same, tuple(r.title for r in records), cases, earlier)


def _on_gpus(row: Stack, evidence: list[Proof]) -> str:
    """The devices on which rows were proven with the stack's Triton. Each has its torch, if the stack's differs."""
    counts: dict[tuple[str, bool], int] = {}
    for proof in sorted(evidence, key=lambda p: p.earlier):
        if proof.triton == row.version("triton"):
            beside = "" if proof.torch == row.version("torch") else f" beside torch {proof.torch}"
            where = f"{proof.device}{beside}", proof.earlier
            counts[where] = counts.get(where, 0) + len(proof.rows)
    words = (f"{w}: {count} rows{' of an earlier kernel' * earlier}" for (w, earlier), count in counts.items())
    return "; ".join(words) or "none"


def _gpus(evidence: list[Proof]) -> str:
    columns = (
        ("device", 22), ("torch", 8), ("triton", 8), ("beside", 40), ("kernels", 7), ("rows", 4), ("cases", 5),
    )  # fmt: skip
    return table(columns, [
        [
            p.device, p.torch, p.triton, _beside(p), "earlier" if p.earlier else "today's", str(len(p.rows)),
            f"{p.cases:,}",
        ]
        for p in sorted(evidence, key=lambda p: (p.device, p.earlier, p.versions))
    ])  # fmt: skip


def _beside(proof: Proof) -> str:
    # a program has no version
    return ", ".join(f"{n} {v}".strip() for n, v in proof.versions if n not in ("torch", "triton")) or "—"


def _details(row: Stack) -> str:
    """The other versions of a stack, the tests that failed, and why others were skipped."""
    if row.record is None:
        return f"### {row.name}\n\nNot recorded with the versions of the table: `make record-stack STACK={row.name}`."
    others = ", ".join(f"{name} {v}" for name, v in row.record["versions"].items() if name not in SHOWN)
    failed = [f"- `{test}`" for test in row.record["failed"]] or ["None."]
    skipped = [f"- {count:,}: {plain(reason)}" for reason, count in row.record["skipped"].items()] or ["None."]
    parts = [f"### {row.name}", f"Also in it: {others}.", "Failed:", "\n".join(failed), "Skipped:", "\n".join(skipped)]
    return "\n\n".join(parts)
