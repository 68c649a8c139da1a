"""Inputs that a model of transformers can be run on: guesses by parameter name, the likeliest first."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

# primes that no size of a model equals: a tensor whose sides are these is a score
TOKENS, SOURCE = 37, 41
_CPU, _META = torch.device("cpu"), torch.device("meta")


def field(config: Any, *names: str, default: Any = None) -> Any:
    """The first of the fields that has a value."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def floats(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=_META)


def integers(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=_CPU)


def tokens(length: int) -> Tensor:
    return integers([[5 + i % 3 for i in range(length)]])


def _side(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        size = [size.get("height", 224), size.get("width", 224)]
    return (int(size[0]), int(size[-1])) if isinstance(size, (list, tuple)) else (int(size), int(size))


def _image(c: Any) -> list[Tensor]:
    height, width = _side(field(c, "image_size", "img_size", "input_size", "force_image_size", default=224))
    channels = int(field(c, "num_channels", "in_channels", "in_chans", "n_channels", default=3))
    patch = _side(field(c, "patch_size", default=16))
    return [
        floats(1, channels, height, width),
        floats(1, int(field(c, "num_frames", "frames", "temporal_patch_size", default=2)), channels, height, width),
        _patches(c)[0],
        floats(1, 16, channels * patch[0] * patch[1]),
        floats(1, channels, int(field(c, "num_frames", default=16)), height, width),
        floats(1, 1, int(field(c, "max_num_tiles", default=4)), channels, height, width),
        floats(1, channels, 384, 384),
        floats(1, 64, channels * patch[0] * patch[1]),
    ]


def _patches(c: Any) -> list[Tensor]:
    patch, channels = (
        _side(field(c, "patch_size", "spatial_patch_size", default=14)),
        int(field(c, "in_channels", "in_chans", "num_channels", default=3)),
    )
    temporal = int(field(c, "temporal_patch_size", default=1))
    height, width = _grid(c)
    return [
        floats(height * width, channels * temporal * patch[0] * patch[1]),
        floats(height * width, channels, patch[0], patch[1]),
        floats(height * width, int(field(c, "hidden_size", "embed_dim", default=64))),
        floats(1, height * width, channels * temporal * patch[0] * patch[1]),
        floats(height * width, channels, temporal, patch[0], patch[1]),
    ]


def _grid(c: Any) -> tuple[int, int]:
    return (24, 20)


def _audio(c: Any) -> list[Tensor]:
    mel = int(field(c, "num_mel_bins", "input_feat_size", "n_mels", "mel_bins", "input_dim", "feature_size",
                    "input_feat_per_channel", "feature_projection_input_dim", "input_size", default=80))  # fmt: skip
    length = 2 * int(field(c, "max_source_positions", default=400))
    return [
        floats(1, mel, length),
        floats(1, 400, mel),
        floats(mel, length),
        floats(1, mel, 3000),
        floats(1, 1, 1024, mel),
        floats(1, 3000, mel),
    ]


def _feature_masks(c: Any) -> list[Tensor]:
    lengths = dict.fromkeys((_audio(c)[0].shape[-1], 400, 3000))
    return [torch.ones((1, n), dtype=torch.bool, device=_CPU) for n in lengths]


def _wave(c: Any) -> list[Tensor]:
    return [floats(1, 16000), floats(1, 1, 24000), floats(1, 1024, int(field(c, "num_mel_bins", default=128)))]


def _hidden(c: Any) -> int:
    return int(field(c, "hidden_size", "d_model", "n_embd", "embed_dim", "dim", "width", default=64))


def _source(c: Any) -> list[Tensor]:
    sizes = [
        field(c, "cross_attention_hidden_size", "encoder_hidden_size", "encoder_width", "cross_hidden_size"),
        _hidden(c),
    ]
    return [floats(1, SOURCE, int(s)) for s in dict.fromkeys(sizes) if s]


def _text(c: Any) -> list[Tensor]:
    """Longer than a window that only a dense mask shows."""
    window = field(c, "window_size")
    length = TOKENS + window if isinstance(window, int) and window < 1024 else TOKENS
    positions = field(c, "max_position_embeddings", "n_positions")
    plain = tokens(min(length, positions) if isinstance(positions, int) and positions > 1 else length)
    books = field(c, "num_codebooks", "num_channels")
    if not isinstance(books, int):
        return [plain]
    # a token of each codebook at every position
    return [plain, *(torch.ones((1, TOKENS, n), dtype=torch.long, device=_CPU) for n in (books, books + 1))]


def _embeds(c: Any) -> list[Tensor]:
    return [floats(1, TOKENS, _hidden(c)), floats(TOKENS, _hidden(c)), floats(1, TOKENS, _hidden(c), 1)]


def _image_block(_: Any) -> list[Tensor]:
    return [integers([[1 if 12 <= i < 24 else 0 for i in range(TOKENS)]])]


def _ones(*shape: int) -> Callable[[Any], list[Tensor]]:
    return lambda _: [torch.ones(shape, dtype=torch.long, device=_CPU)]


_MAKERS: dict[str, Callable[[Any], list[Any]]] = {
    "input_ids": _text,
    "decoder_input_ids": lambda c: [tokens(TOKENS)],
    "inputs_embeds": _embeds,
    "decoder_inputs_embeds": _embeds,
    "hidden_states": _embeds,
    "pixel_values": _image,
    "pixel_values_videos": lambda c: _image(c)[1:2] + _image(c),
    "image": _image,
    "input_features": _audio,
    "input_values": _wave,
    "grid_thw": lambda c: [integers([[1, *_grid(c)]])],
    "image_grid_thw": lambda c: [integers([[1, *_grid(c)]])],
    "encoder_hidden_states": _source,
    "cross_attention_states": _source,
    "query_embeds": lambda c: [floats(1, 32, _hidden(c))],
    "aspect_ratio_ids": lambda c: [integers([[1]])],
    "aspect_ratio_mask": lambda c: [
        torch.ones((1, 1, int(field(c, "max_num_tiles", default=4))), dtype=torch.long, device=_CPU)
    ],
    "spatial_shapes": lambda c: [integers([[4, 4]])],
    "pixel_attention_mask": _ones(1, 16),
    "image_sizes": lambda c: [integers([list(_side(field(c, "image_size", default=224)))])],
    "target_sizes": lambda c: [integers([[24, 20]])],
    "tgt_sizes": lambda c: [integers([[24, 20]])],
    "pixel_position_ids": lambda c: [
        torch.stack(torch.meshgrid(torch.arange(24, device=_CPU), torch.arange(20, device=_CPU), indexing="ij"), -1)
        .reshape(1, -1, 2)
        .contiguous()
    ],
    "feature_lens": lambda c: [integers([2 * int(field(c, "max_source_positions", default=400))])],
    "aftercnn_lens": lambda c: [integers([int(field(c, "max_source_positions", default=400))])],
    "audio_input_ids": lambda c: [tokens(TOKENS)],
    "qformer_input_ids": lambda c: [tokens(11)],
    "bbox": lambda c: [torch.zeros((1, TOKENS, 4), dtype=torch.long, device=_CPU)],
    "visual_feats": lambda c: [floats(1, SOURCE, int(field(c, "visual_feat_dim", default=2048)))],
    "visual_pos": lambda c: [floats(1, SOURCE, int(field(c, "visual_pos_dim", default=4)))],
    "token_type_ids": _image_block,
    "mm_token_type_ids": _image_block,
    "input_features_mask": _feature_masks,
    "feature_attention_mask": _feature_masks,
    "padding_mask": lambda c: [torch.ones((1, TOKENS, 1), device=_CPU)],
    "attention_mask": lambda c: [torch.ones((1, 16000), dtype=torch.long, device=_CPU)],
}
_SEES = re.compile(r"^(pixel_values|image|input_features|input_values|hidden_states|inputs_embeds|query_embeds)$")
_POSSIBLE = 48


def parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    found = inspect.signature(model.forward).parameters
    return {k: p for k, p in found.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def candidates(model: nn.Module, *, composite: bool, crossed: bool, whole: bool = False) -> Iterator[dict[str, Any]]:
    """Keyword arguments to try on `model.forward`, in turn.

    `composite`: it holds models that are run by themselves, unless `whole` feeds them all at once. `crossed`: it has
    cross attention to feed.
    """
    config, known = getattr(model, "config", None), parameters(model)
    tried = set()
    for plan in _plans(model, composite=composite, crossed=crossed, whole=whole):
        if tuple(plan) in tried or any(n not in _MAKERS for n in plan):
            continue
        tried.add(tuple(plan))
        gridded = "grid_thw" in plan or "image_grid_thw" in plan
        options = [
            _patches(config) if gridded and n in ("hidden_states", "pixel_values") else _MAKERS[n](config) for n in plan
        ]
        for values in itertools.islice(itertools.product(*options), _POSSIBLE):
            yield {**dict(zip(plan, values, strict=True)), **({"use_cache": False} if "use_cache" in known else {})}


def _plans(model: nn.Module, *, composite: bool, crossed: bool, whole: bool) -> list[list[str]]:
    """Which arguments to give together, in turn."""
    config, known = getattr(model, "config", None), parameters(model)
    required = [k for k, p in known.items() if p.default is p.empty]
    wanted = list(required)

    def want(*names: str) -> None:
        wanted.extend(n for n in names if n in known and n not in wanted)

    plans: list[list[str]] = []
    text = "input_ids" in known
    if text:
        want("input_ids")
        if getattr(config, "is_encoder_decoder", False):
            want("decoder_input_ids")
        if composite:
            want("mm_token_type_ids", "token_type_ids")
        if crossed:
            want("encoder_hidden_states", "cross_attention_states", "query_embeds")
        plans.append(list(wanted))
        if composite:
            plans.append([n for n in wanted if "token_type" not in n])
        if whole:
            want("pixel_values", "input_features", "input_values", "image_grid_thw", "grid_thw", "pixel_position_ids")
            plans.append([n for n in wanted if "token_type" not in n])
        if "bbox" in known:
            plans.append([*plans[0], "bbox"])
    else:
        main = getattr(model, "main_input_name", None)
        if not any(_SEES.match(n) for n in wanted) and main in known and main in _MAKERS:
            wanted.append(main)
        if not any(_SEES.match(n) for n in wanted):
            want(*[n for n in known if _SEES.match(n)][:1])
        optional = ("grid_thw", "image_grid_thw", "aspect_ratio_ids", "aspect_ratio_mask", "pixel_position_ids",
                    "feature_lens", "aftercnn_lens", "spatial_shapes", "pixel_attention_mask", "decoder_input_ids",
                    "target_sizes", "tgt_sizes")  # fmt: skip
        if any(hasattr(c, "sliding_windows") for c in (config, getattr(config, "encoder_config", None))):
            # windows that are only applied together with padding
            want("attention_mask")
        if crossed:
            want("encoder_hidden_states", "cross_attention_states")
        if "grid_thw" in wanted or "image_grid_thw" in wanted:
            plans.append(list(wanted))
        want(*optional)
        plans.append(list(wanted))
        plans.append([n for n in wanted if n in required or _SEES.match(n)])
        want("input_features_mask", "feature_attention_mask")
        plans.append(list(wanted))
        plans.append([*plans[-1], *(["image_sizes"] if "image_sizes" in known else [])])
    return plans


def layer_inputs(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Keyword arguments to try on an attention module by itself; none where one is needed that cannot be guessed."""
    linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
    if linear is None:
        return
    hidden, head = linear.in_features, int(field(module, "head_dim", "head_size", "attention_head_size", default=64))
    for shape in ((1, TOKENS, hidden), (TOKENS, hidden)):
        made: dict[str, Any] = {}
        for name, parameter in parameters(module).items():
            if name in ("hidden_states", "query", "x", "inputs_embeds"):
                made[name] = floats(*shape)
            elif name == "position_embeddings":
                made[name] = (floats(*shape[:-1], head), floats(*shape[:-1], head))
            elif name == "cu_seqlens":
                made[name] = integers([0, TOKENS])
            elif name in ("attention_mask", "cache", "past_key_values", "rotary_pos_emb"):
                made[name] = None
            elif parameter.default is parameter.empty:
                return
        yield made
