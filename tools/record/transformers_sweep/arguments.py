"""Arguments for a class that takes none of the usual ones: by the names in its forward, and those in its errors."""

from __future__ import annotations

import inspect
import itertools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from transformers_sweep.inputs import BATCH, TOKENS, Inputs, noise, text

# tries for a small model and for a large one, of more parameters than this
TRIES, TRIES_OF_LARGE, LARGE = 200, 40, 2_000_000
# of the processor, for all tries: a bound for a model whose every try takes long
SECONDS = 20
_LARGEST = 4096


@dataclass(frozen=True)
class Sizes:
    """What the sizes of arguments are made of: a width, and the side, frames and patches of an image."""

    width: int
    side: int
    frames: int
    channels: int
    patch: int
    image_token: int


Maker = Callable[[Sizes], Any]
_ONES = (
    lambda s: torch.ones(BATCH, TOKENS, dtype=torch.bool),
    lambda s: torch.ones(BATCH, TOKENS, dtype=torch.long),
    lambda s: torch.ones(BATCH, (s.side // s.patch) ** 2, dtype=torch.bool),
)


def _with_images(words: Tensor, token: int, count: int) -> Tensor:
    """Text whose first ``count`` tokens are those of an image."""
    return words.masked_fill(torch.arange(TOKENS) < count, token)


_TOKEN_IDS = (lambda s: text(words=s.width), lambda s: text())
_STATES = (
    lambda s: noise(BATCH, TOKENS, s.width),
    lambda s: noise(BATCH, s.width, TOKENS),
    lambda s: noise(TOKENS, s.width),
    lambda s: noise(BATCH, s.width, s.side // s.patch, s.side // s.patch),
    lambda s: [noise(BATCH, s.width, 8, 8)] * 3,
    lambda s: noise(BATCH, s.width),
)
_IMAGES = (
    lambda s: noise(BATCH, s.channels, s.side, s.side),
    lambda s: noise(BATCH, s.frames, s.channels, s.side, s.side),
    lambda s: noise(BATCH, (s.side // s.patch) ** 2, s.channels * s.patch**2),
    lambda s: noise(BATCH * 16, s.channels * s.patch**2),
    lambda s: noise(BATCH, 16, s.channels, s.patch, s.patch),
)
# a pattern of an argument's name -> values to try; the first pattern that fits
_MAKERS: dict[str, tuple[Maker, ...]] = {
    r".*grid_thw": (lambda s: torch.tensor([[1, 4, 4]] * BATCH),),
    r"merge_sizes": (lambda s: torch.ones(BATCH, dtype=torch.long),),
    r"target_sizes|spatial_(shapes|sizes)": (
        lambda s: torch.tensor([[4, 4]] * BATCH),
        lambda s: torch.tensor([[s.side // s.patch] * 2]),
    ),
    r"bbox|visual_pos|input_boxes": (
        lambda s: torch.zeros(BATCH, TOKENS, 4, dtype=torch.long),
        lambda s: torch.zeros(BATCH, TOKENS, 4),
    ),
    r"aspect_ratio_ids": (lambda s: torch.ones(BATCH, 1, dtype=torch.long),),
    r"aspect_ratio_mask": (lambda s: torch.ones(BATCH, 1, 4, dtype=torch.long),),
    r"pixel_position_ids|.*patches_idx": (
        lambda s: torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(BATCH, -1, -1),
        lambda s: torch.arange(8).view(1, 4, 2).expand(BATCH, -1, -1),
    ),
    r"image_attention_mask": (lambda s: torch.ones(BATCH, TOKENS, 1, dtype=torch.long),),
    r"image_embeds_position_mask": (lambda s: (torch.arange(TOKENS) < 4).expand(BATCH, -1),),
    r"freq|time_?step|time_step|num_patches|num_options|.*_index": (
        lambda s: torch.zeros(BATCH, dtype=torch.long),
        lambda s: torch.ones(BATCH),
        lambda s: s.frames,
    ),
    r".*(lens|lengths)": (lambda s: torch.full((BATCH,), 64), lambda s: torch.full((BATCH,), TOKENS)),
    r"prompt_masks": _IMAGES[:1],
    r".*mask.*|past_values_padding": _ONES,
    r"context_input_ids": _TOKEN_IDS,
    r"input_ids": (
        *_TOKEN_IDS[1:],
        lambda s: _with_images(text(), s.image_token, 4),
        lambda s: _with_images(text(), s.image_token, (s.side // s.patch) ** 2),
    ),
    r".*(_ids|input_ids|code|_code|marks|task_inputs)|inputs": (*_TOKEN_IDS, *_STATES[:1]),
    r"(prompt_)?pixel_values(_images|_videos)?|image|images|query_pixel_values": _IMAGES,
    r".*feats|.*features?|.*embeds?|.*embeddings?|.*hidden_states?|.*_vector|.*_queries|.*encoding": _STATES,
    r"context|conditioning|state|noise|action_.*|.*mel|.*spectrogram|flattened_patches|input_values": _STATES,
    r"past_values|doc_scores": _STATES,
}


def makers(name: str) -> tuple[Maker, ...]:
    """Values to try for an argument of this name; none where nothing is known of it."""
    return next((made for pattern, made in _MAKERS.items() if re.fullmatch(pattern, name)), ())


def _numbers(config: Any, pattern: str) -> Iterator[int]:
    """The numbers in the fields of a configuration, and of its parts, whose names a pattern fits."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _numbers(value, pattern)
        for number in value if isinstance(value, list | tuple) else [value]:
            if re.search(pattern, str(name)) and isinstance(number, int) and not isinstance(number, bool):
                yield number


def _sizes(model: PreTrainedModel) -> list[Sizes]:
    config = model.config.to_dict()

    def some(pattern: str, *others: int, most: int = _LARGEST, first: int = 3) -> list[int]:
        return list(dict.fromkeys(n for n in (*_numbers(config, pattern), *others) if 0 < n <= most))[:first]

    widths = some(r"^(hidden_size|d_model|embed_dim|input_dim)$|size|dim|channels|bins|width|features|n_mels", first=10)
    sides = some(r"image_size|img_size|input_size|resolution|tile_size|crop_size", 32, 64, most=1024)
    return [
        Sizes(*sizes)
        for sizes in itertools.product(
            widths or [64],
            sides,
            some(r"frames|tubelet", 2, most=16, first=2),
            some(r"^(num|in|input)_channels$|in_chans", 3, most=16, first=1),
            some(r"patch_size", 14, most=64, first=1),
            some(r"^(image|img)_token_(id|index)$", 100, first=1),
        )
    ]


def search(model: PreTrainedModel, call: Callable[[Inputs], Any]) -> tuple[Inputs, Any] | None:
    """Arguments that ``call`` runs with, and what it returns; None where none is found.

    First those that forward requires and the model's main input; then, one more each time, those that the errors name,
    and else the next that forward has.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    known = [p.name for p in parameters if makers(p.name)]
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if not set(required) <= set(known):
        return None
    main = model.main_input_name
    wanted = list(dict.fromkeys([*required, *(n for n in ([main] if isinstance(main, str) else main) if n in known)]))
    sizes = _sizes(model)
    left = TRIES if sum(p.numel() for p in model.parameters()) < LARGE else TRIES_OF_LARGE
    begun = time.process_time()
    while left:
        wanted = wanted or known[:1]
        errors: set[str] = set()
        # half of what is left: another argument may be what is missing
        for given in itertools.islice(_tries(wanted, sizes), max(left // 2, 1)):
            if time.process_time() - begun > SECONDS:
                return None
            left -= 1
            try:
                return given, call(given)
            except Exception as e:
                errors.add(str(e))
        more = [name for name in known if name not in wanted]
        named = [name for name in more if any(re.search(rf"\b{name}\b", error) for error in errors)]
        if not more:
            return None
        wanted = [*wanted, (named or more)[0]]
    return None


def _tries(wanted: list[str], sizes: list[Sizes]) -> Iterator[Inputs]:
    """Values of these arguments: every size with every choice of makers, a choice of the first makers first."""
    choices = sorted(
        itertools.islice(itertools.product(*(range(len(makers(name))) for name in wanted)), 4 * TRIES), key=sum
    )
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for choice, of in itertools.product(choices, sizes):
        given = {name: makers(name)[i](of) for name, i in zip(wanted, choice, strict=True)}
        shapes = str([getattr(value, "shape", value) for value in given.values()])
        if (shapes, choice) not in seen:
            seen.add((shapes, choice))
            yield given
