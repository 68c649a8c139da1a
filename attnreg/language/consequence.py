"""Consequence: what follows from the choice of a backend, and does not affect it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnreg.errors import Location
    from attnreg.language.conditions import Condition
    from attnreg.language.engine.pages import KernelBlocks
    from attnreg.language.engine.runs import GraphLevel


@dataclass(frozen=True, slots=True)
class Consequence:
    """A consequence of choosing a variant where ``when`` holds; it does not affect the choice.

    - ``fails`` is the reason why the engine then stops. ``drops`` is the part of the layer that the engine leaves out,
      in silence. ``id`` names the failure or the fault. ``runs`` is one of several kernels. ``unknown`` is
      what the data does not know of such a layer.
    - ``workspace`` is the memory in bytes that the backend takes on each GPU beside the KV cache. If more, it is
      ``per_query_element`` bytes for each element of a step's queries.
    - ``kernel_blocks`` are the block sizes that the kernel reads; it takes the largest that divides a page. ``prefers``
      is the page size that the backend asks for if it may.
    - ``stores`` is the KV dtype of the cache, if not the requested one. ``says`` remarks on memory, blocks or KV dtype.
    - ``layouts`` are the layouts of the cache that the kernels read, the preferred first; () if they read all. A block
      then has ``slots`` for heads, if not one for each KV head. ``graphs`` is the level of CUDA graphs.
      It holds only if ``some`` holds for some layer of the run. If the KV heads do not divide the query heads of the
      target model, it is ``undivided``.
    """

    when: Condition
    where: Location
    fails: str = ""
    drops: str = ""
    runs: str = ""
    unknown: str = ""
    workspace: int | None = None
    per_query_element: int | None = None
    kernel_blocks: KernelBlocks | None = None
    prefers: int | None = None
    stores: str = ""
    layouts: tuple[str, ...] | None = None
    slots: int | None = None
    graphs: GraphLevel | None = None
    some: Condition | None = None
    undivided: GraphLevel | None = None
    says: str = ""
    source: str | None = None
    id: str = ""
