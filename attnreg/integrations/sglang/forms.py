"""The forms in which SGLang's models ask for attention, and the rows of attnreg's own registry for each."""

from __future__ import annotations

import enum
import logging
from typing import Any, NamedTuple

from attnreg.integrations.kernels import OwnKernels
from attnreg.integrations.sglang.registries import NAME


class LayerForm(enum.Enum):
    """What a call of a layer has: its own heads over the cache, or one of the two forms of MLA.

    LATENT: absorbed queries over the cache of latents. EXPANDED: prompts without context, with keys and values of every
    head, which no cache holds.
    """

    HEADS = "heads"
    LATENT = "latent"
    EXPANDED = "expanded"


class LatentSizes(NamedTuple):
    """The elements of a cached latent and of the rotary part behind it (kv_lora_rank, qk_rope_head_dim)."""

    rank: int
    rope: int

    def form_of(self, layer: Any) -> LayerForm:
        """The form of a layer of a model with MLA, by its sizes. Raises ValueError if these tell none, or both."""
        heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        latent = (kv_heads, layer.qk_head_dim, layer.v_head_dim) == (1, self.rank + self.rope, self.rank)
        expanded = kv_heads == heads and (layer.qk_head_dim, layer.v_head_dim) != (self.rank + self.rope, self.rank)
        if latent == expanded:
            sizes = f"{heads} heads over {kv_heads} of {layer.qk_head_dim}/{layer.v_head_dim}"
            raise ValueError(f"the layer has {sizes}; the pool holds latents of {self.rank} + {self.rope}")
        return LayerForm.LATENT if latent else LayerForm.EXPANDED


_ROWS = {
    LayerForm.HEADS: {"cuda": ("HOPPER_ATTN", "TRITON_ATTN"), "rocm": ("TRITON_ATTN",), "cpu": ("CPU_ATTN",)},
    LayerForm.LATENT: {"cuda": ("HOPPER_MLA", "TRITON_MLA"), "rocm": ("TRITON_MLA",), "cpu": ("TORCH_MLA",)},
    LayerForm.EXPANDED: {
        "cuda": ("HOPPER_PREFILL", "TRITON_PREFILL"),
        "rocm": ("TRITON_PREFILL",),
        "cpu": ("TORCH_PREFILL",),
    },
}
_log, _told = logging.getLogger("sglang.attnreg"), set[str]()
KERNELS = {form: OwnKernels(NAME, rows, _log, _told) for form, rows in _ROWS.items()}
