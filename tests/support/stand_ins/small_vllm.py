"""A small package in vLLM's place, as far as the recorder of its selector looks: two backends."""

from __future__ import annotations

import zipfile
from pathlib import Path

FILES = {
    # a torch and a Triton of no weight: what is recorded is Python's
    "torch.py": """
from types import SimpleNamespace
bfloat16 = float16 = float32 = empty = zeros = None
ops, version, cuda = SimpleNamespace(_C=None), SimpleNamespace(), SimpleNamespace(get_device_properties=None)
""",
    "triton/__init__.py": "",
    "triton/backends/__init__.py": "backends = {}",
    "triton/backends/compiler.py": "GPUTarget = lambda *given: given",
    "triton/runtime.py": "class driver: set_active = staticmethod(lambda active: None)",
    "vllm/_custom_ops.py": "",
    "vllm/compilation/backends.py": "",
    "vllm/triton_utils.py": "class tl: pass",
    "vllm/utils/flashinfer.py": "",
    "vllm/platforms/__init__.py": "_current_platform = None",
    "vllm/platforms/interface.py": """
from typing import NamedTuple
from vllm.v1.attention.backends.registry import AttentionBackendEnum
class DeviceCapability(NamedTuple):
    major: int
    minor: int
class Platform:
    get_device_capability = classmethod(lambda cls: None)
    @classmethod
    def get_valid_backends(cls, capability, asked, num_heads):
        valid, invalid = [], {}
        for place, backend in enumerate(AttentionBackendEnum):
            reasons = backend.get_class().validate_configuration(capability, **asked._asdict())
            if reasons:
                invalid[backend] = (place, reasons)
            else:
                valid.append((backend, place))
        return valid, invalid
    @classmethod
    def get_attn_backend_cls(cls, requested, attn_selector_config, num_heads):
        valid, _ = cls.get_valid_backends(cls.get_device_capability(), attn_selector_config, num_heads)
        if not valid:
            raise ValueError("No valid attention backend found")
        return valid[0][0].value
""",
    "vllm/platforms/cuda.py": "from vllm.platforms.interface import Platform as NonNvmlCudaPlatform",
    "vllm/platforms/rocm.py": "from vllm.platforms.interface import Platform as RocmPlatform",
    "vllm/config/__init__.py": """
import contextlib
from types import SimpleNamespace
AttentionConfig = SimpleNamespace
class VllmConfig:
    def __init__(self):
        self.cache_config, self.parallel_config = SimpleNamespace(), SimpleNamespace()
set_current_vllm_config = contextlib.nullcontext
""",
    "vllm/config/cache.py": 'from typing import Literal\nCacheDType = Literal["auto", "bfloat16", "fp8"]',
    "vllm/v1/attention/backend.py": """
class AttentionBackend:
    def validate_configuration(self): ...
""",
    "vllm/v1/attention/selector.py": """
from typing import NamedTuple
class AttentionSelectorConfig(NamedTuple):
    head_size: int
    dtype: object
    kv_cache_dtype: str | None
    block_size: int | None
    use_mla: bool = False
    has_sink: bool = False
    has_sliding_window: bool = False
""",
    "vllm/v1/attention/backends/registry.py": """
import enum, importlib
class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    TRITON_ATTN = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
    def get_class(self):
        module, _, name = self.value.rpartition(".")
        return getattr(importlib.import_module(module), name)
""",
    "vllm/v1/attention/backends/flash_attn.py": """
from vllm.v1.attention.backend import AttentionBackend
class FlashAttentionBackend(AttentionBackend):
    @classmethod
    def validate_configuration(cls, device_capability, **asked):
        return ["MLA not supported"] if asked["use_mla"] else []
""",
    "vllm/v1/attention/backends/triton_attn.py": """
from vllm.v1.attention.backend import AttentionBackend
class TritonAttentionBackend(AttentionBackend):
    validate_configuration = classmethod(lambda cls, device_capability, **asked: [])
""",
}


def wheel(path: Path) -> Path:
    """A wheel of the package."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    return path


def edited(source: Path, path: Path, file: str, before: str, after: str) -> Path:
    """A copy of a wheel in which one file has another text."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            text = old.read(name).decode()
            if name == file:
                assert before in text
                text = text.replace(before, after)
            new.writestr(name, text)
    return path
