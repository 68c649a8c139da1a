"""What a registry says of lines that SGLang logs about its resolution: the steps that may have logged them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attnreg.engines.logs.tables import TableView, plain, reached, where
from attnreg.language.computed import From

# the facets with which SGLang's steps set a target's backend
_WRITTEN = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def of_default(backend: str, table: TableView, point: Mapping[str, Any] | None = None) -> Iterator[str]:
    """The cases of the default that give a backend. point: the facets of a layer; without them any layer is meant."""
    steps = [effect.sets.get("attention_backend") for step in table.registry.steps for effect in step.effects]
    derived = table.registry.derived
    for name in {value.facet: None for value in steps if isinstance(value, From) and value.facet in derived}:
        for (condition, value, place), _ in reached(((case, case[0]) for case in derived[name].cases), table.known):
            fits = point is None or condition.decided({facet: point[facet] for facet in condition.facets}) is not False
            if value == backend and fits:
                holds = where(condition) if condition.facets else "where nothing before holds"
                yield f"{name} ({place.short}), {holds}"


def of_written(backend: str, about: str, table: TableView) -> Iterator[str]:
    """The steps that write a backend and whose condition has a word: a model, or the reason that a line gives."""
    for text, value, conditions in _written(_WRITTEN, table):
        if value == backend and plain(about) in plain(conditions):
            yield text


def of_pages(row: str, pages: int, table: TableView) -> Iterator[str]:
    """The steps that write a page size for a backend."""
    for text, value, conditions in _written(("block_size",), table):
        if value == pages and plain(row) in plain(conditions):
            yield text


def _written(facets: tuple[str, ...], table: TableView) -> Iterator[tuple[str, Any, str]]:
    """Each value that a step may write to one of some facets: a text with its place, the value, and its conditions."""
    derived = table.registry.derived
    for step in table.registry.steps:
        for effect in table.effects(step):
            conditions = [c for c in (step.when, effect.when) if c.facets]
            holds = where(*conditions)
            looked = [derived[name] for c in conditions for name in c.facets if name in derived]
            about = " ".join([step.name, holds, *(c.describe() for facet in looked for c, _, _ in facet.cases)])
            written = (effect.sets.get(name) for name in facets)
            for value in dict.fromkeys(v for v in written if v is not None and not isinstance(v, From)):
                yield f"{step.name} ({effect.where.short}), {holds}", value, about
