"""Base configs that the tests of models change."""

from __future__ import annotations

from support import ROOT

EXAMPLES = ROOT / "examples" / "configs"

LLAMA = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
UNKNOWN = {"model_type": "newest", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
