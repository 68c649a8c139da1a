"""Small models of transformers with random weights, and the comparison of their results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import ContinuousBatchingConfig

HIDDEN, LAYERS = 64, 2
TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # large scores, so that attention prefers some tokens to their mean
    "initializer_range": 0.25,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
HYBRID = {**GROUPED, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
GEMMA = {**HYBRID, "query_pre_attn_scalar": 16}
VISION = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
IMAGE_TOKEN, IMAGE_TOKENS = 100, 4

# Two orders of summing differ by at most this, relative to the largest number: a layer multiplies 7 matrices, with sums
# of at most 96 float32 terms each. Attention is among them.
TOLERANCE = LAYERS * 7 * 96 * 2.0**-24


def close(found: Tensor, expected: Tensor) -> None:
    """Assert that two results of a model are equal but for rounding in another order of sums."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


def batching(**settings: Any) -> ContinuousBatchingConfig:
    """The settings of continuous batching, and no switch to another backend where this transformers knows one.

    page_size: transformers 5.17 calls it block_size.
    """
    settings = {"auto_switch_to_flash": False, **settings}
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    if "page_size" not in known:
        settings["block_size"] = settings.pop("page_size")
    return ContinuousBatchingConfig(**{name: value for name, value in settings.items() if name in known})


def llama(**more: Any) -> Any:
    return _made(transformers.LlamaForCausalLM, transformers.LlamaConfig(**{**GROUPED, **more}))


def qwen3(**more: Any) -> Any:
    return _made(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**{**GROUPED, "head_dim": 16, **more}))


def gpt_oss(**more: Any) -> Any:
    experts = {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    return _made(transformers.GptOssForCausalLM, transformers.GptOssConfig(**{**HYBRID, **experts, **more}))


def gemma2(**more: Any) -> Any:
    # low enough that scores reach it
    config = transformers.Gemma2Config(**{**GEMMA, "attn_logit_softcapping": 2.0, **more})
    return _made(transformers.Gemma2ForCausalLM, config)


def gemma3(**more: Any) -> Any:
    return _made(transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**{**GEMMA, **more}))


def gemma3_both_ways() -> Any:
    config = transformers.Gemma3TextConfig(**GEMMA, use_bidirectional_attention=True)
    return _made(transformers.Gemma3TextModel, config)


def llama4() -> Any:
    """Chunks of 8 tokens in the first layer: a mask function that transformers makes anew for each mask."""
    more: dict[str, Any] = {"intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 1}
    kinds = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8}
    config = transformers.Llama4TextConfig(**{**GROUPED, "head_dim": 16, **more, **kinds})
    return _made(transformers.Llama4ForCausalLM, config)


def deepseek_v3() -> Any:
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}
    config = transformers.DeepseekV3Config(**TEXT, num_key_value_heads=4, **sizes, **experts)
    return _made(transformers.DeepseekV3ForCausalLM, config)


def bert() -> Any:
    return _made(transformers.BertModel, transformers.BertConfig(**TEXT))


def beit(**more: Any) -> Any:
    return _made(transformers.BeitModel, transformers.BeitConfig(**{**VISION, "initializer_range": 0.25, **more}))


def modern_bert(**more: Any) -> Any:
    tokens = {"cls_token_id": 1, "sep_token_id": 2, "eos_token_id": 2}
    config = transformers.ModernBertConfig(
        **{**TEXT, **tokens, **more}, global_attn_every_n_layers=2, local_attention=8
    )
    return _made(transformers.ModernBertModel, config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=128, d_model=HIDDEN, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return _made(transformers.T5Model, config)


def bart() -> Any:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96))
    }
    config = transformers.BartConfig(vocab_size=128, d_model=HIDDEN, max_position_embeddings=64, init_std=0.25, **sides)
    return _made(transformers.BartModel, config)


def gemma3_with_images() -> Any:
    config = transformers.Gemma3Config(
        text_config=GEMMA, vision_config=VISION, image_token_id=IMAGE_TOKEN, mm_tokens_per_image=IMAGE_TOKENS,
        boi_token_id=101, eoi_token_id=102,
    )  # fmt: skip
    return _made(transformers.Gemma3ForConditionalGeneration, config)


def pali_gemma() -> Any:
    config = transformers.PaliGemmaConfig(
        text_config={"model_type": "gemma", **GROUPED, "head_dim": 16},
        vision_config={**VISION, "projection_dim": HIDDEN},
        projection_dim=HIDDEN,
        image_token_id=IMAGE_TOKEN,
        image_token_index=IMAGE_TOKEN,
    )
    return _made(transformers.PaliGemmaForConditionalGeneration, config)


def _made(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = model_class(config).eval()
    # not initialised by transformers
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model


def tokens(*lengths: int, left: bool = True) -> dict[str, Tensor]:
    """Random prompts of these lengths, padded to the longest."""
    torch.manual_seed(1)
    most = max(lengths)
    ids, mask = torch.randint(3, IMAGE_TOKEN, (len(lengths), most)), torch.ones(len(lengths), most, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, slice(0, most - length) if left else slice(length, None)] = 0
    return {"input_ids": torch.where(mask.bool(), ids, 0), "attention_mask": mask}


@torch.inference_mode()
def by(implementation: str, model: Any, run: Callable[[Any], Any]) -> Any:
    """The result of running a model with an implementation of attention."""
    model.set_attn_implementation(implementation)
    return run(model)
