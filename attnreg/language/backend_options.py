"""Backends that users name: the layers that each option reaches, and what an engine takes instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attnreg.language.frozen import FrozenDict

if TYPE_CHECKING:
    from attnreg.errors import Location
    from attnreg.language.conditions import Condition


@dataclass(frozen=True, slots=True)
class BackendOption:
    """One option that names a backend: ``backend``, ``draft_backend``, ``vision_backend`` or ``prefill_backend``.

    ``reaches`` holds for the requests of the layers whose backend it names. With ``facet`` it names none itself: the
    request gets the name as this facet, which the engine's steps read. ``names`` maps the engine's words to rows.
    """

    name: str
    reaches: Condition
    where: Location
    facet: str | None = None
    names: Mapping[str, str] = field(default_factory=FrozenDict)
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Fallback:
    """What replaces a backend that is named, where ``when`` holds: ``takes``, by default the order's choice.

    Every reason against the named backend must be about facets in ``only``. None: it is not asked. The backends of
    ``unless`` are not replaced.
    """

    when: Condition
    only: frozenset[str] | None
    because: str
    where: Location
    takes: str | None = None
    unless: frozenset[str] = frozenset()
