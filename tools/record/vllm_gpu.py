"""A GPU that is not there, for vLLM's own Python: what stands in for its drivers, compiled modules and packages.

vLLM asks once, when its modules are imported, which machine it is on: one process is one machine.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

# importable, and empty: vLLM's extensions, what its wheel brings compiled, and packages that are of use on a GPU only
STUBS = (
    "vllm._C_stable_libtorch", "vllm._flashmla_C", "vllm._flashmla_extension_C", "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn._vllm_fa3_C", "vllm.vllm_flash_attn.cute",
    "b12x", "flashinfer", "tokenspeed_mla", "llguidance", "xgrammar", "compressed_tensors",
)  # fmt: skip
ROCM_STUBS = ("flash_attn", "llguidance", "vllm._C", "vllm._rocm_C", "xgrammar", "compressed_tensors")
CAPABILITIES = {"sm75": (7, 5), "sm80": (8, 0), "sm86": (8, 6), "sm89": (8, 9), "sm90": (9, 0), "sm100": (10, 0),
                "sm103": (10, 3), "sm110": (11, 0), "sm120": (12, 0), "sm121": (12, 1)}  # fmt: skip
# what a recording says of the machine that it was made on
SIMULATED = (
    "the GPU: its architecture, name and number of compute units",
    "CUDA's and AMD's drivers, and the operators of vLLM's extensions",
    "packages, importable and empty: b12x, flashinfer with its cubins and tokenspeed_mla on CUDA, flash_attn on ROCm",
    "aiter on ROCm, importable and empty, but where `aiter` is pkg_missing",
    "the model's config, of which there is what the attention backends look at",
)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds some modules and all below them; every name in one is there, and does nothing."""

    def __init__(self, modules: Iterable[str]) -> None:
        self.modules = tuple(modules)

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if any(f"{name}.".startswith(f"{module}.") for module in self.modules):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Anything(ModuleType):
    def __getattr__(self, name: str) -> mock.MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Wrapper:
    def run(self, *, ckv_scale_arr: object = None) -> None: ...


def _mla_decode_fwd(*, causal: bool = True) -> None: ...


def boot(tree: Path, arch: str, with_aiter: str | None) -> Any:
    """The platform of vLLM's Python in ``tree`` on a simulated GPU, which is vLLM's current one from here on.

    with_aiter: "on", "off" (installed and not switched on) or "pkg_missing", on AMD GPUs.
    """
    amd = arch.startswith("gfx")
    modules = (*ROCM_STUBS, *(("aiter",) if with_aiter in ("on", "off") else ())) if amd else STUBS
    sys.meta_path.insert(0, _Finder(modules))
    # where vLLM tells versions apart by a signature, the new one
    for package, name, value in (
        ("flashinfer", "BatchMLAPagedAttentionWrapper", _Wrapper),
        ("aiter", "mla_decode_fwd", _mla_decode_fwd),
    ):
        if package in modules:
            setattr(importlib.import_module(f"{package}.mla"), name, value)
    sys.path.insert(0, str(tree))
    # FlashInfer comes with its kernels: without this vLLM looks for a compiler, and for the network
    os.environ |= {"VLLM_HAS_FLASHINFER_CUBIN": "1", "VLLM_ROCM_USE_AITER": "1" if with_aiter == "on" else "0"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch: Any = importlib.import_module("torch")
        platforms: Any = importlib.import_module("vllm.platforms")
        platform = _amd(arch, torch) if amd else _nvidia(arch)
        platforms._current_platform = platform()
        importlib.import_module("vllm._custom_ops")
        # vLLM has a placeholder for Triton, which lacks them
        tl = importlib.import_module("vllm.triton_utils").tl
        tl.float16, tl.bfloat16 = torch.float16, torch.bfloat16
        # importing some backends takes operators of vLLM's extension, properties of the GPU, and 128 MB of it
        properties = SimpleNamespace(gcnArchName=arch if amd else "")
        with (
            mock.patch.object(torch.ops, "_C"),
            mock.patch.object(torch, "empty"),
            mock.patch.object(torch, "zeros"),
            mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        ):
            importlib.import_module("vllm.compilation.backends")
            if amd:
                importlib.import_module("vllm.v1.attention.backends.rocm_aiter_unified_attn")
            else:
                _import_backends()
    return platform


def _import_backends() -> None:
    # AMD's backends, asked for by name, ask AMD's platform, which looks at the GPU when it is imported
    importlib.import_module("vllm.platforms.rocm")
    for backend in importlib.import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum:
        # one that cannot be imported is what the selector finds, too
        with contextlib.suppress(ImportError, OSError, ValueError):
            backend.get_class()


def _nvidia(arch: str) -> Any:
    base = importlib.import_module("vllm.platforms.cuda").NonNvmlCudaPlatform
    facts: dict[str, Any] = {"get_device_name": "simulated", "num_compute_units": 132}
    facts["get_device_capability"] = capability(arch)
    return type("SimulatedGpu", (base,), {name: _always(value) for name, value in facts.items()})


def capability(arch: str) -> Any:
    """What vLLM says of an NVIDIA GPU."""
    return importlib.import_module("vllm.platforms.interface").DeviceCapability(*CAPABILITIES[arch])


def exchange(platform: Any, arch: str) -> None:
    """Make a simulated NVIDIA GPU another one. Of AMD's vLLM remembers everything."""
    platform.get_device_capability = _always(capability(arch))
    with contextlib.suppress(ModuleNotFoundError, AttributeError):
        kernels = importlib.import_module("vllm.utils.b12x").get_b12x_paged_attention()
        kernels.is_supported = lambda: CAPABILITIES[arch][0] == 12
    forget()


def forget() -> None:
    """Clear what vLLM remembers of FlashInfer on the last GPU and under the last environment."""
    for value in vars(importlib.import_module("vllm.utils.flashinfer")).values():
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()


def _amd(arch: str, torch: Any) -> Any:
    torch.version.hip = "7.0"
    properties = SimpleNamespace(gcnArchName=f"{arch}:sramecc+:xnack-", multi_processor_count=304)
    torch.cuda.get_device_properties = lambda *a: properties
    base = importlib.import_module("vllm.platforms.rocm").RocmPlatform
    facts = {"get_device_name": "simulated", "num_compute_units": 304}
    return type("SimulatedGpu", (base,), {name: _always(value) for name, value in facts.items()})


def _always(value: Any) -> Any:
    return classmethod(lambda cls, device_id=0: value)
