"""What the tests of the command share."""

from __future__ import annotations

import os
from typing import Any

import pytest

from attnreg import Registry, loader


@pytest.fixture(autouse=True)
def default_loaded_once(default: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command finds the default registry loaded, unless something changes it: a load takes a tenth of a second."""
    load = loader.load_registry

    def load_registry(source: Any = None, overlays: Any = (), **options: Any) -> Registry:
        plain = source in (None, "default") and not overlays and not any(options.values())
        return default if plain and "ATTNREG_REGISTRY" not in os.environ else load(source, overlays, **options)

    monkeypatch.setattr(loader, "load_registry", load_registry)
