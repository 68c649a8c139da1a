"""A target and a block-diffusion draft with random weights, each with a paged cache, and their decoding loop.

The draft is DFlash's (arXiv 2602.06036) made small: its queries are one block, the last token and masks,
that attend to each other in both directions and to a context, which are no tokens but the target's states, projected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import attnreg
from attnreg import AttentionRequest, BatchMetadata, Platform, Registry
from attnreg.runtime.interface import KVCache, Layout
from attnreg.runtime.layer import Attention

VOCABULARY, MASK, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE = 12, 12, 64, 4, 2, 32
BLOCK_SIZE, POSITIONS = 16, 128


def select(registry: Registry, platform: Platform, kv_dtype: str, *, draft: bool) -> attnreg.Selection:
    """The selection for the layers of the target, or of its draft."""
    request = AttentionRequest(
        head_size=HEAD_SIZE, num_heads=HEADS, num_kv_heads=KV_HEADS, dtype="float32", kv_dtype=kv_dtype,
        block_size=BLOCK_SIZE, role="draft" if draft else "target", features=["non_causal"] if draft else [],
    )  # fmt: skip
    # not to_run: what an AMD GPU selects runs on other devices too, for the kernels are the same
    return attnreg.select(request, platform, registry)


class Layer(nn.Module):
    """Attention over a cache, and an MLP."""

    def __init__(self, selection: attnreg.Selection, layout: Layout, device: str) -> None:
        super().__init__()
        quantised = (selection.request.kv_dtype or "").startswith("fp8")
        scale = torch.tensor([0.02], device=device) if quantised else None
        self.attention = Attention.from_selection(selection, kv_layout=layout, k_scale=scale, v_scale=scale)
        self.cache: KVCache = self.attention.new_kv_cache(POSITIONS // BLOCK_SIZE + 1, device)
        for tensor in self.cache:
            # NaN in every slot: reading one that was not written would show
            code = 0x80 if self.attention.spec.fnuz else 0x7F
            tensor.view(torch.uint8).fill_(code) if quantised else tensor.fill_(torch.nan)
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_SIZE)
        self.kv = nn.Linear(HIDDEN, 2 * KV_HEADS * HEAD_SIZE)
        self.out = nn.Linear(HEADS * HEAD_SIZE, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))

    def store(self, states: Tensor, batch: BatchMetadata) -> None:
        key, value = self.kv(states).chunk(2, dim=-1)
        self.attention.write_kv(key.contiguous(), value.contiguous(), self.cache, batch)

    def forward(self, x: Tensor, batch: BatchMetadata) -> Tensor:
        normed = nn.functional.rms_norm(x, (HIDDEN,))
        self.store(normed, batch)
        output = torch.full_like(normed[:, :1].expand(-1, HEADS * HEAD_SIZE), torch.nan).contiguous()
        self.attention.attend(self.q(normed), self.cache, batch, output)
        x = x + self.out(output)
        return x + self.mlp(nn.functional.rms_norm(x, (HIDDEN,)))


class Model(nn.Module):
    """Embeddings, positions, layers and a head."""

    def __init__(self, layers: int, selection: attnreg.Selection, layout: Layout, device: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY + 1, HIDDEN)
        self.position = nn.Embedding(POSITIONS, HIDDEN)
        self.layers = nn.ModuleList(Layer(selection, layout, device) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        # large scores, so that attention prefers some tokens to their mean
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.25)
        self.to(device)

    def states(self, tokens: Tensor, batch: BatchMetadata) -> Tensor:
        last = int(batch.seq_lens_cpu[0])
        x = self.embedding(tokens) + self.position.weight[last - len(tokens) : last]
        for layer in self.layers:
            x = layer(x, batch)
        return x


@dataclass
class Loop:
    """Greedy decoding of one request, with or without a draft."""

    target: Model
    draft: Model
    block: int
    device: str

    def batch(self, context: int, queries: int, *, causal: bool) -> BatchMetadata:
        """The batch of the next queries after a context; the blocks are in reverse order."""
        table = torch.arange(POSITIONS // BLOCK_SIZE, 0, -1, dtype=torch.int32)
        at = torch.arange(context, context + queries)
        slots = table[at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
        return BatchMetadata.build(
            [queries], [context + queries], block_table=table[None].to(self.device),
            slot_mapping=slots.to(self.device), causal=causal, device=self.device,
        )  # fmt: skip

    def run_target(self, tokens: list[int], context: int) -> tuple[list[int], Tensor]:
        """The target's choice after each token, and its states."""
        states = self.target.states(self.tensor(tokens), self.batch(context, len(tokens), causal=True))
        return self.target.head(states).argmax(-1).tolist(), states

    @torch.inference_mode()
    def plain(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        choices, _ = self.run_target(tokens, 0)
        tokens.append(choices[-1])
        while len(tokens) < len(prompt) + count:
            choices, _ = self.run_target(tokens[-1:], len(tokens) - 1)
            tokens.append(choices[0])
        return tokens

    @torch.inference_mode()
    def drafted(self, prompt: list[int], count: int) -> tuple[list[int], list[int]]:
        tokens, accepted = list(prompt), []
        choices, states = self.run_target(tokens, 0)
        tokens.append(choices[-1])
        self.remember(states, 0)
        while len(tokens) < len(prompt) + count:
            context = len(tokens) - 1
            proposed = self.propose(tokens[-1], context)
            choices, states = self.run_target([tokens[-1], *proposed], context)
            kept = next((i for i, (d, t) in enumerate(zip(proposed, choices, strict=False)) if d != t), len(proposed))
            # the target's own choice follows the last accepted token
            tokens += choices[: kept + 1]
            self.remember(states[: kept + 1], context)
            accepted.append(kept)
        return tokens[: len(prompt) + count], accepted

    def propose(self, last: int, context: int) -> list[int]:
        """The draft's proposal: one forward over a block of the last token and masks."""
        block = self.tensor([last] + [MASK] * (self.block - 1))
        states = self.draft.states(block, self.batch(context, self.block, causal=False))
        return self.target.head(states).argmax(-1)[1:].tolist()

    def remember(self, states: Tensor, context: int) -> None:
        """Write the draft's context, the target's states of accepted tokens, over what the last block left."""
        batch = self.batch(context, len(states), causal=False)
        for layer in self.draft.layers:
            layer.store(nn.functional.rms_norm(states, (HIDDEN,)), batch)

    def tensor(self, tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, device=self.device)
