"""Choose the attention backend of each layer of a diffusion model, by tables of one's own.

    python examples/diffusion/choose.py cuda sm120

The folder `registry` has a vocabulary for this domain: layers attend to themselves or to text, and ranks share a
sequence. Nothing in it comes from attnreg's own tables. The facts are those of vLLM-Omni's backends.
"""

from __future__ import annotations

import sys
from pathlib import Path

import attnreg

HERE = Path(__file__).parent
# layers of a video model: what it attends to, elements per head, what it needs, and how ranks share its sequence
LAYERS = {
    "blocks.*.self_attn": ("self", 128, (), "none"),
    "blocks.*.self_attn, padded": ("self", 128, ("mask",), "none"),
    "blocks.*.self_attn, 4 ranks": ("self", 128, (), "ring"),
    "blocks.*.cross_attn": ("cross", 128, ("mask",), "none"),
}


def choose(platform: attnreg.Platform) -> dict[str, attnreg.Selection]:
    """The selection of each layer; its candidates have the reasons against the other backends."""
    registry = attnreg.load_registry(HERE / "registry")
    return {
        name: attnreg.select(
            attnreg.AttentionRequest(head_size=head_size, role=role, features=features, extra={"parallel": parallel}),
            platform,
            registry=registry,
        )
        for name, (role, head_size, features, parallel) in LAYERS.items()
    }


if __name__ == "__main__":
    for layer, selection in choose(attnreg.Platform(platform=sys.argv[1], arch=sys.argv[2])).items():
        print(f"{layer}: {selection.backend.name}")
        for candidate in selection.candidates:
            for reason in candidate.reasons:
                print(f"    not {candidate.title}: {reason.text} ({reason.where})")
