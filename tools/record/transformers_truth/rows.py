"""A row per attention or mixer layer, from the calls that a probe recorded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from transformers_truth.inputs import SOURCE, field
from transformers_truth.masks import MASKED
from transformers_truth.probe import Call, Probe
from transformers_truth.running import CROSS, mixer_kind, towers
from transformers_truth.sight import META, Sight, sight_of_grid, sight_of_rule

Row = dict[str, Any]

FIELDS = ("module", "layer_idx", "kind", "attention", "num_heads", "num_kv_heads", "head_size", "head_size_v",
          "sliding_window", "window_left", "window_right", "chunk", "sinks", "softcap", "alibi", "causal", "bias",
          "mla", "scaling")  # fmt: skip
# stated by a row where they apply
EXTRAS = ("kv_shared_from", "sparse_blocks", "segments")
# queries of their own, that look at what they do not hold
_QUERIES = re.compile(r"resampler|perceiver|qformer|projector|merger|adapter|pool", re.IGNORECASE)
_VISION = re.compile(r"vision|visual|image|video|(^|\.)vit(\.|$)|pixel", re.IGNORECASE)
_AUDIO = re.compile(r"audio|speech|acoustic", re.IGNORECASE)
_TEXT = re.compile(r"language_model|text_model|text_decoder|decoder|lm(\.|$)", re.IGNORECASE)


def role_of(model: nn.Module, path: str) -> str:
    """vision, audio or text: what the part of the model that holds the module reads."""
    nearest, inside = model, ""
    for name, tower in towers(model):
        if path.startswith(name + ".") and len(name) > len(inside):
            nearest, inside = tower, name
    words = [(m.end(), role) for role, pattern in (("vision", _VISION), ("audio", _AUDIO), ("text", _TEXT))
             for m in pattern.finditer(path)]  # fmt: skip
    if words:
        return max(words)[1]
    name = type(nearest).__name__
    for role, word in (("text", r"Text"), ("vision", r"Vision|Visual"), ("audio", r"Audio|Speech")):
        if re.search(word, name):
            return role
    modal = getattr(nearest, "input_modalities", "text")
    modal = {modal} if isinstance(modal, str) else set(modal)
    if getattr(nearest, "main_input_name", "") == "input_ids" and modal != {"image"}:
        return "text"
    if modal <= {"image", "video"}:
        return "vision"
    return "audio" if modal <= {"audio"} else "text"


def _sight(call: Call, role: str, alone: bool, seen: dict[int, Sight | None]) -> Sight:
    mask = call.mask
    if call.how == "softmax":
        mask = call.scores
        if mask is None:
            mask = call.given
    selects = any(getattr(call.module, n, None) is not None for n in ("indexer", "compressor"))
    if isinstance(mask, Tensor) and (mask.device == META or selects):
        # what is selected, or added, depends on numbers: the mask that the selection starts from
        mask = call.given
    if mask is None or not isinstance(mask, Tensor):
        causal = call.kwargs.get("is_causal")
        if alone and role != "text":
            # called by itself: the mask that its model makes was not seen
            causal = False
        if causal is None:
            causal = call.how in ("interface", "read") and getattr(call.module, "is_causal", False)
        window = call.kwargs.get("sliding_window") if causal else None
        return Sight(bool(causal), window - 1 if isinstance(window, int) else None, 0 if causal else None)
    data = mask.as_subclass(Tensor)
    grid = data if data.dtype == torch.bool else data > MASKED
    grid = grid.reshape(-1, *grid.shape[-2:])[0]
    grid = grid.expand(call.query[-2], grid.shape[-1]) if grid.shape[0] == 1 else grid
    if "Merged" in type(call.module).__name__:
        # the decoder's own keys come first, the encoder's after them: the window is over the former
        own = sight_of_grid(grid[:, : grid.shape[0]])
        window = call.kwargs.get("sliding_window", getattr(call.module, "sliding_window", None))
        return Sight(own.causal, window - 1, own.right) if isinstance(window, int) else own
    rule = getattr(mask, "rule", None)
    # a prefix is seen whole, however far back: only the class says how far its window reaches
    local = getattr(mask, "local_size", None) or call.kwargs.get("sliding_window")
    if rule is not None and _agrees(rule, grid):
        if id(rule) not in seen:
            seen[id(rule)] = sight_of_rule(rule)
        if (known := seen[id(rule)]) is not None:
            return known
    return sight_of_grid(grid, local)


def _agrees(rule: Callable[..., Tensor], grid: Tensor) -> bool:
    """Whether the mask is still what its rule says: a class may have masked more."""
    n, m = grid.shape
    if n * m > 1 << 18:
        return True
    q, kv = torch.arange(n, device="cpu")[:, None], torch.arange(m, device="cpu")[None, :]
    try:
        same = rule(q, kv).expand(n, m) == grid
        # some classes negate what they take for a boolean mask
        return bool(same.all()) or not bool(same.any())
    except (RuntimeError, IndexError):
        return True


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.device != META and value.numel() == 1 else None
    return None if value is None else float(value)


def _layer_index(module: nn.Module, path: str) -> int:
    index = getattr(module, "layer_idx", None)
    if isinstance(index, int) and index >= 0:
        return index
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", path)
    return int(numbers[0]) if numbers else 0


def mla_dims(module: nn.Module) -> Row | None:
    rank = field(module, "kv_lora_rank")
    if rank is None:
        return None
    nope, rope = field(module, "qk_nope_head_dim"), field(module, "qk_rope_head_dim", default=0)
    value = field(module, "v_head_dim")
    if nope is None or value is None:
        return None
    q_rank = field(module, "q_lora_rank")
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": q_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "absorbed": {"num_kv_heads": 1, "head_size": rank + rope, "head_size_v": rank},
        "indexer": indexer_dims(module),
    }


def indexer_dims(module: nn.Module) -> Row | None:
    config = getattr(module, "config", None)
    indexer = getattr(module, "indexer", None)
    if indexer is None and not _reuses_selection(module):
        return None
    source = indexer if indexer is not None else config
    return {
        "own": indexer is not None,
        "index_n_heads": field(config, "index_n_heads", default=field(source, "n_heads", "num_heads")),
        "index_head_dim": field(config, "index_head_dim", default=field(source, "head_dim")),
        "index_topk": field(config, "index_topk", default=field(source, "index_topk", "topk")),
    }


def _reuses_selection(module: nn.Module) -> bool:
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        return False
    for name in ("indexer_types", "layer_types"):
        types = getattr(config, name, None)
        if types and index < len(types) and types[index] in ("shared", "indexed_attention"):
            return True
    return False


def sparse_blocks(module: nn.Module) -> Row | None:
    indexer = getattr(module, "indexer", None)
    size, budget = field(indexer, "block_size", "compress_ratio"), field(indexer, "token_budget")
    if not isinstance(size, int) or mla_dims(module) is not None:
        return None
    return {
        "block_size": size,
        "topk_blocks": field(indexer, "topk_blocks", default=budget and budget // size),
        "local_blocks": field(indexer, "local_blocks"),
        "index_n_heads": field(indexer, "num_heads", "n_heads", "index_n_heads"),
        "index_head_dim": field(indexer, "head_dim", "index_head_dim"),
    }


def compressed(module: nn.Module) -> Row | None:
    """Keys of DeepSeek V4 that stand for several tokens, beside the raw ones in the window."""
    compressor = getattr(module, "compressor", None)
    rate = getattr(compressor, "compress_rate", None)
    if not isinstance(rate, int):
        return None
    indexer = getattr(compressor, "indexer", None)
    dims = {
        "own": True,
        "index_n_heads": field(indexer, "num_heads", "n_heads"),
        "index_head_dim": field(indexer, "head_dim"),
        "index_topk": field(indexer, "index_topk", "topk"),
    }
    return {"form": "hca" if indexer is None else "csa", "compress": rate, "indexer": dims if indexer else None}


def _heads_of_keys(call: Call) -> tuple[int, bool]:
    """KV heads, and whether they were read: by hand, keys are broadcast to all heads before the product."""
    heads, keys = call.query[1], call.key[1] if len(call.key) == 4 else call.key[0]
    if call.how != "softmax" or keys != heads:
        groups = getattr(call.module, "num_key_value_groups", 1)
        kv = field(call.module, "num_key_value_heads", "num_kv_heads")
        if keys == heads and isinstance(kv, int) and 0 < kv < heads and isinstance(groups, int):
            return kv, True
        return keys, False
    kv = field(call.module, "num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
    if isinstance(kv, int) and 0 < kv <= heads and heads % kv == 0:
        return kv, kv != heads
    return keys, False


def _added(scores: Tensor) -> str | None:
    """alibi, bias or nothing: what was added to scores that were the same everywhere."""
    rows = scores.reshape(-1, *scores.shape[-2:])
    last = rows[:, -1, :]
    visible = last[:, (last > MASKED).all(0)]
    if visible.shape[-1] < 4 or bool((visible - visible[:, :1]).abs().max() < 1e-6):
        return None
    # a straight line for each head, but for what bfloat16 rounds off
    line = torch.linspace(0, 1, visible.shape[-1], device="cpu")
    span = visible[:, -1:] - visible[:, :1]
    off = (visible - visible[:, :1] - span * line).abs().amax(-1)
    return "alibi" if bool((off <= 0.02 * span.abs()[:, 0]).all()) else "bias"


def attention_row(model: nn.Module, calls: list[Call], alone: bool, seen: dict[int, Sight | None]) -> tuple[Row, bool]:
    """The row of a module's calls, and whether a field of it was read."""
    call = calls[0]
    module, read = call.module, False
    role = role_of(model, call.path)
    sight = _sight(call, role, alone, seen)
    row: Row = dict.fromkeys(FIELDS)
    row["module"], row["layer_idx"] = call.path, _layer_index(module, call.path)
    heads = call.query[1] if len(call.query) == 4 else call.query[0]
    row["num_heads"] = heads
    row["num_kv_heads"], read = _heads_of_keys(call)
    row["head_size"], row["head_size_v"] = call.query[-1], call.value[-1]
    row["attention"] = "mha"
    row["sinks"] = call.kwargs.get("s_aux") is not None or isinstance(getattr(module, "sinks", None), Tensor)
    row["softcap"] = _number(call.kwargs.get("softcap"))
    row["bias"] = _has_bias(call)
    row["alibi"] = False
    row["scaling"] = _number(call.kwargs.get("scaling"))
    if call.how == "interface" and row["scaling"] is None:
        # what transformers' attention functions do then
        row["scaling"] = call.query[-1] ** -0.5
    if call.how == "softmax":
        _read_scores(call, row)
        read = True
    cross = bool(CROSS.search(call.path.rsplit(".", 1)[-1]) or re.search(r"Cross", type(module).__name__))
    cross = cross or getattr(module, "is_cross_attention", False) is True
    cross = cross or (call.key[-2] == SOURCE != call.query[-2] and getattr(module, "compressor", None) is None)
    cross = cross or (call.query[-2] != call.key[-2] and bool(_QUERIES.search(call.path)))
    cross = cross or bool(CROSS.search(".".join(call.path.split(".")[-2:])))
    if role != "text" and sight.causal == "prefix":
        # what is not seen is padding
        sight = Sight(False)
    row["causal"] = sight.causal
    row["window_left"], row["window_right"], row["chunk"] = sight.left, sight.right, sight.chunk
    if sight.chunk is None and sight.left is not None:
        row["sliding_window"] = sight.left + 1 if sight.causal else sight.left
    if cross:
        row["kind"], row["causal"] = "cross", False
        row["window_left"] = row["window_right"] = row["sliding_window"] = row["chunk"] = None
    elif role == "vision":
        row["kind"] = "vision"
    elif sight.chunk is not None:
        row["kind"] = "chunked"
    elif sight.left is not None:
        row["kind"] = "sliding"
    else:
        row["kind"] = "full" if sight.causal else "encoder"
    if (mla := mla_dims(module) or compressed(module)) is not None:
        row["mla"], read = mla, True
        row["attention"] = "mla_sparse" if mla["indexer"] else "mla"
    if role == "text" and (reach := field(module, "one_sided_attn_window_size", "local_radius")):
        # computed in blocks: no mask over all keys exists
        row.update(kind="sliding", sliding_window=reach, window_left=reach, window_right=reach, causal=False)
        read = True
    lengths = [c.query[-2] for c in calls]
    if role == "vision" and len(lengths) > 1:
        row["segments"] = lengths
    if (blocks := sparse_blocks(module)) is not None:
        row["sparse_blocks"], read = blocks, True
    if row["scaling"] is None:
        del row["scaling"]
    return row, read


def _read_scores(call: Call, row: Row) -> None:
    """ALiBi, bias and scale from the scores of a class that computes attention by hand."""
    if call.scores is None:
        return
    kind = _added(call.scores)
    row["alibi"], row["bias"] = kind == "alibi", row["bias"] or kind == "bias"
    if kind != "alibi":
        # at every third key an unknown bias left nothing
        scale = round(float(call.scores[..., ::3].max()), 12)
        row["scaling"] = scale if 0 < scale <= 1 else None


def _has_bias(call: Call) -> bool:
    bias = call.kwargs.get("position_bias")
    if isinstance(bias, Tensor):
        return bias.device == META or bool((bias.masked_fill(bias <= MASKED, 0) != 0).any())
    return bool(getattr(call.mask, "biased", False))


def mixer_row(path: str, module: nn.Module, kind: str) -> Row:
    row: Row = dict.fromkeys(FIELDS)
    row.update(module=path, layer_idx=_layer_index(module, path), kind=kind, sinks=False, alibi=False, causal=True,
               bias=False)  # fmt: skip
    for name in ("window_left", "window_right", "scaling"):
        del row[name]
    return row


def rows_of(model: PreTrainedModel, probe: Probe) -> tuple[list[Row], bool]:
    grouped: dict[str, list[Call]] = {}
    for call in probe.calls:
        group = grouped.setdefault(call.path, [])
        if not group or call.run == group[0].run:
            group.append(call)
    seen: dict[int, Sight | None] = {}
    rows: dict[str, Row] = {}
    read = False
    for path, calls in grouped.items():
        once = [c for c in calls if c.turn == calls[0].turn]
        alone = calls[0].run == probe.alone or calls[0].how == "read"
        rows[path], was_read = attention_row(model, once, alone, seen)
        read |= was_read or alone
    # the layer whose keys these are
    owners: dict[int, int] = {}
    for path, calls in grouped.items():
        key = calls[0].key_tensor
        if key is None:
            continue
        owner = owners.setdefault(id(key), rows[path]["layer_idx"])
        if owner != rows[path]["layer_idx"]:
            rows[path]["kv_shared_from"] = owner
    read |= _shared_latents(rows, grouped)
    for path, module in model.named_modules(remove_duplicate=False):
        kind = mixer_kind(module)
        if kind is not None and path not in rows and not any(path.startswith(o + ".") for o in rows):
            rows[path] = mixer_row(path, module, kind)
    order = {n: i for i, (n, _) in enumerate(model.named_modules(remove_duplicate=False))}
    rank = {"vision": 0, "audio": 1, "text": 2}
    ordered = sorted(rows.values(), key=lambda r: (rank[role_of(model, r["module"])], order.get(r["module"], 0)))
    turns = dict.fromkeys((c.path, c.turn) for c in probe.calls if c.run == grouped[c.path][0].run)
    return _repeated(ordered, list(turns)), read


def _shared_latents(rows: dict[str, Row], grouped: dict[str, list[Call]]) -> bool:
    """Says whose latents a layer reuses, where keys are made of them anew; whether there was one."""
    kept: dict[Any, int] = {}
    found = False
    for path, calls in grouped.items():
        module = calls[0].module
        sort = (getattr(module, "use_rope", None), getattr(module, "layer_type", None))
        if getattr(module, "store_full_length_kv", False):
            kept[sort] = rows[path]["layer_idx"]
        elif getattr(module, "is_kv_shared_layer", False) and "kv_shared_from" not in rows[path] and sort in kept:
            rows[path]["kv_shared_from"] = kept[sort]
            found = True
    return found


def _repeated(rows: list[Row], turns: list[tuple[str, int]]) -> list[Row]:
    """A row for each time that a module ran, where every one of them stands for several layers."""
    by_path = {r["module"]: r for r in rows}
    times = [path for path, _ in turns]
    if not times or set(times) != set(by_path) or min(times.count(p) for p in by_path) < 2:
        return rows
    return [{**by_path[path], "layer_idx": index} for index, path in enumerate(times)]


def read_calls(unseen: dict[str, nn.Module]) -> Iterator[Call]:
    """Calls that were never made, from the attributes of the modules that would have made them."""
    for path, module in unseen.items():
        config = getattr(module, "config", None)
        heads = field(module, "num_heads", "num_attention_heads", "n_heads", "n_head")
        heads = field(config, "num_attention_heads") if heads is None else heads
        width = field(module, "embed_dim", "hidden_size", "all_head_size")
        size = field(module, "head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head")
        size = width // heads if size is None and width and heads else size
        if not isinstance(heads, int) or not isinstance(size, int):
            continue
        groups = field(module, "num_key_value_groups", default=1)
        keys = field(module, "num_key_value_heads", "num_kv_heads", default=heads // groups)
        shape = (1, keys, 1, size)
        scale = field(module, "scaling", "scale")
        stated = {"scaling": scale} if isinstance(scale, float) else {}
        yield Call(module, path, "read", (1, heads, 1, size), shape, shape, None, kwargs=stated)
