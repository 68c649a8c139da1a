"""A registry of vLLM against one recorded decision of vLLM's own selector: the choice, verdicts and refused facets.

What is held for each backend that vLLM evaluated: accepted or refused alike; and, where refused,

- every facet that one of vLLM's reasons names is refused here too (`FACETS`);
- of every reason about a combination at least one facet is (`COMBINATIONS`);
- nothing else is refused here. After the facets vLLM reports only the first combination that fails, attnreg all of
  them: where vLLM reports one, further combinations are let pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from attnreg import NoBackendError, Registry, Selection, select
from attnreg.engines.vllm_requests import request_from_selector_row
from attnreg.errors import RequestError
from attnreg.selection.trace import Candidate

# a reason of vLLM's about one thing, and the facet or feature that it names
FACETS = {
    "head_size not supported": "head_size",
    "dtype not supported": "dtype",
    "kv_cache_dtype not supported": "kv_dtype",
    "block_size not supported": "block_size",
    "partial multimodal token full attention not supported": "mm_prefix",
    "MLA not supported": "attention",
    "non-MLA not supported": "attention",
    "sparse not supported": "attention",
    "non-sparse not supported": "attention",
    "attention sinks not supported": "sinks",
    "per-head quant scales not supported": "per_head_quant_scales",
    "compute capability not supported": "arch",
    "attention type encoder not supported": "attn_type",
    "attention type encoder_only not supported": "attn_type",
    "attention type encoder_decoder not supported": "attn_type",
    "sliding window not supported": "sliding_window",
    "R-SWA not supported": "rswa",
    "non-causal attention not supported": "non_causal",
    "batch invariance not supported": "batch_invariant",
    "KV connector not supported": "kv_connector",
    "PCP not supported": "pcp",
    "DCP not supported": "dcp",
    "device-cpu query lens mismatch not supported, this is needed for adaptive verification": "adaptive_verification",
    "no KV cache layout in common with TURBOQUANT": "kv_layout",
    "no KV cache layout in common with ULTRAQUANT": "kv_layout",
}
# how a reason about a combination begins, and what it is about
COMBINATIONS = {
    # FlashAttention
    "(FLASH_ATTN: )?sink not supported on compute capability": {"sinks", "arch"},
    "SM90 FP8 KV with mm_prefix": {"mm_prefix", "kv_dtype", "arch"},
    "(FLASH_ATTN: )?FP8 KV cache requires": {"kv_dtype", "arch", "head_size"},
    "mm_prefix .* requires FlashAttention v4": {"mm_prefix", "head_size"},
    "FLASH_ATTN: causal route requires": {"arch", "head_size"},
    # FlashInfer
    "(FLASHINFER: )?fa2 prefill misreads an NVFP4": {"kv_dtype", "head_size"},
    "(FLASHINFER: )?the sink prefill wrapper cannot read an NVFP4": {"kv_dtype", "sinks"},
    # MLA. An ordinary layer is refused for being none, and so not for this
    "non-causal MLA attention with DCP": {"non_causal", "dcp", "attention"},
    "non-causal fp16 MLA decode": {"non_causal", "dtype"},
    "FlashAttention MLA not supported on this device": {"arch"},
    "FlashMLA Dense is only supported": {"arch"},
    "FlashInfer MLA kernel requires qk_nope": {"qk_nope_head_dim"},
    "tokenspeed_mla requires DeepSeek R1": {"qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"},
    # sparse MLA
    "FlashMLA Sparse is only supported": {"arch"},
    "FLASHMLA_SPARSE supports head_size 512 only with": {"head_size", "kv_dtype", "arch"},
    "FLASHMLA_SPARSE supports head_size 512 only for": {"head_size", "qk_rope_head_dim"},
    "FLASHMLA_SPARSE only supports the nvfp4": {"kv_dtype", "arch"},
    "FlashMLA mega attention requires": {"arch"},
    "vllm._flashmla_C was built without": {"flags"},
    # built for NVIDIA GPUs
    "vllm._flashmla_C is not available": {"arch"},
    "IMPORT ImportError: vllm.vllm_flash_attn requires the CUDA": {"arch"},
    "FlashInfer MLA Sparse kernel requires qk_nope": {"qk_nope_head_dim"},
    "FlashInfer native no-rope MLA requires": {"qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim"},
    "FlashInfer MLA Sparse requires model with index_topk": {"index_topk"},
    "FLASHINFER_MLA_SPARSE SM10 does not support fp8_ds_mla": {"kv_dtype"},
    "FLASH_ATTN_MLA_SPARSE_FA4 SM10 does not support fp8_ds_mla": {"kv_dtype"},
    r"\w+ does not support combined PCP\+DCP": {"pcp", "dcp"},
    "FLASHINFER_MLA_SPARSE_SM90 requires FlashInfer": {"packages"},
    "FLASHINFER_MLA_SPARSE_SM90 requires sparse MLA": {"attention"},
    "FLASHINFER_MLA_SPARSE_SM90 requires kv_lora_rank": {"kv_lora_rank"},
    "FLASHINFER_MLA_SPARSE_SM90 requires qk_rope": {"qk_rope_head_dim"},
    "FLASHINFER_MLA_SPARSE_SM120 requires FlashInfer's": {"packages"},
    "FLASHINFER_MLA_SPARSE_SM120 requires": {"index_topk"},
    "FLASHINFER_MLA_SPARSE_DSV4 SM10x uses": {"kv_dtype", "arch"},
    "FLASHINFER_MLA_SPARSE_DSV4 requires SM10x": {"arch"},
    "FlashAttention MLA Sparse currently supports only FP16": {"kv_dtype"},
    "FlashAttention MLA Sparse does not support DCP": {"dcp"},
    "FlashAttention MLA Sparse requires model with index_topk": {"index_topk"},
    "FA4 unavailable": {"arch"},
    "FA4 sparse MLA runs its prefill batches on FlashInfer's": {"packages"},
    "FA4 sparse MLA requires index_topk": {"index_topk"},
    r"FA4 sparse MLA requires \(kv_lora_rank": {"kv_lora_rank", "qk_rope_head_dim"},
    "FA4 sparse MLA requires .* gathered query heads": {"gathered_heads"},
    # others
    "ROCM_SEGMENTED_ATTN requires AMD RDNA": {"arch"},
    "FP8 segmented attention requires gfx12": {"kv_dtype", "arch"},
    "Install the b12x backend": {"packages"},
    "IMPORT ModuleNotFoundError: No module named 'flashinfer'": {"packages"},
    "IMPORT ModuleNotFoundError: No module named 'aiter'": {"packages"},
    "tokenspeed_mla package is not installed": {"packages"},
    "b12x currently requires bfloat16": {"dtype"},
    "b12x does not support float16": {"kv_dtype"},
    "b12x currently supports only fp8": {"kv_dtype"},
    "b12x paged attention is not supported on the current device": {"arch"},
    # a tag that only vision towers may use
    "IMPORT ValueError: Backend TORCH_SDPA must be registered": {"role"},
    # vLLM's own code fails on a model without the dimension, and so refuses
    "EXC AttributeError: .* no attribute 'qk_nope_head_dim'": {"qk_nope_head_dim"},
    "EXC AttributeError: .* no attribute 'kv_lora_rank'": {"kv_lora_rank"},
}
_COMBINATIONS = [(re.compile(begin), facets) for begin, facets in COMBINATIONS.items()]
# ROCM_ATTN where the model, or a KV connector, keeps it out of the list: here the entry's `if` does not hold
LEFT_OUT = ["(removed from list before validation)"]


def ask(row_in: dict[str, Any], registry: Registry, backend: str | None = None) -> Selection:
    request, platform = request_from_selector_row(row_in)
    try:
        return select(request, platform, registry, backend)
    except NoBackendError as e:
        return e.selection


def name_of(selection: Selection) -> str | None:
    return selection.backend.name if selection.backend else None


def named(reasons: list[str]) -> tuple[set[str], list[set[str]]]:
    """The facets that vLLM's reasons name, and those that its reasons about combinations are about.

    Raises LookupError for a reason that the tables above do not have.
    """
    facets, combinations = set(), []
    for i, text in enumerate(reasons):
        # the second time it is the answer of vLLM's check of combinations, after which it asks nothing more
        if text in reasons[:i]:
            combinations.append({FACETS[text]})
        elif text in FACETS:
            facets.add(FACETS[text])
        else:
            about = next((about for begin, about in _COMBINATIONS if begin.match(text)), None)
            if about is None:
                raise LookupError(f"the tables of this test do not know vLLM's reason {text!r}")
            combinations.append(about)
    return facets, combinations


def refused(candidate: Candidate, registry: Registry) -> set[str]:
    """The facets that attnreg's reasons are about; of features, which."""
    rules = {rule.where: rule for v in registry.backends[candidate.name].variants for rule in v.rules}
    out: set[str] = set()
    for reason in candidate.reasons:
        out |= set(reason.facets)
        if reason.kind == "feature":
            out.add(str(reason.asked))
        elif reason.kind == "rule" and "features" in reason.facets:
            clauses = [c for c in rules[reason.where].when.clauses if c.facet == "features" and c.matcher.form == "all"]
            out |= {str(word) for c in clauses for word in c.matcher.mentions}
    return out - {"features"}


def disagreement(candidate: Candidate, reasons: list[str], registry: Registry) -> str:
    """How attnreg's verdict on a backend differs from vLLM's; empty where it does not."""
    if candidate.accepted != (not reasons):
        return f"vLLM says {reasons or 'accepted'}, attnreg {[r.text for r in candidate.reasons] or 'accepted'}"
    try:
        facets, combinations = named(reasons)
    except LookupError as unknown:
        return str(unknown)
    here = refused(candidate, registry)
    if facets != {"kv_layout"}:
        # vLLM looks at the layout only where nothing else speaks against a backend
        here.discard("kv_layout")
    expected = facets.union(*combinations)
    more = here - expected if not combinations else set()
    if facets - here or more or not all(about & here for about in combinations):
        return f"vLLM refuses {sorted(expected)} ({reasons}), attnreg {sorted(here)}"
    return ""


def differences(row: dict[str, Any], registry: Registry) -> Iterator[str]:
    """How a registry decides a recorded row otherwise than vLLM: the choice, each candidate, and a named backend."""
    asked, out = row["in"].get("requested_backend"), row["out"]
    selection = ask(row["in"], registry)
    if asked is None and name_of(selection) != out["chosen"]:
        yield f"vLLM chooses {out['chosen']}, attnreg {name_of(selection)}"
    listed = {c["backend"]: c["reasons"] for c in out["candidates"] if c["reasons"] != LEFT_OUT}
    considered = [c for c in selection.candidates if not any(r.kind == "order" for r in c.reasons)]
    if [c.name for c in considered] != list(listed):
        yield f"vLLM tries {', '.join(listed)}, attnreg {', '.join(c.name for c in considered)}"
    else:
        texts = ((c.title, disagreement(c, listed[c.name], registry)) for c in considered)
        yield from (f"{title}: {text}" for title, text in texts if text)
    if asked is not None:
        yield from _by_name(row, asked, registry)


def _by_name(row: dict[str, Any], asked: str, registry: Registry) -> Iterator[str]:
    granted, reasons = row["out"]["chosen"], row["out"].get("requested_reasons")
    if asked not in registry.backends:
        # CUSTOM and NO_ATTENTION: names without a backend
        try:
            ask(row["in"], registry, asked)
        except RequestError:
            if granted is None:
                return
        yield f"by name {asked}: vLLM gives {granted}, and attnreg has no such backend"
        return
    selection = ask(row["in"], registry, asked)
    name, gave_way = name_of(selection), selection.requested is None
    # a backend that gave way to the order may still be what the order chooses
    if name != granted or (granted not in (None, asked) and not gave_way):
        yield f"by name {asked}: vLLM gives {granted} ({reasons}), attnreg {name}"
    elif not gave_way and (text := disagreement(selection.candidates[0], reasons, registry)):
        yield f"by name {asked}: {text}"
