"""A call of transformers' attention function as a request and, where that is possible, a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from attnreg.integrations.transformers.arguments import CallArguments, causal_of, number, validate_tensors
from attnreg.integrations.transformers.batches import VarlenBatch, mask_batch, plain_batch
from attnreg.integrations.transformers.masks import BooleanMask, LazyMask
from attnreg.models.fields import ConfigError
from attnreg.models.reader import requests_from_model
from attnreg.request import AttentionRequest, features_of
from attnreg.runtime.interface import UnclaimedError
from attnreg.runtime.masks import Band

if TYPE_CHECKING:
    from attnreg.models.facts import LayerFacts


@dataclass(frozen=True, slots=True)
class LayerRequest:
    """The layer that a call asks for: its request, and the numbers that a request only names."""

    request: AttentionRequest
    scale: float
    window: int | None
    softcap: float | None


class TransformersCall:
    """One validated call: its arguments, with numbers for scale, window and softcap; and the keys that it reads.

    Raises `UnclaimedError` for shapes that do not fit each other, and for packed sequences that the mask mixes up.
    """

    def __init__(self, given: CallArguments) -> None:
        self.module, self.query, self.key, self.value, self.mask = given[:5]
        self.sinks, self.bias, self.chosen, self.query_sinks = given.sinks, given.bias, given.chosen, given.query_sinks
        self.queries = self.query.shape[2]
        causal = given.causal
        self.causal = causal_of(self.module, self.mask, self.queries) if causal is None else causal
        self.scale: float | None = number("scaling", given.scale)
        self.window: int | None = number("sliding_window", given.window, whole=True)
        self.softcap: float | None = number("softcap", given.softcap)
        if self.mask is None and self.causal and 1 < self.queries < self.key.shape[2]:
            # transformers counts causality from the first key; a static cache has more keys than tokens
            self.key, self.value = self.key[:, :, : self.queries], self.value[:, :, : self.queries]
        self._validate()
        if given.boundaries is not None:
            self._refuse_sequences(given.boundaries)

    def _validate(self) -> None:
        if not self.query.is_floating_point():
            name = type(self.module).__name__
            raise UnclaimedError(f"query of {name} is {self.query.dtype}; expected a floating dtype", "attnreg")
        batch, heads, queries = max(len(self.query), len(self.key)), *self.query.shape[1:3]
        validate_tensors(
            self.module,
            {"batch": batch, "heads": heads, "queries": queries, "keys": self.key.shape[2]},
            {
                "attention_mask": self.mask,
                "position_bias": self.bias,
                "s_aux": self.sinks,
                "sinks": self.query_sinks,
                "indices": self.chosen,
            },
        )

    @cached_property
    def batch(self) -> VarlenBatch | str:
        """The call as a batch; or the reason why no batch can express it."""
        if self.bias is not None:
            return "a bias is added to its scores"
        if self.chosen is not None:
            return "an indexer chose its keys"
        return "each of its queries has its own sink" if self.query_sinks is not None else self.masked

    @cached_property
    def masked(self) -> VarlenBatch | str:
        """The batch of the call's mask alone; or the reason why no batch can express it."""
        size, keys = self.query.shape[0], self.key.shape[2]
        if self.key.shape[0] != size:
            return "its queries and keys are of different batches"
        crossed = is_crossed(self.module)
        if self.mask is None or self._hides_nothing():
            # a mask that is a tensor is whole: it contains causality and a window
            whole, window = self.mask is not None, None if self.mask is not None else self.window
            # a single query is the last token and sees every key, so the call is causal too
            single = self.queries == 1 and not crossed and getattr(self.module, "is_causal", True)
            causal = single or (self.causal and not whole)
            # a window compares positions, so queries and keys belong to one text
            crossed = not causal and window is None and (crossed or self.queries != keys)
            if self.queries > keys and not crossed:
                return f"its {self.queries} queries are more than the {keys} keys whose positions they have"
            return plain_batch(size, self.queries, keys, Band(causal, window), crossed, self.query.device)
        if not isinstance(self.mask, LazyMask):
            return "its mask is given as a tensor"
        source = self.mask.source.on(self.query.device)
        if (source.batch, source.queries, source.keys) != (size, self.queries, keys):
            return "its mask is for other queries or keys"
        return mask_batch(source, crossed=crossed)

    def _refuse_sequences(self, boundaries: Tensor) -> None:
        """Raises `UnclaimedError` if a query sees another sequence's key. boundaries: [sequences + 1]."""
        if not self._tells_apart(boundaries):
            raise UnclaimedError(
                f"{type(self.module).__name__} passes cu_seq_lens_q of {len(boundaries) - 1} sequences to its "
                f"attention, and the mask has {len(self.query)}; transformers' masks tell packed sequences apart by "
                "position_ids, without a cache",
                "attnreg",
            )

    def _tells_apart(self, boundaries: Tensor) -> bool:
        """Whether no query sees a key of another sequence; True without a look for a mask given as a tensor."""
        size, queries, device = len(self.query), self.queries, self.query.device
        if isinstance(self.masked, VarlenBatch):
            return len(boundaries) - 1 <= size
        if not isinstance(self.mask, LazyMask) or self.mask.shape != (size, 1, queries, queries):
            return True
        source = self.mask.source.on(device)
        # compared once for all layers with this mask and these boundaries, because the host waits for the result
        known, told = source.memo.get("apart", (None, False))
        if known is not boundaries:
            inner, tokens = boundaries[1:-1].to(device), torch.arange(size * queries, device=device)
            sequence = torch.bucketize(tokens, inner, right=True).view(size, queries)
            apart = sequence[:, :, None] != sequence[:, None]
            told = not bool((source.dense()[:, 0] & apart).any())
            source.memo["apart"] = boundaries, told
        return bool(told)

    def _hides_nothing(self) -> bool:
        """Whether the mask is a tensor that shows every key to every query: all true, or all zero if it is added."""
        if self.mask is None or isinstance(self.mask, LazyMask | BooleanMask) or self.mask.requires_grad:
            return False
        return bool((self.mask if self.mask.dtype == torch.bool else self.mask == 0).all())

    def dense_mask(self) -> Tensor | None:
        """The whole mask as a tensor; None where every query sees every key."""
        mask = self._whole_mask()
        if self.chosen is None:
            return mask
        sees = torch.zeros(*self.chosen.shape[:2], self.key.shape[2], dtype=torch.bool, device=self.query.device)
        sees = sees.scatter(-1, self.chosen.long(), True)[:, None]
        if mask is None or mask.dtype == torch.bool:
            return sees if mask is None else mask & sees
        return mask.masked_fill(~sees, torch.finfo(mask.dtype).min)

    def _whole_mask(self) -> Tensor | None:
        if isinstance(self.mask, LazyMask):
            return self.mask.source.on(self.query.device).dense()
        band = Band(self.causal and self.queries > 1, self.window)
        if self.mask is None and band != Band(False, None):
            keys = self.key.shape[2]
            positions = torch.arange(max(self.queries, keys), device=self.query.device)
            return band.sees(positions[-self.queries :, None], positions[:keys])
        return self.mask.whole() if isinstance(self.mask, BooleanMask) else self.mask

    def asked(self, varlen: VarlenBatch | None) -> LayerRequest:
        """The layer that the call asks for. varlen: the call's batch, None if it has none."""
        band = varlen.band if varlen else Band(self.causal, None)
        heads, size = self.query.shape[1], self.query.shape[3]
        crossed = varlen.crossed if varlen else not band.causal and is_crossed(self.module)
        attn_type, role = ("encoder_decoder", "target") if crossed else _kind(self.module, heads, size, band.causal)
        config = getattr(self.module, "config", None)
        request = AttentionRequest(
            head_size=size,
            head_size_v=self.value.shape[3],
            num_heads=heads,
            num_kv_heads=self.key.shape[1],
            dtype=str(self.query.dtype).removeprefix("torch."),
            attn_type=attn_type,
            role=role,
            features=features_of(
                attn_type=attn_type,
                causal=band.causal,
                sliding_window=band.window,
                softcap=self.softcap,
                sinks=self.sinks if self.query_sinks is None else self.query_sinks,
                score_bias=self.bias,
                mm_prefix=varlen.mm_prefix if varlen else None,
            ),
            model=getattr(config, "model_type", None) or None,
        )
        return LayerRequest(request, size**-0.5 if self.scale is None else self.scale, band.window, self.softcap)


def is_crossed(module: torch.nn.Module) -> bool:
    """Whether a layer that is not causal may attend to another text.

    True also if the model has such layers and this layer does not say: queries under an encoder's padding are kept.
    """
    if "cross" in type(module).__name__.lower() or getattr(module, "is_cross_attention", False):
        return True
    config = getattr(module, "config", None)
    paired = getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)
    return bool(paired) and getattr(module, "is_decoder", True)


# id of a config -> a weak reference to the config (another may reuse the id), and the config's layers
_configs: dict[int, tuple[Any, tuple[LayerFacts, ...]]] = {}


def _facts_of(module: torch.nn.Module) -> tuple[LayerFacts, ...]:
    """The layers that a module's config describes; empty if there is no readable config."""
    config = getattr(module, "config", None)
    if config is None:
        return ()
    entry = _configs.get(id(config))
    if entry is None or entry[0]() is not config:
        try:
            layers = requests_from_model(config).layers
        except ConfigError:
            layers = ()
        entry = _configs[id(config)] = ref(config), layers
    return entry[1]


def _kind(module: torch.nn.Module, heads: int, size: int, causal: bool) -> tuple[str, str]:
    """The attn_type and the role of a layer: from the model's config if it is clear, else by causality."""
    kinds = {
        (layer.request.attn_type, layer.request.role)
        for layer in _facts_of(module)
        if layer.request is not None
        and layer.kind != "cross"
        and (layer.num_heads, layer.head_size, bool(layer.causal)) == (heads, size, causal)
    }
    if len(kinds) == 1:
        return kinds.pop()
    return ("decoder" if causal else "encoder_only"), "target"
