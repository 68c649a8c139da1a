"""Small checkpoints with random weights, and the greedy tokens of transformers' own attention over them, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

VOCABULARY = 1000
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


# SGLang's Gemma takes the embeddings for the last layer, whatever the configuration says
TIED = {**SIZES, "tie_word_embeddings": True}


# multi-head latent attention, whose keys and values have sizes of their own
LATENTS = {
    **{name: size for name, size in SIZES.items() if name != "head_dim"}, "num_key_value_heads": 4,
    "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24,
    # SGLang reads this name, which configurations of transformers lack
    "moe_layer_freq": 1,
    # on processors SGLang has no other rotary embeddings for them
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512,
        "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip


class Model(NamedTuple):
    """A configuration of transformers, and a factor on the weights of queries and keys that makes scores large."""

    config: Any
    sharpness: float = 1.0


MODELS = {
    "llama": lambda: Model(LlamaConfig(num_hidden_layers=2, **SIZES)),
    # no backend of attnreg's has such heads
    "wide": lambda: Model(LlamaConfig(num_hidden_layers=2, **{**SIZES, "head_dim": 576})),
    "qwen3": lambda: Model(Qwen3Config(num_hidden_layers=2, **SIZES)),
    "mistral": lambda: Model(MistralConfig(num_hidden_layers=2, sliding_window=48, **SIZES)),
    # scores reach far beyond this cap, so that tokens without it are others
    "gemma2": lambda: Model(
        Gemma2Config(
            num_hidden_layers=4, sliding_window=48, query_pre_attn_scalar=32, attn_logit_softcapping=4.0,
            final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh", hidden_act="gelu_pytorch_tanh", **TIED,
        ),
        6.0,
    ),
    "gemma3": lambda: Model(
        Gemma3TextConfig(
            num_hidden_layers=6, sliding_window=48, query_pre_attn_scalar=32, hidden_activation="gelu_pytorch_tanh",
            **TIED,
        )
    ),
    # all layers without experts, and queries without a latent of their own
    "deepseek-v2": lambda: Model(
        DeepseekV2Config(num_hidden_layers=2, first_k_dense_replace=2, q_lora_rank=None, **LATENTS)
    ),
    # SGLang's own kernels on GPUs know latents of 512 and a rotary part of 64
    "deepseek-v2-wide": lambda: Model(
        DeepseekV2Config(
            num_hidden_layers=2, first_k_dense_replace=2, q_lora_rank=None,
            **{**LATENTS, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        )
    ),
    "deepseek-v3": lambda: Model(
        DeepseekV3Config(
            num_hidden_layers=3, first_k_dense_replace=1, q_lora_rank=48, n_routed_experts=4, num_experts_per_tok=2,
            n_group=1, topk_group=1, moe_intermediate_size=64, topk_method="noaux_tc", scoring_func="sigmoid",
            **LATENTS,
        )
    ),
    "gpt-oss": lambda: Model(
        GptOssConfig(
            # transformers 5.17 computes with this limit without a name for it, which SGLang reads
            num_hidden_layers=4, sliding_window=32, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=7.0,
            **{**SIZES, "head_dim": 64},
        )
    ),
}  # fmt: skip


def save(name: str, folder: Path, dtype: str = "float32") -> None:
    """Writes a checkpoint of a model in this dtype, the same in each run."""
    _built(name).to(getattr(torch, dtype)).save_pretrained(folder)


def greedy(folder: Path, prompts: list[list[int]], new: int, sinks: bool = True, **changes: Any) -> list[list[int]]:
    """The next tokens of each prompt alone, by transformers' eager attention.

    sinks: whether layers keep them. changes: of the configuration.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **changes
    ).eval()
    if not sinks:
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.data.fill_(-1e4)
    out = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None
            )
            out.append(found[0, len(prompt) :].tolist())
    return out


def log_probabilities(folder: Path, device: str, **changes: Any) -> Callable[[list[int], int], Tensor]:
    """Asks transformers' eager attention in float32 for the log probabilities of a sequence's last tokens.

    The function takes a sequence and how many tokens of its end were generated, and returns [tokens, vocabulary] in
    float64: before each of these tokens, the log probability of every token. changes: of the configuration.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **changes
    ).eval()
    model.to(device)

    def ask(sequence: list[int], new: int) -> Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([sequence], device=device)).logits[0, -new - 1 : -1]
            return torch.log_softmax(logits.double(), -1).cpu()

    return ask


def _built(name: str) -> nn.Module:
    config, sharpness = MODELS[name]()
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "embed_tokens" in parameter_name:
                # tied embeddings of the usual size would give each token itself
                parameter.normal_(0.0, 0.02)
            elif parameter_name.endswith("sinks"):
                parameter.normal_(0.0, 2.0)
            elif parameter.ndim > 1:
                # with the usual 0.02 a layer hardly changes what it gets, and the last token alone would decide
                parameter.normal_(0.0, 0.08)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.05)
            if sharpness != 1.0 and parameter_name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(sharpness**0.5)
    return model.eval()
