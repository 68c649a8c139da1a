"""What stands in for the compiled half of vLLM: its extension modules, and packages that need a GPU to be of use."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from unittest.mock import MagicMock

# vLLM's own extensions, of which only the Python files are unpacked
EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
# kernels that the bundled registry knows as packages, and what vLLM imports for guided decoding
PACKAGES = ("b12x", "flashinfer", "llguidance", "tokenspeed_mla", "xgrammar")


class Simulated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules above, and everything below them; whatever is asked of one is there, and does nothing."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(f"{fullname}.".startswith(f"{name}.") for name in EXTENSIONS + PACKAGES):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Anything(ModuleType):
    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


def install() -> None:
    """Simulate for the rest of this process what is not installed."""
    if not any(isinstance(finder, Simulated) for finder in sys.meta_path):
        sys.meta_path.append(Simulated())
