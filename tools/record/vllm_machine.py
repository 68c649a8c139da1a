"""A simulated machine for vLLM's own Python: a GPU or a processor, and stand-ins for compiled modules.

The recorders and the tests of the plugin share it. One process is one machine, because vLLM's modules look at the
machine only when they are imported. An NVIDIA GPU can be exchanged for another, and so can a processor. vLLM's Python
is not edited. `STUBBED` lists the stand-ins.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

CAPABILITIES = {"sm75": (7, 5), "sm80": (8, 0), "sm86": (8, 6), "sm87": (8, 7), "sm89": (8, 9), "sm90": (9, 0)}
CAPABILITIES |= {"sm100": (10, 0), "sm103": (10, 3), "sm110": (11, 0), "sm120": (12, 0), "sm121": (12, 1)}
MODULES = (
    # vLLM's own extensions, and FlashAttention 4, whose Python is compiled for a GPU
    "vllm._C",
    "vllm._C_stable_libtorch",
    "vllm._deepselect_C",
    "vllm._flashkda_C",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm._moe_C",
    "vllm._moe_C_stable_libtorch",
    "vllm._qutlass_C",
    "vllm.third_party.deep_gemm",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.vllm_flash_attn.cute",
    # kernels
    "b12x",
    "flashinfer",
    "tokenspeed_mla",
)
AMD_MODULES = ("flash_attn", "vllm._C", "vllm._moe_C", "vllm._rocm_C")
CPU_MODULES = ("vllm._C", "vllm._C_AVX512")
INTEL_MODULES = ("vllm_xpu_kernels",)
# vLLM imports these for guided decoding, images and weights; a stand-in is used only if one is not installed
BESIDE = ("compressed_tensors", "gguf", "humming", "llguidance", "torchvision", "xgrammar")
# after vLLM has looked for its extensions, each operator of these exists and does nothing
OPERATORS = ("_C", "_moe_C", "_C_cache_ops", "_C_custom_ar", "_C_utils", "_qutlass_C", "_rocm_C", "_flashmla_C")
STUBBED = (
    "the device: its name, capability, cores and memory",
    "the extension modules and packages of kernels: importable, and whatever is asked of one is there",
    "FlashInfer's cubins, which count as installed",
)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds some modules and all modules below them. Every attribute of one exists, and does nothing."""

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
    if "torchvision" in finder.modules:
        vars(importlib.import_module("torchvision"))["__version__"] = "0.28.0"
    # vLLM detects a version by two of these signatures, so they are the new ones; the third gives a buffer's bytes
    for module, name, value in (
        ("flashinfer.mla", "BatchMLAPagedAttentionWrapper", _Wrapper),
        ("flashinfer.utils", "get_trtllm_gen_multi_ctas_kv_counter_bytes", lambda *a: 1),
        ("aiter.mla", "mla_decode_fwd", _mla_decode_fwd),
    ):
        if module.partition(".")[0] in finder.modules:
            setattr(importlib.import_module(module), name, value)


def boot(tree: Path, arch: str, switch: str = "") -> Any:
    """The platform class of a simulated machine. It is vLLM's current platform for the rest of this process.

    tree: the directory that holds `vllm/`.
    arch: `exchange` can later replace one NVIDIA GPU by another. vLLM remembers everything about an AMD GPU.
    switch: aiter is "on", "off" or "pkg_missing", as in the recorded rows.
    """
    amd, intel, cpu = arch.startswith("gfx"), arch.startswith("xe"), not arch.startswith(("gfx", "sm", "xe"))
    modules = AMD_MODULES if amd else INTEL_MODULES if intel else CPU_MODULES if cpu else MODULES
    beside = [name for name in BESIDE if importlib.util.find_spec(name) is None]
    install((*modules, *beside, *(["aiter"] if amd and switch in ("on", "off") else [])))
    sys.path[:0] = [str(tree), _metadata_folder("0.0.0+cpu" if cpu else "0.0.0")]
    # FlashInfer's compiled kernels are available; otherwise vLLM looks for a compiler and for the network
    os.environ |= {"VLLM_HAS_FLASHINFER_CUBIN": "1", "VLLM_ROCM_USE_AITER": "1" if switch == "on" else "0"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _give_triton_a_driver("amd" if amd else "intel" if intel else "" if cpu else "nvidia", arch)
        import torch
        import vllm.platforms

        make = _amd_gpu if amd else _intel_gpu if intel else processor if cpu else _nvidia_gpu
        platform = make(arch)
        vllm.platforms._current_platform = platform()
        import vllm._custom_ops
        from vllm.triton_utils import tl

        # without Triton vLLM has a module in its place, which lacks these types
        if not hasattr(tl, "float16"):
            tl.float16, tl.bfloat16 = torch.float16, torch.bfloat16
        _import_backends(amd)
        if amd or cpu or intel:
            _without_flash_attention_4()
    return platform


def _without_flash_attention_4() -> None:
    """Make FlashAttention 4 unavailable. The tree has its Python, but builds for AMD GPUs and processors lack it."""
    with contextlib.suppress(ImportError):
        importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface").__dict__["FA4_AVAILABLE"] = False


def _import_backends(amd: bool) -> None:
    """Import vLLM's backends. An import may use operators of the extension, properties of the GPU, and 128 MB of it."""
    import torch

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.ops, "_C"))
        stack.enter_context(mock.patch.object(torch, "empty"))
        stack.enter_context(mock.patch.object(torch, "zeros"))
        if not amd:
            nothing = SimpleNamespace(gcnArchName="")
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", return_value=nothing))
        importlib.import_module("vllm.compilation.backends")
        # AMD's backends import AMD's platform, which looks at the GPU when it is imported
        importlib.import_module("vllm.platforms.rocm")
        for backend in importlib.import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum:
            # the selector also cannot import such a backend
            with contextlib.suppress(ImportError, OSError, ValueError, AttributeError, NotImplementedError):
                backend.get_class()


def _metadata_folder(version: str) -> str:
    """A new directory with metadata of the package `vllm`. vLLM reads from its version whether it is for processors."""
    directory = Path(tempfile.mkdtemp())
    (directory / "vllm-0.dist-info").mkdir()
    (directory / "vllm-0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return str(directory)


def _give_triton_a_driver(name: str, arch: str) -> None:
    """Let Triton, if it is installed, find a driver of this machine's GPU. vLLM needs a driver to use Triton."""
    if importlib.util.find_spec("triton") is None:
        return
    backends: Any = importlib.import_module("triton.backends")
    if name == "intel":
        # it comes with PyTorch's build for Intel GPUs
        backends.backends["intel"] = SimpleNamespace(driver=MagicMock(name="driver"))
    for backend, found in backends.backends.items():
        found.driver.is_active = staticmethod(lambda backend=backend: backend == name)
    if name:
        make: Any = importlib.import_module("triton.backends.compiler").GPUTarget
        runtime: Any = importlib.import_module("triton.runtime")
        major, minor = CAPABILITIES.get(arch, (0, 0))
        active = MagicMock(name="driver")
        targets = {"nvidia": ("cuda", 10 * major + minor, 32), "amd": ("hip", arch, 64), "intel": ("xpu", arch, 32)}
        target = make(*targets[name])
        active.get_current_target.return_value = target
        active.utils.get_device_properties.return_value = {"multiprocessor_count": 132, "max_shared_mem": 232448}
        runtime.driver.set_active(active)


def _nvidia_gpu(arch: str) -> Any:
    base = importlib.import_module("vllm.platforms.cuda").NonNvmlCudaPlatform
    facts = {"get_device_name": "simulated", "num_compute_units": 132, "get_device_total_memory": 80 << 30}
    platform = _gpu(base, facts)
    # `exchange` may replace it
    platform.capability = _capability(arch)
    platform.get_device_capability = classmethod(lambda cls, device_id=0: cls.capability)
    return platform


def _amd_gpu(arch: str) -> Any:
    torch: Any = importlib.import_module("torch")
    torch.version.hip = "7.0"
    properties = SimpleNamespace(gcnArchName=f"{arch}:sramecc+:xnack-", multi_processor_count=304)
    torch.cuda.get_device_properties = lambda *a: properties
    base = importlib.import_module("vllm.platforms.rocm").RocmPlatform
    return _gpu(base, {"get_device_name": "simulated", "num_compute_units": 304, "get_device_total_memory": 192 << 30})


def _intel_gpu(arch: str) -> Any:
    # its class registers operators of PyTorch's build for Intel GPUs
    base = importlib.import_module("vllm.platforms.xpu").XPUPlatform
    return _gpu(
        base, {"get_device_name": f"simulated {arch}", "num_compute_units": 160, "get_device_total_memory": 24 << 30}
    )


def _gpu(base: type, facts: dict[str, Any]) -> Any:
    return type("SimulatedGpu", (base,), {name: _always(value) for name, value in facts.items()})


def _always(value: Any) -> Any:
    return classmethod(lambda cls, device_id=0: value)


def _capability(arch: str) -> Any:
    """The capability of an NVIDIA GPU, as vLLM's object."""
    return importlib.import_module("vllm.platforms.interface").DeviceCapability(*CAPABILITIES[arch])


def exchange(platform: Any, arch: str) -> None:
    """Replace a simulated NVIDIA GPU by another, and clear what vLLM remembers of the earlier one."""
    platform.capability = _capability(arch)
    with contextlib.suppress(ModuleNotFoundError, AttributeError):
        kernels = importlib.import_module("vllm.utils.b12x").get_b12x_paged_attention()
        kernels.is_supported = lambda: CAPABILITIES[arch][0] == 12
    for value in vars(importlib.import_module("vllm.utils.flashinfer")).values():
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()


def processor(arch: str) -> type:
    """The platform class of a simulated processor. vLLM's code asks PyTorch about its instructions anew each time."""
    import torch

    amx, kind = arch.endswith("_amx"), "ARM" if arch == "aarch64" else "X86"
    # vLLM gets these answers instead of those of this machine's processor
    for name, has in {
        "_is_amx_tile_supported": amx,
        "_init_amx": amx,
        "_is_avx512_bf16_supported": amx,
        "_is_avx512_supported": amx or arch.endswith("_avx512"),
    }.items():
        setattr(torch.cpu, name, lambda has=has: has)
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import CpuArchEnum

    answer = classmethod(lambda cls: CpuArchEnum[kind])
    return type("SimulatedProcessor", (CpuPlatform,), {"get_cpu_architecture": answer})


def without_kernels() -> None:
    """Make every operator of vLLM's extensions exist and do nothing. Call it after `boot`."""
    import torch

    for name in OPERATORS:
        setattr(torch.ops, name, MagicMock(name=name))


def current() -> Any:
    """vLLM's platform."""
    from vllm.platforms import current_platform

    return current_platform


def join(ranks: int, joined: int) -> int:
    """Make this process the first rank of every group of a model with some ranks; the other ranks are simulated.

    joined: the number of ranks of the last model, 0 before the first model. Returns ``ranks``.
    """
    import torch

    # this import registers the backend `fake`
    import torch.testing._internal.distributed.fake_pg
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.v1.worker.workspace import init_workspace_manager

    dist: Any = importlib.import_module("torch.distributed")
    make = dist.new_group
    with (
        mock.patch.object(dist, "new_group", lambda *a, **k: make(*a, **(k | {"backend": "fake"}))),
        # it waits for the other ranks
        mock.patch.object(MessageQueue, "create_from_process_group"),
    ):
        if joined:
            destroy_model_parallel()
        else:
            init_workspace_manager(torch.device("meta"))
        if ranks != joined:
            if joined:
                destroy_distributed_environment()
            dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())
            init_distributed_environment(ranks, 0, "env://", 0, "fake")
        ensure_model_parallel_initialized(ranks, 1, backend="fake")
    return ranks
