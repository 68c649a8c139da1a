"""What the custom ops find by name: the layers that exist, and the batch of the step that runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from attnreg.runtime.interface import BatchMetadata
    from attnreg.runtime.layer import Attention

_layers: WeakValueDictionary[str, Attention] = WeakValueDictionary()
_batches: ContextVar[tuple[BatchMetadata | None, Mapping[str, BatchMetadata]] | None] = ContextVar(
    "attnreg_batches", default=None
)


def add_layer(layer: Attention, name: str) -> None:
    """Let the ops find a layer by its name for as long as it lives. Raises ValueError where the name is taken."""
    if _layers.get(name, layer) is not layer:
        raise ValueError(f"there is a layer named {name!r} already; a name belongs to one layer of the process")
    _layers[name] = layer


def layer_named(name: str) -> Attention:
    """Raises LookupError for a name that no living layer has."""
    layer = _layers.get(name)
    if layer is None:
        known = ", ".join(sorted(_layers)) or "none"
        raise LookupError(f"there is no attention layer named {name!r}; the layers are: {known}")
    return layer


@contextmanager
def forward_context(
    batch: BatchMetadata | None = None, *, layers: Mapping[str, BatchMetadata] | None = None
) -> Iterator[None]:
    """The batch that the custom ops work on inside the block; ``layers`` names those of other KV-cache groups."""
    token = _batches.set((batch, layers or {}))
    try:
        yield
    finally:
        _batches.reset(token)


def batch_for(layer: str) -> BatchMetadata:
    """The batch of a layer. Raises LookupError outside `forward_context`."""
    current = _batches.get()
    batch = None if current is None else current[1].get(layer, current[0])
    if batch is None:
        raise LookupError(f"no batch for layer {layer!r}: run the model inside `attnreg.ops.forward_context(batch)`")
    return batch
