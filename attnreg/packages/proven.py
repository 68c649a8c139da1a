"""Compares installed packages with the newest versions in a backend's evidence, which comes with attnreg."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.contract import OWN_MODULES
from attnreg.packages.records import bundled_records

if TYPE_CHECKING:
    from packaging.version import Version

    from attnreg.platforms import Platform
    from attnreg.registry import Registry, Variant
    from attnreg.selection.trace import Selection

_log = logging.getLogger("attnreg.runtime")
_logged: set[str] = set()


@dataclass(frozen=True, slots=True)
class Unproven:
    """A package that is newer than every version in a backend's evidence, and the newest version there.

    ``device`` is the device of that newest proof.
    """

    package: str
    version: str
    newest: str
    device: str

    @property
    def text(self) -> str:
        """``not proven with triton 3.9.0; newest proven 3.8.0 (NVIDIA H200)``."""
        return f"not proven with {self.package} {self.version}; newest proven {self.newest} ({self.device})"

    def to_dict(self) -> dict[str, Any]:
        """The fact as JSON-ready values."""
        return {**asdict(self), "text": self.text}


class Proof(NamedTuple):
    """The versions of packages in one run of a backend's claims, and the device of the run."""

    platform: str
    arch: str
    device: str
    versions: Mapping[str, str]


def unproven(registry: Registry, row: str, variant: Variant, platform: Platform) -> tuple[Unproven, ...]:
    """The packages of a variant that are newer than every version in its evidence.

    Proofs on the platform's architecture count; if there are none, all proofs on the platform. Packages without a known
    version are left out. The result is empty for a backend without a proof or without a kernel module of attnreg.
    """
    known = {name: version for name, version in platform.packages or () if version}
    needed = needed_of(registry, variant) if known else set()
    if not needed & known.keys():
        return ()
    proofs = proofs_of(registry, row, variant)
    alike = [proof for proof in proofs if proof.platform == platform.platform]
    alike = [proof for proof in alike if proof.arch == platform.arch] or alike
    found = (_compared(name, known[name], alike) for name in sorted(needed & known.keys()))
    return tuple(one for one in found if one is not None)


def unproven_choice(selection: Selection) -> tuple[Unproven, ...]:
    """`unproven` for the chosen backend of a selection; empty if no backend is chosen."""
    chosen, variant = selection.backend, selection.variant
    if chosen is None or variant is None:
        return ()
    return unproven(selection.registry, chosen.name, variant, selection.platform)


def log_unproven(selection: Selection) -> None:
    """Log a warning, once in a process, for each package of `unproven_choice`."""
    for one in unproven_choice(selection):
        text = f"{selection.title}: {one.text}"
        if text not in _logged:
            _logged.add(text)
            _log.warning("%s", text)


def needed_of(registry: Registry, variant: Variant) -> set[str]:
    """The packages that a variant needs; empty if it runs no kernel module of attnreg."""
    if not (registry.imports and variant.module is not None and variant.module.startswith(OWN_MODULES)):
        return set()
    clauses = (clause for clause in variant.requires.walk() if clause.facet == "packages")
    return {requirement.package for clause in clauses for requirement in clause.matcher.mentions}


def proofs_of(registry: Registry, row: str, variant: Variant) -> tuple[Proof, ...]:
    """The runs that proved a variant of a row, or else the row, with the registry's present kernels.

    A run counts only for the platform of its device, and only if the kernel has not changed since.
    """
    for title in (f"{row}/{variant.name}", row):
        own = (r for r in bundled_records() if r.title == title and r.platform == r.machine)
        if found := [r for r in own if r.is_current(registry)]:
            return tuple(Proof(r.platform, r.arch, r.device, r.result["versions"]) for r in found)
    return ()


def _compared(package: str, version: str, proofs: Iterable[Proof]) -> Unproven | None:
    from packaging.version import InvalidVersion

    try:
        here = _released(version)
        proven = [(_released(p.versions[package]), p) for p in proofs if p.versions.get(package)]
    except InvalidVersion:
        return None
    if not proven:
        return None
    newest, proof = max(proven, key=lambda pair: pair[0])
    # a build from a commit has the number of the next release
    if here < newest or (here == newest and "+git" not in version):
        return None
    return Unproven(package, version, str(newest), proof.device)


def _released(version: str) -> Version:
    """A version without its local part: torch 2.11.0+cu130 is 2.11.0."""
    from packaging.version import Version

    return Version(Version(version).public)
