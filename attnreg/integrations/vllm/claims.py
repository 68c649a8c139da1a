"""The claims of attnreg's backend in vLLM: answers, from the registry, to vLLM's questions to a backend's class."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attnreg
from attnreg.integrations.vllm.layers import describe
from attnreg.integrations.vllm.registries import NAME, attnreg_overlay
from attnreg.packages.installed import installed_packages
from attnreg.selection.selector import evaluate

if TYPE_CHECKING:
    from attnreg.registry import Backend, Registry

# vLLM's methods that ask a class about one feature -> attnreg's word for the feature
FEATURES = {
    "supports_batch_invariance": "batch_invariant",
    "supports_dcp": "dcp",
    "supports_device_cpu_query_lens_mismatch": "adaptive_verification",
    "supports_kv_connector": "kv_connector",
    "supports_mm_prefix": "mm_prefix",
    "supports_non_causal": "non_causal",
    "supports_pcp": "pcp",
    "supports_per_head_quant_scales": "per_head_quant_scales",
    "supports_rswa": "rswa",
    "supports_sink": "sinks",
    "supports_sliding_window": "sliding_window",
}
_BLOCK_SIZES = range(1, 1025)


class VllmClaims:
    """The row of attnreg's backend in a registry that decides for vLLM."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.row: Backend = registry.backends[NAME]
        self.packages = installed_packages(registry.vocabulary.packages)

    def reasons(self, **layer: Any) -> list[str]:
        """Every reason against a layer on this machine; an empty list if it is served.

        ``layer`` has fields of vLLM's AttentionSelectorConfig; missing ones are as in a plain layer.
        """
        import torch
        from vllm.platforms import current_platform
        from vllm.v1.attention.selector import AttentionSelectorConfig

        plain = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": None, "block_size": None}
        config = AttentionSelectorConfig(**{**plain, **layer})
        try:
            request, platform = describe(type(current_platform), config, None, self.registry, self.packages)
            verdict = evaluate(request, platform, self.registry, NAME)
        except attnreg.RequestError as e:
            # the registry does not know a word
            return [str(e)]
        return list(verdict.against(NAME))

    def features(self) -> frozenset[str]:
        """The features that every variant of the row serves."""
        return frozenset.intersection(*(variant.served for variant in self.row.variants))

    def block_sizes(self) -> list[int]:
        """The block sizes whose multiples the row accepts, the smallest first; no other size is accepted."""
        tests = [c.matcher for v in self.row.variants for c in v.claims if c.facet == "block_size"]
        sizes: list[int] = []
        for size in _BLOCK_SIZES:
            if all(test.matches(size) for test in tests) and not any(size % known == 0 for known in sizes):
                sizes.append(size)
        return sizes


@functools.cache
def _bundled() -> VllmClaims:
    return VllmClaims(attnreg.load_registry(attnreg_overlay()))


_deciding: VllmClaims | None = None


def decide_by(registry: Registry) -> None:
    """Makes the row of this registry answer, if the registry has one for attnreg's backend."""
    global _deciding
    _deciding = VllmClaims(registry) if NAME in registry.backends else None


def claims() -> VllmClaims:
    """The claims of the registry that decides inside vLLM, or else of the bundled overlay."""
    return _deciding or _bundled()
