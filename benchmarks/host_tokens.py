"""The host's cost of a decoded token's attention in transformers, by its own code and by attnreg's: for host.py.

A token is its masks, as transformers' own function makes them, and the call of each layer with the keys of a cache, as
its model classes make it; of latents, the call of the method that expands them too. What a model computes beside is
left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import LlamaAttention

from attnreg.integrations.transformers.forms.releases import CACHE

LAYERS, HEADS, KV_HEADS, SIZE = 8, 32, 8, 128
WINDOW = 1024
# of DeepSeek-V3: heads, and the sizes of a latent, of its rotary part and of a query
LATENT_HEADS, RANK, ROPE, LATENT_SIZE = 128, 512, 64, 192


class Case(NamedTuple):
    """Requests and their keys.

    static: the cache is longer; sliding: every second layer has a window; mask: of ones; latent: MLA over latents.
    """

    name: str
    requests: int
    keys: int
    static: bool = False
    sliding: bool = False
    mask: bool = False
    latent: bool = False


CASES = (
    Case("b1", 1, 4096),
    Case("b1, mask of ones", 1, 4096, mask=True),
    Case("b8", 8, 1024),
    Case("b8, mask of ones", 8, 1024, mask=True),
    Case("b1, static cache", 1, 4096, static=True),
    Case("b1, sliding layers", 1, 4096, sliding=True),
    Case("b1, latents", 1, 4096, mask=True, latent=True),
    Case("b4, latents", 4, 2048, mask=True, latent=True),
)


class Held:
    """What transformers' mask functions ask a cache: of so many tokens, before the new one is stored."""

    is_compileable = False

    def __init__(self, case: Case, keys: int, device: str) -> None:
        self.case, self.keys = case, keys
        self.is_sliding = [False, case.sliding] * (LAYERS // 2)
        self.offset: Any = torch.full((1,), keys, device=device) if case.static else keys

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.offset

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        if self.case.static:
            return 2 * self.case.keys, 0
        if self.is_sliding[layer_idx]:
            return WINDOW, self.keys - WINDOW + 1
        return self.keys + 1, 0


class Token(NamedTuple):
    """The inputs of a token: cache, transformers' mask, and the keys and values of layers without and with a window."""

    held: Held
    mask: Tensor | None
    position: Tensor
    keys: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


class Tokens:
    """Decoded tokens of a model by one implementation; each has lengths of its own."""

    def __init__(self, case: Case, implementation: str, device: str) -> None:
        self.case, self.device = case, device
        self.attend: Any = ALL_ATTENTION_FUNCTIONS[implementation]
        if case.latent:
            self._of_latents(implementation)
        else:
            self.config: Any = LlamaConfig(
                hidden_size=HEADS * SIZE, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                num_key_value_heads=KV_HEADS,
            )  # fmt: skip
            self.config.sliding_window = WINDOW if case.sliding else None
            self.config._attn_implementation = implementation
            with torch.device("meta"):
                self.modules: list[Any] = [LlamaAttention(self.config, i).eval() for i in range(LAYERS)]
        heads, size = (LATENT_HEADS, LATENT_SIZE) if case.latent else (HEADS, SIZE)
        self.query = torch.randn(case.requests, 1, heads, size, device=device, dtype=torch.bfloat16).transpose(1, 2)
        self.hidden = torch.empty(case.requests, 1, HEADS * SIZE, device=device, dtype=torch.bfloat16)
        self._more = itertools.cycle(range(512))
        self._waiting: list[Token] = []

    def _of_latents(self, implementation: str) -> None:
        """The layers of DeepSeek-V3, which a model of the class has attnreg stand in for."""
        self.config = DeepseekV3Config(num_hidden_layers=LAYERS)
        self.config._attn_implementation = implementation
        small = DeepseekV3Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=0)
        small._attn_implementation = implementation
        with torch.device("meta"):
            DeepseekV3ForCausalLM(small)
            made = [DeepseekV3Attention(self.config, i).eval() for i in range(LAYERS)]
        for module in made:
            weight = torch.randn(module.kv_b_proj.weight.shape, device=self.device, dtype=torch.bfloat16)
            module.kv_b_proj.weight = torch.nn.Parameter(weight)
        self.modules = made

    @contextmanager
    def prepared(self, tokens: int) -> Iterator[None]:
        """A block in which so many tokens have their inputs ready."""
        self._waiting = [self._token() for _ in range(tokens)]
        with torch.no_grad():
            yield

    def _token(self) -> Token:
        case, device = self.case, self.device
        held = Held(case, case.keys + next(self._more), device)
        told = torch.ones(case.requests, held.keys + 1, device=device, dtype=torch.long) if case.mask else None
        position = torch.full((1, 1), held.keys, device=device)

        def stored(keys: int) -> tuple[Tensor, Tensor]:
            if case.latent:
                latent, rope = (
                    torch.zeros(case.requests, 1, keys, size, device=device, dtype=torch.bfloat16)
                    for size in (RANK, ROPE)
                )
                return latent, rope
            shape = 2, case.requests, KV_HEADS, keys, SIZE
            key, value = torch.zeros(shape, device=device, dtype=torch.bfloat16).unbind()
            return key, value

        whole, _ = held.get_mask_sizes(1, 0)
        return Token(held, told, position, (stored(whole), stored(WINDOW)))

    def token(self) -> None:
        """The masks of a token, and the attention of every layer."""
        held, told, position, keys = self._waiting.pop()
        given = {
            "config": self.config, "inputs_embeds": self.hidden, "attention_mask": told, CACHE: held,
            "position_ids": position,
        }  # fmt: skip
        masks = [create_causal_mask(**given), None]
        more: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        if self.case.sliding:
            masks[1] = create_sliding_window_causal_mask(**given)
            more = {"sliding_window": None}, {"sliding_window": WINDOW}
        for i, module in enumerate(self.modules):
            kind = i % 2 if self.case.sliding else 0
            own = module.expand_kv(*keys[kind]) if self.case.latent else keys[kind]
            self.attend(
                module, self.query, *own, masks[kind], dropout=0.0, scaling=module.scaling, **more[kind],
                position_ids=position, use_cache=True,
            )  # fmt: skip
