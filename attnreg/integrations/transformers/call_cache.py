"""The cache of calls: facts of a call lead to its layer, its batch and its bound run.

A decoded token repeats the calls of the token before, module by module; only its mask is another. So most calls are
like one before. A call goes through three levels, and each level saves what comes before a kernel:

1. The module. `CallCache.of` gives its `ModuleCalls`: what was found for its calls.
2. The facts. `ModuleCalls.repeated` looks them up, and finds a `KnownCall`: the layer that runs such calls, and the
   record of them. The mask brings its batch, which all layers under the mask share (`batches.mask_batch`). A call
   without a mask has its lengths among its facts, and its `KnownCall` has the batch.
3. The memory. Under one mask, layers of one kind make calls that differ in their addresses alone. The first of them
   leaves a `BoundRun` in the batch, and the others launch by it, without validation.

One rule says when a call is looked at in full, as if there were no cache. It is when one of these holds:

- The module has another config, or another ``is_cross_attention`` or ``is_decoder``.
- A fact differs. The facts are the kind of query, key and value (type, dtype, device, sizes but for the number of
  queries and keys), scale, window and softcap with their types, whether there are sinks, and what the mask means.
  Without a mask they are also the lengths, causality by the argument and by the module, and the CUDA stream.
- A fact is a tensor: its value may change in place.
- The parameter that the layer reads is another tensor: the sinks, or the weight of a projection.
- The mask is no `LazyMask`, or it has other numbers of queries or keys than the call.
- The call has a bias, chosen keys, a sink for each query, or boundaries of sequences.
- PyTorch traces, transforms functions or differentiates in forward mode, or the engine keeps compressed caches.

What tensors hold is never a fact: layers and kernels read it at each call. A batch lives as long as its mask's source,
which transformers asks for anew for each token. A bound run is used only for tensors with the same sizes and strides,
and never while a CUDA graph is captured.
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

# the known calls of one module: without a mask the lengths are facts, so new ones may come for ever
_MOST = 64
Facts = tuple[Any, ...]


@dataclass(slots=True)
class LayerRun:
    """The calls of a module that ran as one layer. selection: by which backend; dense: why no backend ran them.

    layer: it lives as long as its module, because a captured CUDA graph reads its plans.
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
        """The name of the backend; None where the calls ran densely."""
        return self.selection.backend.name if self.selection and self.selection.backend else None


class KnownCall(NamedTuple):
    """What a call was found to ask for: its layer, the record of its calls, and its batch if it has no mask.

    bound: the layer's kind, by whose bound runs it may run; None where the layer has tensors of its own.
    """

    layer: Attention
    run: LayerRun
    bound: object
    batch: VarlenBatch | None = None

    @classmethod
    def of(cls, layer: Attention, run: LayerRun) -> Self:
        """A layer, and the record of its calls."""
        return cls(layer, run, None if layer.params.tensors else layer.kind)


class CallCache:
    """The known calls of modules, each as long as its module lives and is what it was."""

    def __init__(self) -> None:
        self._modules: WeakKeyDictionary[torch.nn.Module, ModuleCalls] = WeakKeyDictionary()

    def of(self, module: torch.nn.Module) -> ModuleCalls:
        """The known calls of a module; none where its config or a deciding attribute has changed."""
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
        # what decides whether the module attends to another text, beside its class
        self.config, self.cross, self.decodes = (own.get(x) for x in ("config", "is_cross_attention", "is_decoder"))
        self._crossed = is_crossed(module)
        self._batch_key = batch_key(self._crossed)
        # the parameter that the layer reads, and what is known
        self._known: dict[Facts, tuple[Tensor | None, Any]] = {}

    def known(self, facts: Facts | None, parameter: Tensor | None) -> Any:
        """What is kept for calls with these facts, whose layer reads this parameter; else None."""
        kept = self._known.get(facts)  # type: ignore[arg-type]
        if kept is None:
            return None
        if kept[0] is not parameter:
            # layers keep their parameters, which the module has given up
            self._known.clear()
            return None
        return kept[1]

    def keep(self, facts: Facts | None, parameter: Tensor | None, found: Any) -> None:
        """Keeps what was found for a call. facts None: the call is looked at in full each time."""
        if facts is None or any(isinstance(fact, Tensor) for fact in facts):
            return
        if len(self._known) >= _MOST:
            # the layers of a `KnownCall` live on in their records; others are few, and are kept
            self._known = {key: kept for key, kept in self._known.items() if not isinstance(kept[1], KnownCall)}
        self._known[facts] = parameter, found

    def forget_weights(self) -> None:
        """Drops the layers that read a weight of the module, which may be another's by now."""
        self._known = {facts: kept for facts, kept in self._known.items() if isinstance(kept[1], KnownCall)}

    def repeated(self, call: CallArguments) -> Tensor | None:
        """The output of a call that is known, run on this call's memory; None for a call to look at in full.

        The call has plain tensors, and nothing is recorded of it for derivatives.
        """
        query, key, value, mask = call.query, call.key, call.value, call.mask
        batch = mask.source.memo.get(self._batch_key) if mask.__class__ is LazyMask else None
        bound = batch.bound_for(query, key, value) if batch.__class__ is VarlenBatch else None
        if bound is None:
            # a mask is for its own numbers of queries and keys, which are no facts
            batch = self.batch(call, key)
        facts = self._facts(call, tensors_like(query, key, value) if bound is None else bound.tensors, batch)
        known = self.known(facts, call.sinks)
        if known is None and facts is not None and batch is not None:
            known = self.known((*facts, batch.phase), call.sinks)
        if known is None:
            return None
        known.run.calls += 1
        if bound is not None and bound.layer is known.bound:
            output = query.new_empty(bound.shape)
            bound.run(query, key, value, output)
            return output
        attended: Tensor = (batch or known.batch).attend(known.layer, query, key, value)
        return attended

    def facts(self, call: CallArguments, batch: VarlenBatch | None, phase: str | None = None) -> Facts | None:
        """The facts that decide how a call runs, beside its module; None where they do not decide.

        batch: that of the call's mask. phase: where the registry tells phases apart, that of the batch.
        """
        facts = self._facts(call, tensors_like(call.query, call.key, call.value), batch)
        return facts if facts is None or phase is None else (*facts, phase)

    @staticmethod
    def _facts(call: CallArguments, kind: object, batch: VarlenBatch | None) -> Facts | None:
        scale, window, softcap = call.scale, call.window, call.softcap
        if batch is not None:
            # True is no 1: each number is a fact with its type
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
        """The batch of a call's lazy mask; None for another mask, and where no batch can express the call.

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
