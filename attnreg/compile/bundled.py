"""The directory of the data that comes with attnreg."""

from __future__ import annotations

from pathlib import Path

from attnreg.errors import Location, Problem, RegistryError


def registry_root() -> Path:
    """The directory of the data: inside the package in a wheel, beside it in a checkout and an editable install."""
    package = Path(__file__).resolve().parent.parent
    for place in (package / "registry", package.parent / "registry"):
        if (place / "vocabulary.yaml").is_file():
            return place
    message = "attnreg was installed without its registry: install it again"
    raise RegistryError([Problem(Location(str(package), 1, 1), message)])
