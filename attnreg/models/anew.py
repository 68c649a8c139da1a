"""Anew: what the layers of a model ask for once its user gives other options, as the command asks with these."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from attnreg.errors import RequestError
from attnreg.models.fields import ConfigError
from attnreg.request import AttentionRequest
from attnreg.selection.question import Question

# a layer, the kind of its question, and the number of the question among the layer's of that kind
_Place = tuple[object, str, int]


class Anew:
    """A model's questions, each of which can be asked again; a model is read once for each set of further options."""

    def __init__(self, ask: Callable[[Mapping[str, Any]], Iterable[Question]]) -> None:
        self._ask = ask
        self._kept: dict[tuple[tuple[str, Any], ...], dict[_Place, AttentionRequest]] = {}

    def of(self, questions: Iterable[Question]) -> tuple[Question, ...]:
        """The questions, with what their layers ask for under further options."""
        return tuple(dataclasses.replace(q, anew=partial(self._requests, places)) for q, places in _placed(questions))

    def _requests(self, places: tuple[_Place, ...], given: Mapping[str, Any]) -> tuple[AttentionRequest, ...]:
        """Each request of some layers under further options; none where the layers are not asked about then."""
        key = tuple(sorted(given.items()))
        if key not in self._kept:
            self._kept[key] = self._read(given)
        found = self._kept[key]
        if not all(place in found for place in places):
            return ()
        return tuple(dict.fromkeys(found[place] for place in places))

    def _read(self, given: Mapping[str, Any]) -> dict[_Place, AttentionRequest]:
        try:
            placed = list(_placed(self._ask(given)))
        except (ConfigError, RequestError):
            return {}
        return {place: q.request for q, places in placed for place in places if q.request is not None}


def _placed(questions: Iterable[Question]) -> Iterator[tuple[Question, tuple[_Place, ...]]]:
    """Each question with the places of its layers, which stay when other layers join it."""
    counts: Counter[tuple[object, str]] = Counter()
    for question in questions:
        layers = [(member, question.kind) for member in sorted(question.members, key=repr)]
        yield question, tuple((*layer, counts[layer]) for layer in layers)
        counts.update(layers)
