"""What stands in for the compiled half of vLLM: its extension modules, and packages that are of use on a GPU only."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable
from types import ModuleType
from unittest.mock import MagicMock

MODULES = (
    # vLLM's own extensions, and FlashAttention 4, whose Python is compiled for a GPU
    "vllm._C_stable_libtorch",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.vllm_flash_attn.cute",
    # kernels
    "b12x",
    "flashinfer",
    "tokenspeed_mla",
    # guided decoding, which is imported beside what is needed
    "llguidance",
    "xgrammar",
)
AMD_MODULES = ("flash_attn", "llguidance", "vllm._C", "vllm._rocm_C", "xgrammar")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds some modules and all below them; whatever is asked of one is there, and does nothing."""

    def __init__(self, modules: Iterable[str]) -> None:
        self.modules = tuple(modules)

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(f"{fullname}.".startswith(f"{name}.") for name in self.modules):
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


class _Wrapper:
    def run(self, *, ckv_scale_arr: object = None) -> None: ...


def _mla_decode_fwd(*, causal: bool = True) -> None: ...


def install(modules: Iterable[str]) -> None:
    """Simulate modules for the rest of this process."""
    finder = _Finder(modules)
    sys.meta_path.insert(0, finder)
    # where vLLM tells versions apart by a signature, the new one
    for package, name, value in (
        ("flashinfer", "BatchMLAPagedAttentionWrapper", _Wrapper),
        ("aiter", "mla_decode_fwd", _mla_decode_fwd),
    ):
        if package in finder.modules:
            setattr(importlib.import_module(f"{package}.mla"), name, value)
