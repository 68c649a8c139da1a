"""The data that comes with attnreg: its directory, and the registries in it."""

from __future__ import annotations

from pathlib import Path

from attnreg.errors import Location, Problem, RegistryError


def registry_root() -> Path:
    """The directory of the data: inside the package in a wheel, beside it in a checkout and an editable install."""
    package = Path(__file__).resolve().parent.parent
    for place in (package / "registry", package.parent / "registry"):
        if (place / "vocabulary.yaml").is_file():
            return place
    archive = next((parent for parent in package.parents if parent.is_file()), None)
    message = "attnreg was installed without its registry: install it again"
    if archive is not None:
        message = "attnreg is imported from this archive, and reads its registry from files: install or unpack it"
    raise RegistryError([Problem(Location(str(archive or package), 1, 1), message)])


def bundled_registries() -> dict[str, Path]:
    """Name -> directory of every registry that comes with attnreg."""
    root = registry_root()
    engines = root / "engines"
    directories = {"default": root}
    if engines.is_dir():
        directories |= {p.name: p for p in sorted(engines.iterdir()) if (p / "backends.yaml").is_file()}
    return directories
