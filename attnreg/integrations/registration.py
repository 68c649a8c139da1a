"""Validation of the arguments of ``register``, at once: an engine uses them much later, in the middle of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnreg.errors import RequestError, shown
from attnreg.platforms import Platform
from attnreg.request import AttentionRequest
from attnreg.selection.selector import evaluate

if TYPE_CHECKING:
    from attnreg.registry import Registry


def validate_name(name: object) -> None:
    """Raises `RequestError` for a name that is no string, or an empty string."""
    if not isinstance(name, str) or not name:
        raise RequestError(f"name is {shown(name)}; expected a text, by which transformers or diffusers finds attnreg")


def validate_choices(registry: Registry, platform: Platform | None, backend: str | None) -> None:
    """Raises `RequestError` for arguments of wrong types, and for words that the registry does not know.

    A selection for any request raises these errors. Whether it finds a backend does not matter here.
    """
    if platform is None:
        known = getattr(getattr(registry, "vocabulary", None), "architectures", {})
        places = ((architecture.platform, architecture.name) for architecture in known.values())
        kind, arch = next(places, ("cpu", "x86_64"))
        platform = Platform(platform=kind, arch=arch)
    evaluate(AttentionRequest(head_size=64), platform, registry, backend)
