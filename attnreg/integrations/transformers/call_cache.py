"""The cache of calls: facts of a call lead to its layer, its batch and its bound run.

A decoded token repeats the calls of the previous token, module by module, with another mask. So most calls are like a
previous one. A call goes through three levels, and each level saves work before the kernel:

1. The module. `CallCache.of` gives its `ModuleCalls`, with the results for its calls.
2. The facts. `ModuleCalls.repeated` looks them up, and finds a `KnownCall`: the layer that runs such calls, and the
   record of them. The mask brings its batch, which all layers under the mask share (`batches.mask_batch`). A call
   without a mask has its lengths among its facts, and its `KnownCall` has the batch.
3. The memory. Under one mask, layers of one kind make calls that differ in their addresses alone. The first of them
   leaves a `BoundRun` in the batch, and the others launch by it, without validation.

A call is looked at in full, as if there were no cache, if one of these holds:

- The module has another config, or another ``is_cross_attention`` or ``is_decoder``.
- A fact differs. The facts are: the kind of query, key and value; scale, window and softcap with their types; whether
  there are sinks; and the meaning of the mask. The kind is the type, dtype, device and sizes, but for the number of
  queries and keys. Without a mask there are further facts: the lengths, causality by the argument and by the module,
  and the CUDA stream.
- A fact is a tensor: its value may change in place.
- The parameter that the layer reads is another tensor: the sinks, or the weight of a projection.
- The mask is no `LazyMask`, or it has other numbers of queries or keys than the call.
- The call has a bias, chosen keys, a sink for each query, or boundaries of sequences.
- PyTorch traces, transforms functions or differentiates in forward mode, or the engine keeps compressed caches.

The values in tensors are never facts: layers and kernels read them at each call. A batch lives as long as its mask's
source, and transformers asks for a new mask for each token. A bound run is used only for tensors with the same sizes
and strides, and never while a CUDA graph is captured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnreg.integrations.transformers.batches import VarlenBatch, batch_key, mask_batch, tensors_like
from attnreg.integrations.transformers.calls import LayerRequest, is_crossed
from attnreg.integrations.transformers.masks import LazyMask

if TYPE_CHECKING:
    from typing import Self

    from attnreg.integrations.transformers.arguments import CallArguments
    from attnreg.runtime.layer import Attention
    from attnreg.selection.trace import Selection

# the most known calls of one module: without a mask the lengths are facts, so the number has no limit
_MOST = 64
Facts = tuple[Any, ...]


@dataclass(slots=True)
class LayerRun:
    """The calls of a module that ran as one layer. selection: of their backend; dense: why no backend ran them.

    layer: lives as long as the module, because a captured CUDA graph reads its plans.
    """

    module: str
    layer_idx: int | None
    asked: LayerRequest
    selection: Selection | None
    dense: str = ""
    calls: int = 0
    layer: Attention | None = field(default=None, repr=False, compare=False)

    @property
    def backend(self) -> str | None:
        """The name of the backend; None if the calls ran densely."""
        return self.selection.backend.name if self.selection and self.selection.backend else None


class KnownCall(NamedTuple):
    """The result for a call: its layer, the record of the layer's calls, and the batch if the call has no mask.

    bound: the layer's kind: the call may use bound runs of this kind. None if the layer has tensors of its own.
    """

    layer: Attention
    run: LayerRun
    bound: object
    batch: VarlenBatch | None = None

    @classmethod
    def of(cls, layer: Attention, run: LayerRun) -> Self:
        """The known call of a layer and the record of its calls, without a batch."""
        return cls(layer, run, None if layer.params.tensors else layer.kind)


class CallCache:
    """The known calls of modules. Those of a module are kept as long as it lives and does not change."""

    def __init__(self) -> None:
        self._modules: WeakKeyDictionary[torch.nn.Module, ModuleCalls] = WeakKeyDictionary()

    def of(self, module: torch.nn.Module) -> ModuleCalls:
        """The known calls of a module; empty if its config or a deciding attribute has changed."""
        calls, own = self._modules.get(module), module.__dict__
        if (
            calls is None
            or calls.config is not own.get("config")
            or calls.cross is not own.get("is_cross_attention")
            or calls.decodes is not own.get("is_decoder")
        ):
            calls = self._modules[module] = ModuleCalls(module)
        return calls


class ModuleCalls:
    """The known calls of one module, by their facts."""

    def __init__(self, module: torch.nn.Module) -> None:
        own = module.__dict__
        # the attributes that decide, with the module's class, whether it attends to another text
        self.config, self.cross, self.decodes = (own.get(x) for x in ("config", "is_cross_attention", "is_decoder"))
        self._crossed = is_crossed(module)
        self._batch_key = batch_key(self._crossed)
        # facts -> the parameter that the layer reads, and the result
        self._known: dict[Facts, tuple[Tensor | None, Any]] = {}

    def known(self, facts: Facts | None, parameter: Tensor | None) -> Any:
        """The result kept for calls with these facts, if its layer reads this parameter; else None."""
        kept = self._known.get(facts)  # type: ignore[arg-type]
        if kept is None:
            return None
        if kept[0] is not parameter:
            # the module has a new parameter, and layers would keep the old ones alive
            self._known.clear()
            return None
        return kept[1]

    def keep(self, facts: Facts | None, parameter: Tensor | None, found: Any) -> None:
        """Keeps the result for a call. facts None: each such call is looked at in full."""
        if facts is None or any(isinstance(fact, Tensor) for fact in facts):
            return
        if len(self._known) >= _MOST:
            # drops each `KnownCall`: its layer lives on in its record. Other results are few, and are kept
            self._known = {key: kept for key, kept in self._known.items() if not isinstance(kept[1], KnownCall)}
        self._known[facts] = parameter, found

    def forget_weights(self) -> None:
        """Drops the layers that read a weight of the module: its memory may belong to another weight by now."""
        self._known = {facts: kept for facts, kept in self._known.items() if isinstance(kept[1], KnownCall)}

    def repeated(self, call: CallArguments) -> Tensor | None:
        """The output of a known call, run on this call's memory; None for a call to look at in full.

        The call must have plain tensors, and must not be recorded for derivatives.
        """
        query, key, value, mask = call.query, call.key, call.value, call.mask
        batch = mask.source.memo.get(self._batch_key) if mask.__class__ is LazyMask else None
        bound = batch.bound_for(query, key, value) if batch.__class__ is VarlenBatch else None
        if bound is None:
            # compares the numbers of queries and keys with the mask's, because they are no facts
            batch = self.batch(call, key)
        facts = self._facts(call, tensors_like(query, key, value) if bound is None else bound.tensors, batch)
        known = self.known(facts, call.sinks)
        if known is None and facts is not None and batch is not None:
            known = self.known((*facts, batch.phase), call.sinks)
        if known is None:
            return None
        known.run.calls += 1
        if bound is not None and bound.layer is known.bound:
            # torch.empty takes half the time of new_empty
            output = torch.empty(*bound.shape, dtype=query.dtype, device=query.device)
            bound.run(query, key, value, output)
            return output
        attended: Tensor = (batch or known.batch).attend(known.layer, query, key, value)
        return attended

    def facts(self, call: CallArguments, batch: VarlenBatch | None, phase: str | None = None) -> Facts | None:
        """The facts that decide how a call runs, beside its module; None if more than facts decides.

        batch: of the call's mask. phase: of the batch, if the registry tells phases apart.
        """
        facts = self._facts(call, tensors_like(call.query, call.key, call.value), batch)
        return facts if facts is None or phase is None else (*facts, phase)

    @staticmethod
    def _facts(call: CallArguments, kind: object, batch: VarlenBatch | None) -> Facts | None:
        scale, window, softcap = call.scale, call.window, call.softcap
        if batch is not None:
            # each number is a fact with its type, because True equals 1
            return (
                kind, batch.facts, scale, scale.__class__, window, window.__class__, softcap, softcap.__class__,
                call.sinks is None,
            )  # fmt: skip
        queries, keys, causal = call.query.shape[2], call.key.shape[2], call.causal
        by_attribute = getattr(call.module, "is_causal", True)
        if call.mask is not None or (queries != keys and queries > 1 and (by_attribute if causal is None else causal)):
            return None
        stream = torch.cuda.current_stream(call.query.device).cuda_stream if call.query.is_cuda else None
        return (
            kind, queries, keys, causal, by_attribute, stream, scale, scale.__class__, window, window.__class__,
            softcap, softcap.__class__, call.sinks is None,
        )  # fmt: skip

    def batch(self, call: CallArguments, key: Tensor) -> VarlenBatch | None:
        """The batch of a call's lazy mask; None for another mask, or if no batch can express the call.

        key: the call's, or the latents behind a lazy one.
        """
        if call.mask.__class__ is not LazyMask:
            return None
        source, query = call.mask.source, call.query
        shape = query.shape
        if (source.batch, source.queries, source.keys) != (shape[0], shape[2], key.shape[2]):
            return None
        if source.device != query.device or key.shape[0] != shape[0]:
            return None
        batch = mask_batch(source, crossed=self._crossed)
        return batch if isinstance(batch, VarlenBatch) else None
