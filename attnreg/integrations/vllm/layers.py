"""Describes the layer that vLLM asks about, and the machine that it runs on, as a request and a platform."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import attnreg
from attnreg.engines.vllm_requests import request_from_selector_row

# the fields of a model's configuration that vLLM's backends read when they are selected
_MODEL_FIELDS = (
    "attn_logit_softcapping",
    "index_topk",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


def describe(
    cls: Any, config: Any, num_heads: int | None, registry: attnreg.Registry, packages: dict[str, str]
) -> tuple[attnreg.AttentionRequest, attnreg.Platform]:
    """The request of the layer that vLLM asks about, and the platform that it is on.

    ``config`` is vLLM's AttentionSelectorConfig. This function also reads vLLM's current configuration, as vLLM's
    backends do.
    """
    from vllm.config import get_current_vllm_config_or_none

    vllm_config = get_current_vllm_config_or_none()
    here = machine(cls, registry, packages)
    row = {
        **{name: getattr(value, "value", value) for name, value in config._asdict().items()},
        "dtype": str(config.dtype).removeprefix("torch."),
        "num_heads": num_heads,
        "platform": here.platform,
        "arch": here.arch,
    }
    extra: dict[str, Any] = {}
    model_type = None
    if vllm_config is not None:
        run_dtype = getattr(vllm_config.cache_config, "cache_dtype", None)
        row |= {
            "run_kv_cache_dtype": None if run_dtype == config.kv_cache_dtype else run_dtype,
            "flash_attn_version": vllm_config.attention_config.flash_attn_version,
            "use_trtllm_attention": vllm_config.attention_config.use_trtllm_attention,
        }
        model, ranks = vllm_config.model_config, vllm_config.parallel_config
        if model is not None:
            row["model"] = _model_row(model, ranks, registry)
            extra["gathered_heads"] = row["model"]["num_heads"] * ranks.decode_context_parallel_size
            model_type = getattr(model.hf_text_config, "model_type", None)
    request, _ = request_from_selector_row(row)
    # vLLM knows more of the model and of the machine here than a recorded row holds
    request = replace(
        request,
        role=role(),
        model=request.model and (model_type or request.model),
        extra=tuple((dict(request.extra) | extra).items()),
    )
    return request, here


def machine(cls: Any, registry: attnreg.Registry, packages: dict[str, str]) -> attnreg.Platform:
    """The platform that one of vLLM's platform classes stands for, in the words of a registry."""
    platform = cls._enum.name.lower()
    return attnreg.Platform(
        platform=platform,
        arch=_architecture(cls, platform, registry),
        flags=_flags(platform) & registry.vocabulary.flags.keys(),
        packages=tuple(packages.items()),
    )


def _model_row(model: Any, ranks: Any, registry: attnreg.Registry) -> dict[str, Any]:
    """vLLM's configuration of a model and of its ranks, in the fields of a recorded row."""
    attn_types = registry.vocabulary.facets["attn_type"].words
    return {
        "num_heads": model.get_num_attention_heads(ranks),
        "num_kv_heads": model.get_num_kv_heads(ranks),
        "head_size": model.get_head_size(),
        # some models mix several types, or have none
        "attn_type": model.attn_type if model.attn_type in attn_types else None,
        "is_diffusion": model.is_diffusion,
        "hf": {name: getattr(model.hf_text_config, name, None) for name in _MODEL_FIELDS},
    }


def _architecture(cls: Any, platform: str, registry: attnreg.Registry) -> str:
    if platform == "cuda":
        capability = cls.get_device_capability()
        return f"sm{capability.major}{capability.minor}"
    if platform == "rocm":
        from vllm.platforms.rocm import _GCN_ARCH

        # gfx942:sramecc+:xnack-
        name: str = _GCN_ARCH.partition(":")[0]
        return name
    platforms = attnreg.detect_all(registry.vocabulary)
    # the registry does not know a platform that is not detected, and refuses its name
    return next((p.arch for p in platforms if p.platform == platform), platform)


def _flags(platform: str) -> frozenset[str]:
    """The flags that are on, as vLLM reads them: aiter's flags for MHA and MLA count only if aiter itself is on."""
    from vllm import envs

    flags = set()
    if platform == "rocm" and envs.VLLM_ROCM_USE_AITER:
        flags = {"aiter"}
        flags |= {"aiter_mha"} if envs.VLLM_ROCM_USE_AITER_MHA else set()
        flags |= {"aiter_mla"} if envs.VLLM_ROCM_USE_AITER_MLA else set()
    if platform == "rocm" and os.environ.get("FLASH_ATTENTION_TRITON_AMD_ENABLE") == "TRUE":
        flags.add("flash_attn_triton")
    return frozenset(flags)


def role() -> str:
    """The role of the model whose layers vLLM is building: vLLM tags models that draft."""
    # read from sys.modules: if vLLM has not imported the module, it has set no tag
    tag = getattr(sys.modules.get("vllm.compilation.backends"), "model_tag", "")
    return "draft" if tag == "draft_model" or tag.endswith("_head") else "target"
