"""Gemma 4: images see themselves in both directions in sliding layers alone, and no further back than the window."""

from __future__ import annotations

from typing import Any

import pytest

from attnreg import Registry
from attnreg.models.reader import requests_from_model
from attnreg.platforms import Platform
from attnreg.selection.selector import evaluate


def layers(bidirectional: str | None) -> list[frozenset[str]]:
    text: dict[str, Any] = {
        "model_type": "gemma4_text", "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 128, "sliding_window": 512, "use_bidirectional_attention": bidirectional,
    }  # fmt: skip
    config = {"model_type": "gemma4", "dtype": "bfloat16", "text_config": text}
    return [layer.request.features for layer in requests_from_model(config).layers if layer.request]


@pytest.mark.parametrize(
    ("bidirectional", "sliding"),
    [
        (None, {"sliding_window"}),
        ("vision", {"sliding_window", "mm_prefix", "mm_prefix_in_window"}),
    ],
)
def test_images_see_themselves_within_the_window(bidirectional: str | None, sliding: set[str]) -> None:
    assert layers(bidirectional) == [sliding] * 5 + [set()]


def test_a_backend_that_does_not_end_ranges_at_the_window_is_refused(default: Registry) -> None:
    text = {"model_type": "gemma4_text", "num_hidden_layers": 6, "use_bidirectional_attention": "vision"}
    config = {"model_type": "gemma4", "dtype": "bfloat16", "text_config": text}
    request = requests_from_model(config).layers[0].request
    assert request is not None
    selection = evaluate(request, Platform(platform="cuda", arch="sm90"), default, "FLEX_ATTENTION")
    assert [reason.text for reason in selection.candidates[0].reasons] == ["mm_prefix_in_window is not supported"]
    assert evaluate(request, Platform(platform="cuda", arch="sm90"), default, "TRITON_ATTN").backend is not None
