"""The layers of MLA that run modules' latents, by the backends selected for their two phases."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attnreg.integrations.transformers.batches import Packed
from attnreg.integrations.transformers.calls import Asked, TransformersCall
from attnreg.integrations.transformers.latent.blocks import BLOCK_SIZE, blocks_of
from attnreg.integrations.transformers.latent.lazy import METHOD, Expand, Latents, LazyKeys, Sizes, expanded
from attnreg.integrations.transformers.latent.modules import PROJECTION, Modules
from attnreg.request import AttentionRequest
from attnreg.runtime.interface import UnclaimedError
from attnreg.runtime.mla.layer import MLAAttention
from attnreg.selection.trace import Selection

if TYPE_CHECKING:
    from attnreg.integrations.transformers.sites import Run


_READ = "an operation reads its expanded keys or values before attention"


class Engine(Protocol):
    """What selects backends for the layers, and keeps the record of their calls."""

    name: str

    def evaluate(self, request: AttentionRequest, device: torch.device) -> Selection: ...
    def tell(self, selection: Selection) -> None: ...
    def tell_expanded(self, kind: str, why: str) -> None: ...
    def record(self, module: nn.Module, asked: Asked, selection: Selection) -> Run: ...


class Layer(NamedTuple):
    """The layer that runs a module's calls, and what it asks for in each phase; expand None: no backend has prompts."""

    attention: MLAAttention
    latent: tuple[Asked, Selection]
    expand: tuple[Asked, Selection] | None


class LatentLayers:
    """The layers of an engine's modules, each as long as its module lives and for as long as nothing changes in it.

    wanted: whether modules attend to latents. None: where that is exact; True: always, or they are refused; False:
    never.
    """

    def __init__(self, engine: Engine, wanted: bool | None) -> None:
        self._engine, self._wanted = engine, wanted
        self._modules = Modules()
        # of each module the weight that its layers read, and these
        self._layers: WeakKeyDictionary[nn.Module, tuple[Tensor, dict[Any, Layer | str]]] = WeakKeyDictionary()
        self._reasons: WeakKeyDictionary[nn.Module, dict[str, None]] = WeakKeyDictionary()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def keys_of(self, module: nn.Module, latent: Tensor, rope: Tensor, expand: Expand) -> tuple[Tensor, Tensor]:
        """The keys and values of a module's latents: lazy where attnreg may attend to the latents, else expanded."""
        if self._wanted is not False:
            sizes = self._modules.sizes_of(module, latent, rope, expand)
            if not isinstance(sizes, str):
                return Latents(module, latent, rope, expand, sizes).lazy()
            self._keep(module, sizes)
        return expand(module, latent, rope)

    def attend(self, call: TransformersCall, latents: Latents | None) -> Tensor | None:
        """The output [batch, queries, heads, size] of a call; None after the call's keys have been expanded."""
        if latents is None:
            # a module whose keys attnreg was asked to expand has its reason
            if PROJECTION in call.module._modules and call.module not in self._reasons:
                self._keep(call.module, f"they come expanded: its cache holds every head's, or no {METHOD} made them")
            return None
        # the call of a prompt without a mask has read the first keys of a static cache
        found = _READ if latents.read else self._attend(call, latents)
        if isinstance(found, Tensor):
            return found
        self._keep(call.module, found)
        call.key, call.value = expanded(call.key), expanded(call.value)
        return None

    def expanded(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, expanded where they are lazy and an operation has read one of them."""
        if isinstance(key, LazyKeys) or isinstance(value, LazyKeys):
            self._keep(module, _READ)
        return expanded(key), expanded(value)

    def reasons_in(self, model: nn.Module) -> dict[str, list[nn.Module]]:
        """The modules of a model whose keys were expanded from their latents, by the reason."""
        reasons: dict[str, list[nn.Module]] = {}
        for module in model.modules():
            for why in self._reasons.get(module, ()):
                reasons.setdefault(why, []).append(module)
        return reasons

    def _keep(self, module: nn.Module, why: str) -> None:
        """Keeps why keys of a module were expanded, and logs it once for each class. Raises `UnclaimedError`."""
        if self._wanted is False:
            return
        kind = type(module).__name__
        if self._wanted:
            raise UnclaimedError(
                f"{kind}: its keys would be expanded from their latents, because {why}; without latent=True attnreg "
                "runs it so",
                self._engine.name,
            )
        reasons = self._reasons.setdefault(module, {})
        if why not in reasons:
            reasons[why] = None
            self._engine.tell_expanded(kind, why)

    def _attend(self, call: TransformersCall, latents: Latents) -> Tensor | str:
        """The output of a call; or the reason why its keys have to be expanded."""
        chosen = call.chosen
        packed = call.batch if chosen is None else replace(call, chosen=None).batch
        if not isinstance(packed, Packed):
            return packed
        if chosen is not None and packed.rest is not None:
            return "an indexer chose keys for queries of padding"
        if packed.crossed or not packed.band.causal or packed.mm_prefix is not None:
            return "its mask is not causal"
        if packed.band.window is not None or call.softcap is not None or call.sinks is not None:
            return "it has a window, a softcap or sinks, and no backend of MLA has these"
        if call.query_sinks is not None or call.bias is not None:
            return "its queries have sinks of their own or a bias"
        layer = self._layer(call, latents.sizes, all_new=blocks_of(packed).all_new)
        if isinstance(layer, str):
            return layer
        return self._run(layer, call, packed, latents)

    def _layer(self, call: TransformersCall, sizes: Sizes, *, all_new: bool) -> Layer | str:
        weight: Tensor = getattr(call.module, PROJECTION).weight
        known = self._layers.get(call.module)
        if known is None or known[0] is not weight:
            known = self._layers[call.module] = weight, {}
        topk = None if call.chosen is None else _topk(call.module, call.chosen)
        facts = sizes, call.query.dtype, call.query.device, call.scale, topk, topk is None and all_new
        layer = known[1].get(facts)
        if layer is None:
            layer = known[1][facts] = self._made(call, sizes, topk, weight, 1 if all_new else most_decoded(sizes))
        return layer

    def _made(
        self, call: TransformersCall, sizes: Sizes, topk: int | None, weight: Tensor, decode_queries: int
    ) -> Layer | str:
        scale = (sizes.nope + sizes.rope) ** -0.5 if call.scale is None else call.scale
        config = getattr(call.module, "config", None)
        request = AttentionRequest(
            attention="mla" if topk is None else "mla_sparse",
            phase="decode",
            head_size=sizes.rank + sizes.rope,
            head_size_v=sizes.rank,
            num_heads=sizes.heads,
            num_kv_heads=1,
            dtype=str(call.query.dtype).removeprefix("torch."),
            block_size=BLOCK_SIZE,
            kv_lora_rank=sizes.rank,
            qk_nope_head_dim=sizes.nope,
            qk_rope_head_dim=sizes.rope,
            v_head_dim=sizes.value,
            index_topk=topk,
            model=getattr(config, "model_type", None) or None,
        )
        # context is merged with a prompt's own tokens by their lse
        prompts = replace(request.expanded(), features=frozenset({"lse"}))
        latent, expand = (self._engine.evaluate(asked, call.query.device) for asked in (request, prompts))
        # a prompt that is expanded attends to keys that no indexer chose
        if latent.backend is None:
            return f"no backend of MLA serves it in its latent form ({request.dtype}, {sizes.heads} heads)"
        has_prompts = topk is None and expand.backend is not None
        attention = MLAAttention(
            latent,
            expand if has_prompts else None,
            kv_b_proj=weight,
            softmax_scale=scale,
            decode_queries=decode_queries,
        )
        for selection in (latent, expand)[: 1 + has_prompts]:
            self._engine.tell(selection)
        return Layer(
            attention,
            (Asked(request, scale, None, None), latent),
            (Asked(prompts, scale, None, None), expand) if has_prompts else None,
        )

    def _run(self, layer: Layer, call: TransformersCall, packed: Packed, latents: Latents) -> Tensor:
        attention, blocks = layer.attention, blocks_of(packed)
        size, heads, queries, _ = call.query.shape
        query = call.query.transpose(1, 2).flatten(0, 1)
        new = slice(packed.key_stop - queries, packed.key_stop)
        latent, rope = (x[:, 0, new].flatten(0, 1) for x in (latents.latent, latents.rope))
        output = query.new_empty(len(query), heads, attention.spec.v_head_dim)
        # the latents of new tokens are among those that it holds
        cache, rows = blocks.filled(latents), packed.queries
        indices = None if call.chosen is None else blocks.positions(call.chosen)
        if rows is None:
            attention(query, latent, rope, cache, blocks.batch, output, indices=indices, stored=True)
        else:
            q, c, r = (x[rows] for x in (query, latent, rope))
            chosen = None if indices is None else indices[rows]
            output.zero_()[rows] = attention(q, c, r, cache, blocks.batch, indices=chosen, stored=True)
        output = output.view(size, queries, heads, -1)
        if packed.rest is not None:
            packed.rest.attend(attention.decode, call.query, *latents.expanded, output)
        self._record(layer, call.module, packed)
        return output

    def _record(self, layer: Layer, module: nn.Module, packed: Packed) -> None:
        """Counts a call for each phase that some request of it was in."""
        least = min((n for n in packed.query_lens if n), default=0)
        most = max(packed.query_lens, default=0)
        bound = layer.attention.decode_queries
        if layer.expand is None or least <= bound:
            self._engine.record(module, *layer.latent)
        if layer.expand is not None and most > bound:
            self._engine.record(module, *layer.expand)


def _topk(module: nn.Module, chosen: Tensor) -> int:
    """The keys that an indexer chooses where there are as many, by the module's config, or as it chose now."""
    topk = getattr(getattr(module, "config", None), "index_topk", None)
    return topk if type(topk) is int and topk > 0 else chosen.shape[2]


def most_decoded(sizes: Sizes) -> int:
    """The most queries of a request with a long context that the latent form computes with fewer multiplications.

    The expanded form multiplies rank * (nope + value) numbers for each key, whatever the queries; the latent form
    multiplies more for each pair of a query and a key.
    """
    more = 2 * sizes.rank - sizes.nope - sizes.value
    expansion = sizes.rank * (sizes.nope + sizes.value)
    return expansion if more <= 0 else max(1, expansion // more)
