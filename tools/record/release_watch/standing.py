"""Which releases of an engine have tables here, and which of the index's have none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import yaml
from packaging.version import Version

from attnreg.compile.inputs.bundled import bundled_registries, patch_releases, registry_root

# the packages whose releases are looked for. Model families are read in transformers
ENGINES = ("vllm", "sglang", "transformers")


@dataclass(frozen=True)
class Standing:
    """The releases of one engine, each list the oldest first.

    ``newer``: on the index, and newer than the newest bundled release. ``between``: on the index, between the oldest
    and the newest bundled release. ``gone``: bundled, and not on the index, where a release may be withdrawn.
    """

    engine: str
    bundled: tuple[Version, ...]
    newest: Version | None
    newer: tuple[Version, ...]
    between: tuple[Version, ...]
    gone: tuple[Version, ...]


def bundled_releases(engine: str) -> list[Version]:
    """The releases of an engine that the bundled data answers for, the oldest first."""
    if engine == "transformers":
        text = (registry_root() / "models" / "_sources.yaml").read_text(encoding="utf-8")
        return [Version(yaml.safe_load(text)["sources"][engine]["version"])]
    names = (name.partition("-") for name in [*bundled_registries(), *patch_releases()])
    return sorted(Version(version) for name, _, version in names if name == engine and version)


def standing(engine: str, bundled: Iterable[Version], listed: Iterable[Version]) -> Standing:
    """The releases of an engine. bundled: at least one. listed: those on the index."""
    here, there = sorted(bundled), sorted(listed)
    return Standing(
        engine,
        tuple(here),
        there[-1] if there else None,
        tuple(v for v in there if v > here[-1]),
        tuple(v for v in there if here[0] < v < here[-1] and v not in here),
        tuple(v for v in here if v not in there),
    )
