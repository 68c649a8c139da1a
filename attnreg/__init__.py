"""attnreg: which attention kernel runs, and why, as data.

Each name below is imported at its first use, so that ``import attnreg`` is fast. Only the runtime's import torch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

# the time before Python reads any other module of the package: this process does not run files that change later
_BEGAN = time.time()

# public name -> the module that defines it
_HOME = {
    "Attention": "runtime.layer",
    "AttentionRequest": "request",
    "AttentionSpec": "runtime.interface",
    "BatchError": "runtime.interface",
    "BatchMetadata": "runtime.interface",
    "Candidate": "selection.trace",
    "ConfigError": "models.fields",
    "ContextParallel": "runtime.parallel.attention",
    "KVCache": "runtime.interface",
    "MLAAttention": "runtime.mla.layer",
    "ModelLayers": "models.reader",
    "NoBackendError": "selection.refusal",
    "Plan": "planning.plan",
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
    "detect_all": "machine.detect",
    "load_registry": "loader",
    "ops": "ops",
    "plan": "planning.ask",
    "requests_from_model": "models.reader",
    "select": "loader",
    "verify": "conformance.verify",
    "warm_up_batches": "runtime.warm_up",
}
__all__ = list(_HOME)

# the same names for type checkers; `as` marks each as public
if TYPE_CHECKING:
    from attnreg import ops as ops
    from attnreg.conformance.verify import verify as verify
    from attnreg.errors import RegistryError as RegistryError
    from attnreg.errors import RequestError as RequestError
    from attnreg.loader import bundled_registries as bundled_registries
    from attnreg.loader import load_registry as load_registry
    from attnreg.loader import select as select
    from attnreg.machine.detect import detect as detect
    from attnreg.machine.detect import detect_all as detect_all
    from attnreg.models.fields import ConfigError as ConfigError
    from attnreg.models.reader import ModelLayers as ModelLayers
    from attnreg.models.reader import requests_from_model as requests_from_model
    from attnreg.planning.ask import plan as plan
    from attnreg.planning.plan import Plan as Plan
    from attnreg.platforms import Platform as Platform
    from attnreg.registry import Registry as Registry
    from attnreg.request import AttentionRequest as AttentionRequest
    from attnreg.runtime.interface import AttentionSpec as AttentionSpec
    from attnreg.runtime.interface import BatchError as BatchError
    from attnreg.runtime.interface import BatchMetadata as BatchMetadata
    from attnreg.runtime.interface import KVCache as KVCache
    from attnreg.runtime.interface import SpecError as SpecError
    from attnreg.runtime.interface import UnclaimedError as UnclaimedError
    from attnreg.runtime.layer import Attention as Attention
    from attnreg.runtime.mla.layer import MLAAttention as MLAAttention
    from attnreg.runtime.parallel.attention import ContextParallel as ContextParallel
    from attnreg.runtime.warm_up import warm_up_batches as warm_up_batches
    from attnreg.selection.refusal import NoBackendError as NoBackendError
    from attnreg.selection.trace import Candidate as Candidate
    from attnreg.selection.trace import Reason as Reason
    from attnreg.selection.trace import Selection as Selection
    from attnreg.version import __version__ as __version__

else:
    # hidden from type checkers, which would accept any attribute because of it
    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            from attnreg.errors import nearest

            near = None if name.startswith("_") else nearest(name, __all__)
            hint = f"; did you mean `{near}`?" if near else ""
            raise AttributeError(f"module 'attnreg' has no attribute {name!r}{hint}", name=name)
        import importlib

        home = importlib.import_module(f"attnreg.{_HOME[name]}")
        # `ops` is a module
        value = home if name == "ops" else getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
