"""The bundled registries that pages are generated from, each read once."""

from __future__ import annotations

from functools import cache

from attnreg.loader import load_registry
from attnreg.registry import Registry


@cache
def bundled(name: str) -> Registry:
    """A bundled registry."""
    return load_registry(name)
