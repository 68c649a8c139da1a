"""A small call with every tensor that an engine can hand over, and the ways in which one of them may be odd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attnreg
from attnreg import AttentionRequest, BatchMetadata, Platform, Registry
from attnreg.kernels import reference
from attnreg.runtime import ops
from attnreg.runtime.interface import AttentionSpec, KVCache, LayerParams
from attnreg.runtime.layer import Attention

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 32, 16
QUERIES, KEYS = (3, 1, 0), (20, 17, 4)
# the platform on which a row is selected, and the features of the request that hands over the most
PLATFORMS = {
    "CPU_ATTN": Platform(platform="cpu", arch="x86_64"),
    "TORCH_SDPA": Platform(platform="cpu", arch="x86_64"),
    "FLEX_ATTENTION": Platform(platform="cuda", arch="sm90"),
    "TRITON_ATTN": Platform(platform="cuda", arch="sm90"),
    "ROCM_ATTN": Platform(platform="rocm", arch="gfx950"),
}
FEATURES = {
    "CPU_ATTN": {"sinks", "alibi", "lse", "mm_prefix", "causal_by_request", "tree_mask"},
    "TORCH_SDPA": {"alibi", "mm_prefix", "causal_by_request", "tree_mask"},
    "FLEX_ATTENTION": {"sinks", "alibi", "lse", "mm_prefix"},
    "TRITON_ATTN": {"sinks", "alibi", "lse", "mm_prefix", "causal_by_request", "tree_mask", "fp8_query"},
    "ROCM_ATTN": {"sinks", "alibi"},
}
# the tensors of a call by where they are handed over
CALL = ("query", "key", "value", "key_cache", "value_cache", "output", "lse")
LAYER = ("sinks", "alibi_slopes", "k_scale", "v_scale", "q_scale")
BATCH = (
    "query_start_loc", "seq_lens", "query_start_loc_cpu", "seq_lens_cpu", "block_table", "slot_mapping", "mm_prefix",
    "key_start_loc", "causal", "tree_mask",
)  # fmt: skip
# others than these may be named where the lengths do not fit
LENGTHS = ("query_start_loc", "seq_lens", "query_start_loc_cpu", "seq_lens_cpu", "block_table")
REFUSALS = (attnreg.BatchError, attnreg.SpecError, attnreg.UnclaimedError)


def tensors(features: set[str], *, quantised: bool, paged: bool) -> dict[str, Tensor]:
    """The tensors of a call, by name."""
    draw = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    def integers(*values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    rows, keys = sum(QUERIES), sum(QUERIES if paged else KEYS)
    starts, lengths = integers(0, 3, 4, 4), integers(*KEYS)
    given = {
        "query": normal(rows, HEADS, SIZE), "key": normal(keys, KV_HEADS, SIZE), "value": normal(keys, KV_HEADS, SIZE),
        "output": torch.full((rows, HEADS, SIZE), 7.0), "query_start_loc": starts, "seq_lens": lengths,
        "query_start_loc_cpu": starts.clone(), "seq_lens_cpu": lengths.clone(),
    }  # fmt: skip
    if paged:
        given |= {"key_cache": normal(8, BLOCK, KV_HEADS, SIZE), "value_cache": normal(8, BLOCK, KV_HEADS, SIZE)}
        given |= {"block_table": integers([5, 2], [1, 7], [3, 0]), "slot_mapping": torch.tensor([33, 34, 35, 112])}
    else:
        given["key_start_loc"] = integers(0, 20, 37, 41)
    if "lse" in features:
        given["lse"] = torch.full((HEADS, rows), 7.0)
    if "mm_prefix" in features:
        given["mm_prefix"] = integers([[2, 9], [17, 20]], [[0, 0], [4, 6]], [[0, 0], [0, 0]])
    if "causal_by_request" in features:
        given["causal"] = torch.tensor([False, True, True])
    if "tree_mask" in features:
        given["tree_mask"] = torch.tensor([[0, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.bool)
    if "sinks" in features:
        given["sinks"] = normal(HEADS)
    if "alibi" in features:
        given["alibi_slopes"] = normal(HEADS).abs()
    if quantised:
        given |= {name: normal(KV_HEADS).abs() + 0.5 for name in ("k_scale", "v_scale")}
        given |= {name: given[name].to(torch.float8_e4m3fn) for name in ("key_cache", "value_cache")}
        if "fp8_query" in features:
            given |= {"query": given["query"].to(torch.float8_e4m3fn), "q_scale": torch.tensor([0.7])}
    return given


def oddities(tensor: Tensor) -> Iterator[tuple[str, Any]]:
    """Names of ways in which a tensor may be odd, and each such tensor: of the same numbers wherever that can be."""
    words = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor

    def like(made: Tensor) -> Tensor:
        return made.view(torch.float8_e4m3fn) if tensor.dtype == torch.float8_e4m3fn else made

    for count in (1, 3):
        memory = torch.cat([words.new_zeros(count), words.flatten()])
        yield f"from element {count} of its memory", like(memory[count:].view(words.shape))
    for dim in range(tensor.ndim):
        spread = words.new_zeros([2 * n + 1 if i == dim else n for i, n in enumerate(words.shape)])
        view = spread.narrow(dim, 1, 2 * words.shape[dim])
        view = view.unflatten(dim, (words.shape[dim], 2)).select(dim + 1, 0)
        yield f"every other of dimension {dim}", like(view.copy_(words))
        yield f"dimension {dim} expanded", tensor.narrow(dim, 0, 1).expand(tensor.shape)
        yield f"dimension {dim} last in memory", like(words.movedim(dim, -1).contiguous().movedim(-1, dim))
        one = words.narrow(dim, 0, 1).contiguous()
        strides = [2**40 if i == dim else s for i, s in enumerate(one.stride())]
        yield f"one of dimension {dim}, at a stride of 2**40", like(one.as_strided(one.shape, strides))
    if tensor.is_floating_point() and words is tensor:
        yield "a negated view", torch._neg_view(-tensor)
    yield "on meta", tensor.to("meta")
    for dtype in (torch.float64, torch.float16, torch.int32, torch.int64, torch.bool):
        if dtype != tensor.dtype:
            yield f"as {dtype}", tensor.float().to(dtype)
    yield "sparse", tensor.float().to_sparse() if words is not tensor else tensor.to_sparse()
    yield "with a dimension more", tensor[None]
    yield "a scalar", tensor.flatten()[0]
    yield "one row less", tensor[:-1]
    yield "empty", tensor[:0]
    yield "a list", tensor.float().tolist()
    yield "a word", "query"
    yield "nothing", None


@dataclass
class Made:
    """What came of a call: its numbers, or the refusal; and whether anything had been written by then."""

    output: Tensor | None
    exact: Tensor | None
    refusal: Exception | None
    written: bool


def forward(
    backend: str,
    registry: Registry,
    given: dict[str, Any],
    *,
    quantised: bool,
    default_device: str = "cpu",
    entry: str = "forward",
) -> Made:
    """The outcome of a forward with these tensors, which may be odd; a call that is refused may not have written.

    default_device: PyTorch's for the time of the call. entry: the function that is called: forward, attend, ops (the
    custom ops, which make the output), or write_kv, of which the cache has the numbers.
    """
    features = {"alibi"} if "alibi_slopes" in given else set()
    features |= {name for name in ("sinks", "lse", "mm_prefix") if name in given}
    features |= {"per_head_quant_scales"} if quantised else set()
    features |= {"causal_by_request"} if "causal" in given else set()
    features |= {"tree_mask"} if "tree_mask" in given else set()
    features |= {"fp8_query"} if "q_scale" in given else set()
    request = AttentionRequest(
        head_size=SIZE, num_heads=HEADS, num_kv_heads=KV_HEADS, dtype="float32", block_size=BLOCK,
        kv_dtype="fp8_e4m3" if quantised else "auto", features=features,
    )  # fmt: skip
    cache = None
    if "key_cache" in given:
        cache = KVCache(given["key_cache"], given["value_cache"])
    watched = [x for x in given.values() if isinstance(x, Tensor)]
    before = [bytes_of(x) for x in watched]
    try:
        layer = Attention.from_selection(
            attnreg.select(request, PLATFORMS[backend], registry, backend),
            **{name: given[name] for name in LAYER if name in given},
        )
        batch = BatchMetadata(max_query_len=3, max_seq_len=20, **{n: given[n] for n in BATCH if n in given})
        query, key, value, output = (given[name] for name in ("query", "key", "value", "output"))
        lse = {"lse": given["lse"]} if "lse" in given else {}
        # PyTorch looks at each call of its functions where a default device is named
        with nullcontext() if default_device == "cpu" else torch.device(default_device):
            if entry == "write_kv":
                stored = [bytes_of(x) for x in cache or ()]
                layer.write_kv(key, value, cache, batch)
                found = torch.stack([x.float() for x in cache or ()])
                exact = torch.stack(
                    [_written(given, name, x) for name, x in zip(("key", "value"), stored, strict=True)]
                )
                return Made(found, exact.view(found.shape), None, True)
            if entry == "attend":
                layer.attend(query, cache, batch, output, **lse)
            elif entry == "ops":
                ops.register(layer, f"walked {id(layer)}")
                with ops.forward_context(batch):
                    output = ops.attention(layer, query, key, value, cache)
            else:
                output = layer.forward(query, key, value, cache, batch, output, **lse)
    except REFUSALS as refusal:
        return Made(None, None, refusal, [bytes_of(x) for x in watched] != before)
    packed = {} if cache is not None else {"key": given["key"], "value": given["value"]}
    params = LayerParams(**{name: getattr(layer.params, name) for name in LAYER})
    spec: AttentionSpec = layer.spec
    exact = reference.attention(spec, batch, given["query"], cache, params=params, **packed)
    return Made(output[: len(exact.output)], exact.output, None, True)


def _written(given: dict[str, Any], name: str, before: list[float]) -> Tensor:
    """The numbers of a cache by slot, float64, after the new keys or values were written to it."""
    slots, scale = given["slot_mapping"], given.get(f"{name[0]}_scale")
    rows, cache = given[name][: len(slots)], torch.tensor(before).view(-1, KV_HEADS, SIZE)
    # a scale is one number, or one for each head
    scaled = rows if scale is None else rows / scale.reshape(-1, 1)
    cache[slots] = scaled.to(given[f"{name}_cache"].dtype).float()
    return cache.double()


def bytes_of(x: Any) -> Any:
    """The numbers of a tensor, None where there are none to read."""
    if not isinstance(x, Tensor) or x.is_meta or x.layout is not torch.strided:
        return None
    return x.float().flatten().tolist()


def close(made: Made) -> bool:
    """Whether the numbers are right. Of a call on tensors without numbers there is nothing to see."""
    assert made.output is not None
    assert made.exact is not None
    return torch.allclose(made.output.double(), made.exact, atol=1e-4, rtol=1e-3)
