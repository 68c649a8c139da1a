"""Tiny random models, written as vLLM reads them: one for each thing that a layer can ask of its backend."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import tokenizers
import torch
import transformers

VOCABULARY = 1024
# weights of this spread give logits that differ: with the usual 0.02 every token is nearly as likely as any other
SPREAD = 0.08
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192,
    "initializer_range": SPREAD, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


def llama(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.LlamaConfig(**COMMON | changes)


def one_kv_head() -> transformers.PreTrainedConfig:
    """Ranks that share a KV cache are more than there are KV heads."""
    return llama(num_key_value_heads=1)


def qwen3() -> transformers.PreTrainedConfig:
    return transformers.Qwen3Config(**COMMON | {"head_dim": 128})


def gpt_oss() -> transformers.PreTrainedConfig:
    """Sinks in every layer, a window of 128 in every other.

    A token goes to all experts: chosen ones may be others after the least difference, and then so is all that follows.
    """
    return transformers.GptOssConfig(
        **COMMON | {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 4, "intermediate_size": 256}
    )


def gemma2() -> transformers.PreTrainedConfig:
    """A softcap in every layer, low enough for scores to feel it, a window in every other."""
    return transformers.Gemma2Config(
        **COMMON | {"sliding_window": 256, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0}
    )


def gemma3() -> transformers.PreTrainedConfig:
    """Five layers with a window, then one without."""
    return transformers.Gemma3TextConfig(
        **COMMON | {"sliding_window": 256, "query_pre_attn_scalar": 64, "num_hidden_layers": 6}
    )


def bloom() -> transformers.PreTrainedConfig:
    """ALiBi."""
    return transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=512, n_layer=4, n_head=8, initializer_range=SPREAD, bos_token_id=0,
        eos_token_id=1, pad_token_id=2,
    )  # fmt: skip


def draft() -> transformers.PreTrainedConfig:
    """A draft for the Llama above: fewer layers."""
    return llama(num_hidden_layers=1)


def whisper() -> transformers.PreTrainedConfig:
    """An encoder that looks both ways, and layers that attend to what it gives."""
    return transformers.WhisperConfig(
        vocab_size=51865, d_model=256, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, init_std=SPREAD,
    )  # fmt: skip


def llama_fp8() -> transformers.PreTrainedConfig:
    """The Llama above, where what projects attention's output is in fp8 with one scale: vLLM can fuse that."""
    return llama()


MODELS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": llama, "qwen3": qwen3, "gpt-oss": gpt_oss, "gemma2": gemma2, "gemma3": gemma3, "bloom": bloom,
    "draft": draft, "whisper": whisper, "llama-fp8": llama_fp8, "llama-one-kv-head": one_kv_head,
}  # fmt: skip


def write(name: str, folder: Path) -> Path:
    """Write the model, once: the folder of what `transformers` saves."""
    path = folder / name
    if not (path / "done").exists():
        torch.manual_seed(sum(map(ord, name)))
        config = MODELS[name]()
        model = getattr(transformers, _classes(config))(config).to(torch.bfloat16)
        _make_telling(name, model)
        # the draft is its target's first layer, so that some of what it proposes is accepted
        if name == "draft":
            target = transformers.LlamaForCausalLM.from_pretrained(write("llama", folder), dtype=torch.bfloat16)
            model.load_state_dict(target.state_dict(), strict=False)
        model.save_pretrained(path)
        if name == "llama-fp8":
            _quantise(path)
        elif name == "whisper":
            _write_processor(path)
        elif name == "llama":
            _write_tokenizer(path)
        (path / "done").touch()
    return path


def _make_telling(name: str, model: transformers.PreTrainedModel) -> None:
    """Weights by which attention counts: sinks that take a share, and of Gemma, which adds up embeddings, small ones.

    Its logits, which are products with the embeddings, are small then, and bfloat16 tells them apart.
    """
    with torch.no_grad():
        for parameter in (value for key, value in model.named_parameters() if key.endswith("sinks")):
            parameter.normal_(1.0, 2.0)
        if name.startswith("gemma"):
            model.get_input_embeddings().weight.mul_(0.35)


def _classes(config: transformers.PreTrainedConfig) -> str:
    suffix = "ForConditionalGeneration" if config.is_encoder_decoder else "ForCausalLM"
    return type(config).__name__.removesuffix("TextConfig").removesuffix("Config") + suffix


def _write_processor(path: Path) -> None:
    """What reads Whisper's audio, with a tokenizer of single letters: the tests give and read token ids."""
    transformers.WhisperFeatureExtractor().save_pretrained(path)
    tokens = {f"t{i}": i for i in range(51865)}
    (path / "vocab.json").write_text(json.dumps(tokens))
    (path / "merges.txt").write_text("#version: 0.2\n")
    transformers.WhisperTokenizer(str(path / "vocab.json"), str(path / "merges.txt")).save_pretrained(path)


def _write_tokenizer(path: Path) -> None:
    """A tokenizer of whole words, one for each token: a server wants one."""
    words = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t1")
    fast.save_pretrained(path)


def _quantise(path: Path) -> None:
    """Rewrites what was saved as vLLM reads a checkpoint in fp8 with static scales."""
    file = path / "model.safetensors"
    weights: dict[str, torch.Tensor] = {}
    for name, weight in safetensors.torch.load_file(file).items():
        weights[name] = weight
        if name.endswith("o_proj.weight"):
            scale = weight.float().abs().max() / 448
            layer = name.removesuffix("weight")
            weights[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
            # of activations: what random weights of this spread give stays below 448 times it
            weights |= {f"{layer}weight_scale": scale.view(1), f"{layer}input_scale": torch.tensor([0.05])}
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    plain = [name.removesuffix(".weight") for name in weights if name.endswith("_proj.weight") and "o_proj" not in name]
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": plain}
    (path / "config.json").write_text(json.dumps(config))
