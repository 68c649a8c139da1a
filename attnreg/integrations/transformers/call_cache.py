"""What was found for a module's calls, so that a call like one before costs one look-up.

A decoded token repeats the calls of the token before, module by module: only its mask is another. What depends on the
mask is found once for all modules that share the mask (`batches.mask_batch`), and what depends on the module is kept
here, by every fact that it depends on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnreg.integrations.transformers.batches import VarlenBatch, batch_key, mask_batch
from attnreg.integrations.transformers.calls import LayerRequest, is_crossed
from attnreg.integrations.transformers.masks import LazyMask
from attnreg.runtime.masks import Band

if TYPE_CHECKING:
    from attnreg.runtime.layer import Attention
    from attnreg.selection.trace import Selection

# the facts of so many calls of one module are kept: without a mask, the lengths are among them
_MOST = 64


@dataclass(slots=True)
class LayerRun:
    """The calls of a module that ran as one layer. selection: by which backend; dense: why no backend ran them."""

    module: str
    layer_idx: int | None
    asked: LayerRequest
    selection: Selection | None
    dense: str = ""
    calls: int = 0

    @property
    def backend(self) -> str | None:
        """The name of the backend; None where the calls ran densely."""
        return self.selection.backend.name if self.selection and self.selection.backend else None


class Found(NamedTuple):
    """What a call was found to ask for: its layer, the record of its calls, and its batch if it has no mask."""

    layer: Attention
    run: LayerRun
    varlen: VarlenBatch | None


class Question(NamedTuple):
    """The facts that decide how a call runs, beside its module; varlen: the batch of its mask, None without a mask.

    phase: that of the batch, a fact where the registry tells phases apart; None where the facts tell the lengths.
    """

    facts: tuple[Any, ...]
    varlen: VarlenBatch | None
    phase: str | None = None


class Last(NamedTuple):
    """The last call of a module by a layer that calls may repeat: the layer's kind, the call's numbers, the record.

    band, crossed: those of its batch. numbers: its scale and its softcap, each behind its type.
    """

    kind: object
    band: Band
    crossed: bool
    numbers: tuple[Any, ...]
    run: LayerRun


class Site:
    """A module, as far as its attributes decide how its calls run, and what was found for them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.stated = _stated(module)
        self.config = module.__dict__.get("config")
        self.crossed = is_crossed(module)
        self.found: dict[tuple[Any, ...], Found] = {}
        self._last: Last | None = None
        self._batch_key = batch_key(self.crossed)

    def repeated(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: Any, softcap: Any) -> Tensor | None:
        """The output of a call that another layer made under the same mask, run on this call's memory.

        It is for calls without sinks, of which no gradient is wanted. None: the call has to be looked at.
        """
        last = self._last
        if last is None or mask.__class__ is not LazyMask:
            return None
        varlen = mask.source.memo.get(self._batch_key)
        if (
            varlen.__class__ is not VarlenBatch
            or last.kind not in varlen.again
            or last.numbers != (scale.__class__, scale, softcap.__class__, softcap)
            or last.band != varlen.band
            or last.crossed != varlen.crossed
        ):
            return None
        output: Tensor | None = varlen.repeated(last.kind, query, key, value)
        if output is not None:
            last.run.calls += 1
        return output

    def remember(self, found: Found, varlen: VarlenBatch, scale: Any, softcap: Any) -> None:
        """Has later calls like the one that ``varlen`` has just run be `repeated`, where its layer allows it."""
        kind = found.layer.kind
        if kind in varlen.again and not found.layer.params.tensors:
            numbers = scale.__class__, scale, softcap.__class__, softcap
            self._last = Last(kind, varlen.band, varlen.crossed, numbers, found.run)

    def question(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        causal: bool,
        numbers: tuple[Any, Any, Any],
        without_sinks: bool,
    ) -> Question | None:
        """The facts of a call without a bias; None where they do not decide, so that the call is looked at in full.

        numbers: scale, window and softcap. Each is a fact with its type: True is no 1, and a tensor may change in
        place, so it is never a fact.
        """
        scale, window, softcap = numbers
        size, heads, queries, head_size = query.shape
        key_size, kv_heads, keys, _ = key.shape
        if key_size != size:
            return None
        layer = (
            heads, kv_heads, head_size, value.shape[3], query.dtype, query.device, without_sinks, scale,
            scale.__class__, softcap, softcap.__class__,
        )  # fmt: skip
        if mask is None:
            if causal and queries > 1 and keys != queries:
                return None
            stream = torch.cuda.current_stream(query.device).cuda_stream if query.is_cuda else None
            return Question((*layer, size, queries, keys, causal, window, window.__class__, stream), None)
        if mask.__class__ is not LazyMask:
            return None
        varlen = self.batch(mask, query, size, keys)
        if varlen is None:
            return None
        return Question((*layer, varlen.band, varlen.crossed, varlen.mm_prefix is None), varlen, varlen.phase)

    def batch(self, mask: LazyMask, query: Tensor, size: int, keys: int) -> VarlenBatch | None:
        """The batch of a mask for a query and keys [size, any, keys, any].

        None for a mask of others, and where no batch can express it.
        """
        source, (query_size, _, queries, _) = mask.source, query.shape
        if source.device != query.device or (source.batch, source.queries, source.keys) != (size, queries, keys):
            return None
        if query_size != size:
            return None
        varlen = mask_batch(source, crossed=self.crossed)
        return varlen if isinstance(varlen, VarlenBatch) else None

    def known(self, question: Question) -> Found | None:
        """What was found for a call like this one, in every phase or in its own."""
        found = self.found.get(question.facts)
        return self.found.get((*question.facts, question.phase)) if found is None else found

    def keep(self, facts: tuple[Any, ...], found: Found) -> None:
        """Keeps what was found for a call."""
        if any(isinstance(fact, Tensor) for fact in facts):
            return
        if len(self.found) >= _MOST:
            self.found.clear()
        self.found[facts] = found


class Sites:
    """The sites of modules, each as long as its module lives and its attributes are the same."""

    def __init__(self) -> None:
        self._sites: WeakKeyDictionary[torch.nn.Module, Site] = WeakKeyDictionary()

    def of(self, module: torch.nn.Module) -> Site:
        """The site of a module."""
        site = self._sites.get(module)
        if site is None or site.config is not module.__dict__.get("config") or site.stated != _stated(module):
            site = self._sites[module] = Site(module)
        return site


def _stated(module: torch.nn.Module) -> tuple[Any, ...]:
    """The attributes of a module that decide whether it attends to another text, beside its class and its config."""
    own = module.__dict__
    return own.get("is_cross_attention"), own.get("is_decoder")
