"""attnreg: which attention kernel runs, and why, as data.

The names below are imported when first used, so that ``import attnreg`` stays light; none of them imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from attnreg.config_fields import ConfigError
    from attnreg.errors import NoBackendError, RegistryError
    from attnreg.loader import bundled_registries, load_registry
    from attnreg.model_config import ModelLayers, requests_from_model
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest, RequestError
    from attnreg.selection import Candidate, Reason, Selection
    from attnreg.selector import select

_HOME = {
    "AttentionRequest": "request",
    "Candidate": "selection",
    "ConfigError": "config_fields",
    "ModelLayers": "model_config",
    "NoBackendError": "errors",
    "Platform": "platforms",
    "Reason": "selection",
    "Registry": "registry",
    "RegistryError": "errors",
    "RequestError": "request",
    "Selection": "selection",
    "bundled_registries": "loader",
    "load_registry": "loader",
    "requests_from_model": "model_config",
    "select": "selector",
}
__all__ = [
    "AttentionRequest",
    "Candidate",
    "ConfigError",
    "ModelLayers",
    "NoBackendError",
    "Platform",
    "Reason",
    "Registry",
    "RegistryError",
    "RequestError",
    "Selection",
    "__version__",
    "bundled_registries",
    "load_registry",
    "requests_from_model",
    "select",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'attnreg' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"attnreg.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
