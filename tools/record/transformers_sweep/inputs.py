"""Arguments that a model may be called with: text, images, patches, sound and series, and what goes with them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from transformers_sweep.tiny import TEXT_TOKENS, VOCABULARY

BATCH, TOKENS = 2, 12
Inputs = dict[str, Any]


def text(rows: int = BATCH, length: int = TOKENS, seed: int = 1, words: int = VOCABULARY) -> Tensor:
    """[rows, length] tokens of plain text, of a vocabulary of this many words."""
    low, high = (TEXT_TOKENS[0] if words > TEXT_TOKENS[0] else 0), min(TEXT_TOKENS[1], words)
    return torch.randint(
        low, high, (rows, length), generator=torch.Generator("cpu").manual_seed(seed), device="cpu"
    ).to(torch.get_default_device())


def noise(*shape: int) -> Tensor:
    """Random numbers, the same for the same shape."""
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(3), device="cpu").to(
        torch.get_default_device()
    )


def inputs_of(model: PreTrainedModel) -> Iterator[Inputs]:
    """Arguments of a plain call to try, the likeliest first."""
    names = inspect.signature(model.forward).parameters
    words = getattr(model.config, "vocab_size", None)
    ids = text(words=words if isinstance(words, int) else VOCABULARY)
    if "input_ids" in names and getattr(model, "main_input_name", "input_ids") in ("input_ids", "decoder_input_ids"):
        plain: Inputs = {"input_ids": ids}
        if "decoder_input_ids" in names:
            plain["decoder_input_ids"] = text(seed=2)[:, :8]
        yield plain
        if "bbox" in names:
            yield {**plain, "bbox": torch.zeros(BATCH, TOKENS, 8 if model.config.model_type == "bros" else 4).long()}
    if "input_values" in names:
        more = {"decoder_input_ids": text(seed=2)[:, :8]} if "decoder_input_ids" in names else {}
        for shape in ((BATCH, 4000), (BATCH, 1, 4000), (BATCH, 1, 3840), (BATCH, 64, 16), (BATCH, 1024, 128)):
            yield {"input_values": noise(*shape), **more}
        yield {"input_ids": ids, "input_values": noise(BATCH, 1, 3840)}
    if "input_features" in names:
        yield from _features(model, names)
    if "pixel_values" in names:
        yield from _images(model, names, ids)
    if "grid_thw" in names or "image_grid_thw" in names:
        yield from _patches(model, names)
    if "past_values" in names:
        yield from _series(model)
    if "input_ids" in names:
        yield {"input_ids": ids}
    if "inputs_embeds" in names:
        yield {"inputs_embeds": noise(BATCH, TOKENS, getattr(model.config, "hidden_size", 64))}


def _features(model: PreTrainedModel, names: Any) -> Iterator[Inputs]:
    config: Any = model.config
    bins: Any = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 16)
    more = {"decoder_input_ids": text(seed=2)[:, :8]} if "decoder_input_ids" in names else {}
    for rows, columns in ((bins, 256), (64, bins), (64, 160), (64, 128), (64, 80)):
        given: Inputs = {"input_features": noise(BATCH, rows, columns), **more}
        yield given
        mask = next((n for n in ("input_features_mask", "attention_mask") if n in names), None)
        if mask is not None:
            yield {**given, mask: torch.ones(BATCH, rows, dtype=torch.long)}
            yield {**given, mask: torch.ones(BATCH, columns, dtype=torch.long)}


def _images(model: PreTrainedModel, names: Any, ids: Tensor) -> Iterator[Inputs]:
    config: Any = model.config
    vision = getattr(config, "vision_config", config)
    sizes = [getattr(c, name, None) for c in (config, vision) for name in ("image_size", "img_size")]
    size = next((s for s in sizes if isinstance(s, int | list | tuple)), 32)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", 3)
    channels = channels if isinstance(channels, int) else 3
    if "spatial_shapes" in names:
        grid = {"pixel_attention_mask": torch.ones(BATCH, 4).long(), "spatial_shapes": torch.full((BATCH, 2), 2)}
        patches = {"pixel_values": noise(BATCH, 4, channels * vision.patch_size**2), **grid}
        yield {"input_ids": ids, **patches} if "input_ids" in names else patches
    for shape in ((channels, height, width), (channels, 64, 64), (2, channels, height, width)):
        images = noise(BATCH, *shape)
        yield {"pixel_values": images}
        if "input_ids" in names:
            yield {"input_ids": ids, "pixel_values": images}


def _patches(model: PreTrainedModel, names: Any) -> Iterator[Inputs]:
    """Two images of 4 x 4 patches, one after the other, as Qwen-VL takes them."""
    config: Any = model.config
    grid = {"grid_thw" if "grid_thw" in names else "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
    name = next(n for n in ("hidden_states", "pixel_values") if n in names)
    channels: Any = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3)
    patch = getattr(config, "patch_size", 14)
    patch = patch if isinstance(patch, int) else patch[0]
    for frames in (getattr(config, "temporal_patch_size", 1), 1, 2):
        yield {name: noise(32, channels * frames * patch * patch), **grid}
    yield {name: noise(32, channels, patch, patch), **grid}
    yield {name: noise(1, 32, channels * patch * patch), **grid}


def _series(model: PreTrainedModel) -> Iterator[Inputs]:
    config: Any = model.config
    context = int(getattr(config, "context_length", None) or 32)
    yield {"past_values": noise(BATCH, context, int(getattr(config, "num_input_channels", 1)))}
    lags = getattr(config, "lags_sequence", None)
    if lags:
        before, after = context + max(lags), int(config.prediction_length)
        times = int(config.num_time_features)
        yield {
            "past_values": noise(BATCH, before),
            "past_time_features": noise(BATCH, before, times),
            "past_observed_mask": torch.ones(BATCH, before),
            "future_values": noise(BATCH, after),
            "future_time_features": noise(BATCH, after, times),
        }
    yield {"past_values": [noise(64), noise(64)]}
