"""Translates the inputs of vLLM's selector to a request and a platform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnreg.platforms import Platform
from attnreg.request import AttentionRequest, FacetValue

# field of the selector -> feature; a field that an older version lacks is off
_FEATURES = {
    "has_sink": "sinks",
    "has_sliding_window": "sliding_window",
    "use_adaptive_verification": "adaptive_verification",
    "use_batch_invariant": "batch_invariant",
    "use_dcp": "dcp",
    "use_kv_connector": "kv_connector",
    "use_mm_prefix": "mm_prefix",
    "use_non_causal": "non_causal",
    "use_pcp": "pcp",
    "use_per_head_quant_scales": "per_head_quant_scales",
    "use_rswa": "rswa",
}
# the fields of a logged layer that a request has, too
_FACTS = ("attn_type", "block_size", "dtype", "head_size", "kv_cache_dtype", "num_heads", "use_mla", "use_sparse")
LOGGED = frozenset((*_FEATURES, *_FACTS))
_ATTENTION = {(False, False): "mha", (False, True): "mha_sparse", (True, False): "mla", (True, True): "mla_sparse"}
# VLLM_ROCM_USE_AITER turns aiter on; its parts for MHA and MLA are on unless turned off one by one
_AITER_FLAGS = frozenset({"aiter", "aiter_mha", "aiter_mla"})
# packages that a machine with AMD GPUs is assumed to have beside aiter; all others are for NVIDIA's
_ON_ROCM = ("flash-attn", "torch", "triton", "vllm")
# the assumed degree of decode context parallelism: a recorded row says only that it is on
_DCP_SIZE = 2


def request_from_selector_row(row_in: Mapping[str, Any]) -> tuple[AttentionRequest, Platform]:
    """The request and the platform for a recorded input of vLLM's selector.

    ``row_in`` has the fields of vLLM's AttentionSelectorConfig (``head_size``, ``dtype``, ``kv_cache_dtype``,
    ``block_size``, ``use_mla``, ``use_sparse``, ``has_sink``, ``attn_type``, ...), and the selector's ``num_heads``.
    Its other inputs are ``platform``, ``arch``, ``aiter`` ("on", "off", "pkg_missing"), ``amx``, ``model``,
    ``run_kv_cache_dtype``, ``flash_attn_version`` and ``use_trtllm_attention``. An absent or null field means not
    given, or off. The request is for a registry with vLLM's facets, such as ``vllm-0.33.0``. It does not have the name
    of the backend that a user requests.

    ``model`` has ``num_heads``, ``attn_type``, ``is_diffusion`` and, under ``hf``, the fields of the model's config;
    None: no model. All packages for the platform count as installed, except aiter if ``aiter`` is "pkg_missing".
    """
    model = row_in.get("model")
    hf: Mapping[str, Any] = (model or {}).get("hf") or {}
    dcp = bool(row_in.get("use_dcp"))
    extra: dict[str, FacetValue] = {
        "run_kv_dtype": row_in.get("run_kv_cache_dtype"),
        "flash_attn_version": row_in.get("flash_attn_version"),
        "use_trtllm_attention": row_in.get("use_trtllm_attention"),
    }
    if model is not None:
        heads = model.get("num_heads")
        extra |= {
            "model_head_size": _size(model.get("head_size", row_in["head_size"])),
            "model_attn_type": model.get("attn_type"),
            "model_softcap": bool(hf.get("attn_logit_softcapping")),
            "is_diffusion": bool(model.get("is_diffusion")),
            "gathered_heads": heads * _DCP_SIZE if heads and dcp else heads,
        }
    request = AttentionRequest(
        head_size=row_in["head_size"],
        num_heads=row_in.get("num_heads"),
        num_kv_heads=_kv_heads(row_in, model or {}),
        dtype=row_in["dtype"],
        kv_dtype=row_in.get("kv_cache_dtype"),
        block_size=row_in.get("block_size"),
        attention=_ATTENTION[bool(row_in.get("use_mla")), bool(row_in.get("use_sparse"))],
        attn_type=row_in.get("attn_type") or "decoder",
        features=frozenset(feature for field, feature in _FEATURES.items() if row_in.get(field)),
        kv_lora_rank=_dimension(hf.get("kv_lora_rank")),
        qk_nope_head_dim=_dimension(hf.get("qk_nope_head_dim")),
        qk_rope_head_dim=_dimension(hf.get("qk_rope_head_dim")),
        v_head_dim=_dimension(hf.get("v_head_dim")),
        index_topk=_size(hf.get("index_topk")),
        model="recorded" if model is not None else None,
        extra=tuple((name, value) for name, value in extra.items() if value is not None),
    )
    return request, _platform(row_in)


def _platform(row_in: Mapping[str, Any]) -> Platform:
    arch = row_in.get("arch") or ("x86_64_amx" if row_in.get("amx") else "x86_64")
    flags = _AITER_FLAGS if row_in.get("aiter") == "on" else frozenset[str]()
    packages: Any = None
    if row_in["platform"] == "rocm":
        packages = _ON_ROCM if row_in.get("aiter") == "pkg_missing" else (*_ON_ROCM, "aiter")
    return Platform(platform=row_in["platform"], arch=arch, flags=flags, packages=packages)


def _kv_heads(row_in: Mapping[str, Any], model: Mapping[str, Any]) -> int | None:
    """The model's KV heads, if the layer's query heads are a multiple of them, else None."""
    heads, kv_heads = row_in.get("num_heads"), model.get("num_kv_heads")
    return None if kv_heads is None or heads is None or heads % kv_heads else kv_heads


def _dimension(value: int | None) -> int | None:
    """A dimension of MLA. A negative one becomes 1: no kernel is compiled for either."""
    return value if value is None or value >= 0 else 1


def _size(value: int | None) -> int | None:
    """A count or a width. A number below 1 becomes 1: no kernel is compiled for either."""
    return value if value is None or value >= 1 else 1
