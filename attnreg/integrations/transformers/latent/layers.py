"""The layers of MLA that compute attention over modules' latents, with the backends selected for the two phases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attnreg.integrations.transformers.batches import VarlenBatch, varlen_rows
from attnreg.integrations.transformers.calls import LayerRequest, TransformersCall
from attnreg.integrations.transformers.latent.blocks import BLOCK_SIZE, Blocks, blocks_of
from attnreg.integrations.transformers.latent.lazy import (
    METHOD,
    CallLatents,
    Expand,
    LazyKeys,
    Sizes,
    expanded,
    latents_of,
)
from attnreg.integrations.transformers.latent.modules import PROJECTION, Modules
from attnreg.request import AttentionRequest
from attnreg.runtime.interface import UnclaimedError
from attnreg.runtime.mla.layer import MLAAttention
from attnreg.selection.trace import Selection

if TYPE_CHECKING:
    from attnreg.integrations.transformers.arguments import CallArguments
    from attnreg.integrations.transformers.call_cache import CallCache, LayerRun


_MHA_ONLY = "it has a window, a softcap or sinks, and no backend of MLA has these"
_READ = "an operation reads its expanded keys or values before attention"


class LatentEngine(Protocol):
    """The engine that selects backends for the layers, and keeps the record of their calls."""

    name: str
    calls: CallCache

    def evaluate(self, request: AttentionRequest, device: torch.device) -> Selection: ...
    def tell(self, selection: Selection) -> None: ...
    def tell_expanded(self, kind: str, why: str) -> None: ...
    def record(self, module: nn.Module, asked: LayerRequest, selection: Selection) -> LayerRun: ...


@dataclass(slots=True)
class Phase:
    """One phase of a module's calls: the request, the selection, and the record of these calls; None before any."""

    asked: LayerRequest
    selection: Selection
    run: LayerRun | None = None


class PhasedLayer(NamedTuple):
    """The layer that runs a module's calls, and its two phases. expand None: no backend accepts prompts."""

    attention: MLAAttention
    latent: Phase
    expand: Phase | None


class LatentLayers:
    """The layers of an engine's modules; each is kept as long as its module lives and does not change.

    wanted: whether modules attend to latents. None: if that is exact. True: always; other modules are refused. False:
    never.
    """

    def __init__(self, engine: LatentEngine, wanted: bool | None) -> None:
        self._engine, self._wanted = engine, wanted
        self._modules = Modules()
        self._reasons: WeakKeyDictionary[nn.Module, dict[str, None]] = WeakKeyDictionary()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def keys_of(self, module: nn.Module, latent: Tensor, rope: Tensor, expand: Expand) -> tuple[Tensor, Tensor]:
        """The keys and values of a module's latents: lazy if attnreg may attend to the latents, else expanded."""
        if self._wanted is not False:
            sizes = self._modules.sizes_of(module, latent, rope, expand)
            if not isinstance(sizes, str):
                return CallLatents(module, latent, rope, expand, sizes).lazy()
            self._keep(module, sizes)
            self._engine.calls.of(module).forget_weights()
        return expand(module, latent, rope)

    def attend(self, call: TransformersCall, latents: CallLatents | None) -> Tensor | None:
        """The output [batch, queries, heads, size] of a call; None after the call's keys have been expanded."""
        if latents is None:
            # if attnreg was asked to expand a module's keys, the reason is recorded already
            if PROJECTION in call.module._modules and call.module not in self._reasons:
                self._keep(call.module, f"they come expanded: its cache holds every head's, or no {METHOD} made them")
            return None
        # a prompt without a mask has read the first keys of a static cache, and so has expanded them
        found = _READ if latents.read else self._attend(call, latents)
        if isinstance(found, Tensor):
            return found
        self._keep(call.module, found)
        call.key, call.value = expanded(call.key), expanded(call.value)
        return None

    def repeated(self, call: CallArguments) -> Tensor | None:
        """The output of a known call over lazy keys, run on its latents; None for a call to look at in full."""
        latents = latents_of(call.key, call.value)
        assert latents is not None
        # the types are compared, because True equals 1 and is refused
        if not (
            call.window is call.softcap is call.sinks is None and (call.scale is None or type(call.scale) is float)
        ):
            return None
        calls = self._engine.calls.of(call.module)
        varlen = calls.batch(call, latents.latent)
        if varlen is None or _why_not_attended(varlen):
            return None
        facts = _facts(call.query, latents.sizes, call.scale, None, blocks_of(varlen))
        layer = calls.known(facts, getattr(call.module, PROJECTION).weight)
        return (
            self._run(layer, call.module, call.query, None, varlen, latents) if isinstance(layer, PhasedLayer) else None
        )

    def expanded(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values; expanded if they are lazy and an operation has read one of them."""
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
        """Records why keys of a module were expanded, and logs it once for each class. Raises `UnclaimedError`."""
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

    def _attend(self, call: TransformersCall, latents: CallLatents) -> Tensor | str:
        """The output of a call; or the reason why its keys have to be expanded."""
        chosen = call.chosen
        varlen = call.batch if chosen is None else call.masked
        if not isinstance(varlen, VarlenBatch):
            return varlen
        if chosen is not None and varlen.padding_queries is not None:
            return "an indexer chose keys for queries of padding"
        why = _why_not_attended(varlen)
        if why:
            return why
        if call.softcap is not None or call.sinks is not None:
            return _MHA_ONLY
        if call.query_sinks is not None or call.bias is not None:
            return "its queries have sinks of their own or a bias"
        blocks = blocks_of(varlen)
        weight, calls = getattr(call.module, PROJECTION).weight, self._engine.calls.of(call.module)
        topk = None if chosen is None else _topk(call.module, chosen)
        facts = _facts(call.query, latents.sizes, call.scale, topk, blocks)
        layer = calls.known(facts, weight)
        if layer is None:
            most = 1 if blocks.all_new else most_decoded(latents.sizes)
            layer = self._made(call, latents.sizes, topk, weight, most)
            calls.keep(facts, weight, layer)
        if isinstance(layer, str):
            return layer
        return self._run(layer, call.module, call.query, chosen, varlen, latents)

    def _made(
        self, call: TransformersCall, sizes: Sizes, topk: int | None, weight: Tensor, decode_queries: int
    ) -> PhasedLayer | str:
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
        # a prompt's context and its own tokens are merged by their lse
        prompts = replace(request.expanded(), features=frozenset({"lse"}))
        latent, expand = (self._engine.evaluate(asked, call.query.device) for asked in (request, prompts))
        # an expanded prompt attends to all keys, also to those that no indexer chose
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
        return PhasedLayer(
            attention,
            Phase(LayerRequest(request, scale, None, None), latent),
            Phase(LayerRequest(prompts, scale, None, None), expand) if has_prompts else None,
        )

    def _run(
        self,
        layer: PhasedLayer,
        module: nn.Module,
        query: Tensor,
        chosen: Tensor | None,
        varlen: VarlenBatch,
        latents: CallLatents,
    ) -> Tensor:
        attention, blocks = layer.attention, blocks_of(varlen)
        size, heads, queries, _ = query.shape
        rows, tokens = varlen.queries, varlen_rows(query)
        cache = blocks.filled(latents)
        indices = None if chosen is None else blocks.positions(chosen)
        decoded = layer.expand is None or blocks.most <= attention.decode_queries
        if rows is not None:
            tokens = tokens[rows]
            indices = None if indices is None else indices[rows]
        if decoded:
            output = attention.attend(tokens, cache, blocks.batch, indices=indices)
        else:
            new = slice(varlen.key_stop - queries, varlen.key_stop)
            latent, rope = (x[:, 0, new].flatten(0, 1) for x in (latents.latent, latents.rope))
            if rows is not None:
                latent, rope = latent[rows], rope[rows]
            # the cache already holds the latents of new tokens
            output = attention(tokens, latent, rope, cache, blocks.batch, indices=indices, stored=True)
        if rows is not None:
            whole = output.new_zeros(size * queries, *output.shape[1:])
            whole[rows] = output
            output = whole
        output = output.view(size, queries, heads, -1)
        if varlen.padding_queries is not None:
            varlen.padding_queries.attend(attention.decode, query, *latents.expanded, output)
        if decoded or blocks.least <= attention.decode_queries:
            self._count(module, layer.latent)
        if layer.expand is not None and not decoded:
            self._count(module, layer.expand)
        return output

    def _count(self, module: nn.Module, phase: Phase) -> None:
        """Counts a call that has a request in this phase."""
        if phase.run is None:
            phase.run = self._engine.record(module, phase.asked, phase.selection)
        else:
            phase.run.calls += 1


def _why_not_attended(varlen: VarlenBatch) -> str:
    """The reason why no layer of MLA can use a batch's mask; "" if one can."""
    if varlen.crossed or not varlen.band.causal or varlen.mm_prefix is not None:
        return "its mask is not causal"
    return _MHA_ONLY if varlen.band.window is not None else ""


def _facts(query: Tensor, sizes: Sizes, scale: float | None, topk: int | None, blocks: Blocks) -> tuple[Any, ...]:
    """The facts that decide which layer runs a call of a module, beside the module's weight."""
    return "latents", sizes, query.dtype, query.device, scale, topk, topk is None and blocks.all_new


def _topk(module: nn.Module, chosen: Tensor) -> int:
    """The number of keys that an indexer chooses if there are enough: from the module's config, or from this call."""
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
