"""Makes registry/selections.yaml: the backends of some plain requests, and of one for each word, on all platforms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from attnreg.analysis.snapshot import snapshot
from attnreg.registry import Registry

PATH = "registry/selections.yaml"
_HEAD = """\
# What the registry selects for some requests on every platform: for each backend the architectures, with the flags that
# are on. `attnreg check` holds it against the data, so that no selection moves unseen. `make docs` writes it.

selections:
"""
_BASE = {"head_size": 128}
# head sizes of models, and small ones that few kernels take
_SIZES = (8, 20, 64, 80, 96, 192, 256, 512)
_LATENT = {"attention": "mla", "head_size": 576, "head_size_v": 512}
_DIMENSIONS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_EXPANDED = {"attention": "mla", "phase": "prefill", "head_size": 192, "head_size_v": 128, **_DIMENSIONS}
_VISION = {"role": "vision", "attn_type": "encoder_only", "head_size": 80}
_SPARSE = {**_LATENT, "attention": "mla_sparse", **_DIMENSIONS, "index_topk": 2048}


def selections(registry: Registry) -> str:
    """The text of the snapshot."""
    lines = [_HEAD]
    for entry in snapshot(registry, list(_requests(registry)), list(_platforms(registry))):
        lines.append(f"  - request: {_flow(entry['request'])}\n    selected:\n")
        lines += [f"      {name}: {platforms}\n" for name, platforms in entry["selected"].items()]
    return "".join(lines)


def _requests(registry: Registry) -> Iterator[dict[str, Any]]:
    """A base request and others that differ from it in one word or size, with plain caches and with latents."""
    words = registry.vocabulary.words_of
    kv_dtypes = [word for word in words("kv_dtype") if word != "auto"]
    yield _BASE
    yield from ({"head_size": size} for size in _SIZES)
    yield from ({"head_size": size, "head_size_v": width} for size, width in ((8, 4), (20, 16), (192, 128)))
    yield from ({**_BASE, "dtype": word} for word in words("dtype") if word != "bfloat16")
    yield from ({**_BASE, "kv_dtype": word} for word in kv_dtypes)
    yield from ({**_BASE, "attn_type": word} for word in words("attn_type") if word != "decoder")
    yield from ({**_BASE, "extra": {"cache_layout": word}} for word in words("cache_layout"))
    yield from ({**_BASE, "features": [word]} for word in words("features"))
    # prompts, which have an order of their own on Hopper
    prompts = {**_BASE, "phase": "prefill"}
    features = ("alibi", "asymmetric_window", "mm_prefix", "softcap")
    yield from (prompts, *({**prompts, "features": [word]} for word in features))
    yield from ({**prompts, "kv_dtype": word} for word in kv_dtypes)
    yield from ({**prompts, "head_size": size} for size in _SIZES)
    # blocks smaller than a copy of HOPPER_ATTN, for requests where HOPPER_ATTN stands first
    yield {**_BASE, "kv_dtype": "fp8", "block_size": 8}
    yield {**prompts, "head_size": 80, "block_size": 8}
    yield from ({"head_size": 96, "phase": "decode", **block} for block in ({}, {"block_size": 8}))
    # gpt-oss, Gemma 2, Gemma 4, a diffusion draft on a quantised cache
    yield {"head_size": 64, "features": ["sinks", "sliding_window"]}
    yield {"head_size": 256, "features": ["sliding_window", "softcap"]}
    yield {"head_size": 512, "kv_dtype": "fp8"}
    yield {**_BASE, "role": "draft", "kv_dtype": "fp8", "features": ["non_causal"]}
    yield from (_VISION, {**_VISION, "dtype": "float32"}, {**_VISION, "head_size": 20})
    yield from ({**_VISION, "features": ["softcap"]}, {"role": "vision", **_BASE, "kv_dtype": "turboquant_k8v4"})
    # kernels for latents and packed caches stand in no order of vision
    yield {"role": "vision", **_LATENT}
    yield from ({**_LATENT, **_DIMENSIONS, "kv_dtype": word} for word in ("auto", *kv_dtypes))
    yield from ({**_LATENT, "features": [word]} for word in ("dcp", "non_causal", "pcp"))
    # requests of MLA that only attnreg's own kernels serve
    wide = {**_EXPANDED, "head_size": 256, "head_size_v": None, "qk_nope_head_dim": 192, "v_head_dim": 256}
    for request in (_EXPANDED, wide, {**_LATENT, **_DIMENSIONS}, _SPARSE, {**_SPARSE, "head_size": 512}):
        yield from ({**request, "features": ["non_causal"]}, {**request, "dtype": "float32"})
        yield {**request, "head_size": 544}
    yield {**_SPARSE, "num_heads": 8, "features": ["non_causal"]}
    # 8-bit latents that Hopper's own kernels do not take
    yield from ({**_LATENT, "kv_dtype": "fp8", "features": ["pcp"]}, {**_LATENT, "kv_dtype": "fp8", "head_size": 512})
    yield {**_SPARSE, "kv_dtype": "fp8_e4m3", "features": ["pcp"]}
    # requests that HOPPER_MLA_SPARSE does not compute
    yield from ({**_SPARSE, "kv_dtype": word, "features": ["pcp"]} for word in ("auto", "fp8_ds_mla"))
    # latents that few kernels are compiled for
    yield from ({**_LATENT, "qk_nope_head_dim": 96}, {**_LATENT, "head_size": 288, "head_size_v": 256})
    wide = {**_EXPANDED, "head_size": 256, "head_size_v": 256, "qk_nope_head_dim": 192, "v_head_dim": 256}
    yield from (_EXPANDED, wide, {**wide, "features": ["batch_invariant"]})
    yield {**_EXPANDED, "head_size": 128, "qk_nope_head_dim": 64}
    yield from ({**_SPARSE, "kv_dtype": word} for word in ("auto", *kv_dtypes))
    yield from ({**_SPARSE, "num_heads": heads} for heads in (16, 64))
    without_rope = {**_SPARSE, "head_size": 512, "qk_rope_head_dim": 0}
    yield from (without_rope, {**without_rope, "kv_dtype": "fp8"}, {**without_rope, "features": ["lse"]})


def _platforms(registry: Registry) -> Iterator[str]:
    """Each architecture without flags, with the first of its platform's flags, and with all of them."""
    vocabulary = registry.vocabulary
    for arch in vocabulary.architectures.values():
        flags = [f.name for f in vocabulary.flags.values() if arch.platform in f.facts["platforms"]]
        yield from dict.fromkeys("+".join([arch.name, *switched]) for switched in ([], flags[:1], flags))


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_flow(v)}" for k, v in value.items()) + "}"
    return json.dumps(value).replace('"', "")
