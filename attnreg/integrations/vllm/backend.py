# mypy: disable-error-code="misc"
"""AttnregBackend: the class that vLLM asks about attnreg's backend. vLLM imports it by its path."""

from __future__ import annotations

from typing import Any

from torch import dtype as Dtype  # noqa: N812
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from attnreg.integrations.vllm.claims import FEATURES, claims
from attnreg.integrations.vllm.impl import AttnregImpl
from attnreg.integrations.vllm.metadata import AttnregMetadataBuilder
from attnreg.integrations.vllm.registries import NAME


class AttnregBackend(AttentionBackend):
    """attnreg's kernels over vLLM's KV cache. It serves the layers that the registry's row ATTNREG claims."""

    forward_includes_kv_cache_update = True
    # vLLM passes no keys for a layer whose keys another op has written
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[AttnregImpl]:
        return AttnregImpl

    @staticmethod
    def get_builder_cls() -> type[AttnregMetadataBuilder]:
        return AttnregMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(size) for size in claims().block_sizes()]

    @classmethod
    def validate_configuration(cls, *, device_capability: Any, **layer: Any) -> list[str]:
        """The registry's reasons against a layer. It describes the device itself."""
        return claims().reasons(**layer)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return not claims().reasons(head_size=head_size)

    @classmethod
    def supports_dtype(cls, dtype: Dtype) -> bool:
        return not claims().reasons(dtype=dtype)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return not claims().reasons(kv_cache_dtype=kv_cache_dtype)

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return not claims().reasons(block_size=block_size)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return not claims().reasons(attn_type=attn_type)


def _serves(feature: str) -> Any:
    return classmethod(lambda cls: feature in claims().features())


for _method, _feature in FEATURES.items():
    setattr(AttnregBackend, _method, _serves(_feature))
