"""attnreg: which attention kernel runs, and why, as data.

The names below are imported when first used, so that ``import attnreg`` stays light; those of the runtime alone import
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnreg.conformance.verify import verify
    from attnreg.errors import RegistryError, RequestError
    from attnreg.loader import bundled_registries, load_registry
    from attnreg.machine.detect import detect
    from attnreg.models.fields import ConfigError
    from attnreg.models.reader import ModelLayers, requests_from_model
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest
    from attnreg.runtime import ops
    from attnreg.runtime.interface import (
        AttentionSpec,
        BatchError,
        BatchMetadata,
        KVCache,
        SpecError,
        UnclaimedError,
    )
    from attnreg.runtime.layer import Attention
    from attnreg.selection.refusal import NoBackendError, select
    from attnreg.selection.trace import Candidate, Reason, Selection
    from attnreg.version import __version__

_HOME = {
    "Attention": "runtime.layer",
    "AttentionRequest": "request",
    "AttentionSpec": "runtime.interface",
    "BatchError": "runtime.interface",
    "BatchMetadata": "runtime.interface",
    "Candidate": "selection.trace",
    "ConfigError": "models.fields",
    "KVCache": "runtime.interface",
    "ModelLayers": "models.reader",
    "NoBackendError": "selection.refusal",
    "Platform": "platforms",
    "Reason": "selection.trace",
    "Registry": "registry",
    "RegistryError": "errors",
    "RequestError": "errors",
    "Selection": "selection.trace",
    "SpecError": "runtime.interface",
    "UnclaimedError": "runtime.interface",
    "__version__": "version",
    "bundled_registries": "loader",
    "detect": "machine.detect",
    "load_registry": "loader",
    "ops": "runtime",
    "requests_from_model": "models.reader",
    "select": "selection.refusal",
    "verify": "conformance.verify",
}
__all__ = [
    "Attention",
    "AttentionRequest",
    "AttentionSpec",
    "BatchError",
    "BatchMetadata",
    "Candidate",
    "ConfigError",
    "KVCache",
    "ModelLayers",
    "NoBackendError",
    "Platform",
    "Reason",
    "Registry",
    "RegistryError",
    "RequestError",
    "Selection",
    "SpecError",
    "UnclaimedError",
    "__version__",
    "bundled_registries",
    "detect",
    "load_registry",
    "ops",
    "requests_from_model",
    "select",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'attnreg' has no attribute {name!r}")
    import importlib

    home = importlib.import_module(f"attnreg.{_HOME[name]}")
    # what its home does not define is a module of it
    value = getattr(home, name) if hasattr(home, name) else importlib.import_module(f"{home.__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
