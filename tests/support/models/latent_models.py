"""Small models of transformers with multi-head latent attention, and what tells that they attended to latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import attnreg.integrations.transformers as attention
from support.models.small_models import TEXT, by

# longer than generation of 64 tokens after a prompt
BASE = {**TEXT, "max_position_embeddings": 512}
HEADS = {"num_key_value_heads": 4}
SIZES = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 24}
WITHOUT_Q = {**SIZES, "q_lora_rank": None}
EXPERTS = {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "moe_intermediate_size": 32,
}  # fmt: skip
DENSE = {**EXPERTS, "first_k_dense_replace": 2}
INDEXER = {"index_topk": 6, "index_head_dim": 32, "index_n_heads": 4}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip


def made(name: str, *parts: dict[str, Any], dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A model of a class's name, with random weights; norms too, which transformers makes 1."""
    fields = {name: value for part in parts for name, value in part.items()} | more
    torch.manual_seed(0)
    stem = name.removesuffix("ForCausalLM").removesuffix("Model")
    model = getattr(transformers, name)(getattr(transformers, f"{stem}Config")(**fields))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(dtype).eval()


def v3(**more: Any) -> Any:
    return made("DeepseekV3ForCausalLM", BASE, HEADS, SIZES, DENSE, **more)


def v32(**more: Any) -> Any:
    return made("DeepseekV32ForCausalLM", BASE, HEADS, SIZES, DENSE, INDEXER, **more)


# Kimi K2 is a DeepseekV3 model in transformers; 2 layers of LongCat have 4 of attention
_LONGCAT = {
    **{name: BASE[name] for name in BASE if name not in ("intermediate_size", "num_hidden_layers")},
    **SIZES, "num_layers": 1, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "n_routed_experts": 4,
    "zero_expert_num": 2, "moe_topk": 2, "head_dim": 16,
}  # fmt: skip
_KIMI_LINEAR = {
    "layer_types": ["full_attention", "linear_attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
}
MODELS: dict[str, Callable[[], Any]] = {
    "deepseek_v2": lambda: made("DeepseekV2ForCausalLM", BASE, HEADS, SIZES, EXPERTS),
    "deepseek_v2_lite": lambda: made("DeepseekV2ForCausalLM", BASE, HEADS, WITHOUT_Q, EXPERTS),
    "deepseek_v3": lambda: made("DeepseekV3ForCausalLM", BASE, HEADS, SIZES, EXPERTS),
    "deepseek_v3, rope in halves": lambda: v3(rope_interleave=False),
    "deepseek_v3, YaRN": lambda: v3(rope_parameters=YARN),
    "minicpm3": lambda: made("MiniCPM3ForCausalLM", BASE, HEADS, SIZES),
    "longcat_flash": lambda: made("LongcatFlashForCausalLM", _LONGCAT),
    "kimi_linear": lambda: made("KimiLinearForCausalLM", BASE, HEADS, WITHOUT_Q, _KIMI_LINEAR),
    "glm4_moe_lite": lambda: made("Glm4MoeLiteForCausalLM", BASE, HEADS, SIZES, EXPERTS),
    "youtu": lambda: made("YoutuForCausalLM", BASE, HEADS, SIZES),
    "mistral4": lambda: made("Mistral4ForCausalLM", BASE, HEADS, SIZES, EXPERTS),
}
SPARSE_MODELS: dict[str, Callable[[], Any]] = {
    "deepseek_v32": lambda: made("DeepseekV32ForCausalLM", BASE, HEADS, SIZES, EXPERTS, INDEXER),
    "glm_moe_dsa": lambda: made("GlmMoeDsaForCausalLM", BASE, HEADS, SIZES, EXPERTS, INDEXER),
}


def attentions(model: Any) -> list[nn.Module]:
    """The modules of a model that have latents."""
    return [module for module in model.modules() if "kv_b_proj" in module._modules]


def phases(model: Any, name: str = "attnreg") -> set[tuple[str, str]]:
    """The attention and the phase of each run of a model's modules with latents."""
    found = set(attentions(model))
    modules = dict(model.named_modules())
    runs = [run for run in attention.runs(model, name=name) if modules[run.module] in found]
    return {(run.asked.request.attention, run.asked.request.phase) for run in runs}


BOTH = {("mla", "prefill"), ("mla", "decode")}
SPARSE = {("mla_sparse", "decode")}
EXPANDED = {("mha", "any")}


def both(model: Any, run: Callable[[Any], Any], name: str = "attnreg") -> tuple[Tensor, Tensor]:
    """What a model computes by eager and by attnreg, without gradients."""
    with torch.no_grad():
        return by("eager", model, run), by(name, model, run)
