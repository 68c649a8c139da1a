"""The states of layers without softmax attention in a run: what a request keeps, and the block that holds a state."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.errors import Location
from attnreg.models.states import StateArray, StateDims, arrays, state_bytes

if TYPE_CHECKING:
    from attnreg.language.engine.pages import OfStates, StateRules
    from attnreg.selection.question import Question

    Points = Sequence[Mapping[str, Any]]


class UncountedStates(NamedTuple):
    """Why the states of a run are not known, with the line of data."""

    text: str
    where: Location
    source: str | None = None


class LayerStates(NamedTuple):
    """Equal states of ``layers`` layers: their arrays on one rank, and ``own_bytes`` of one of them.

    ``held`` is the number of states that a request keeps in each layer, None if it is not known.
    """

    state: StateDims
    layers: int
    parts: tuple[StateArray, ...]
    own_bytes: int
    held: int | None


class StatePages(NamedTuple):
    """The states of a run on one rank. ``page_bytes`` is what one state takes, None if that is its own size.

    ``where`` is the line of the rules.
    """

    layers: tuple[LayerStates, ...]
    page_bytes: int | None
    where: Location
    source: str | None = None

    @property
    def by_state(self) -> dict[StateDims, int | None]:
        """State -> the bytes that one request takes in one layer with that state; None if they are not known."""
        return {s.state: None if s.held is None else s.held * self._each(s) for s in self.layers}

    @property
    def request_bytes(self) -> int | None:
        """The bytes that one request takes in all layers with states; None if they are not known."""
        each = self.by_state
        sizes = [None if (size := each[s.state]) is None else size * s.layers for s in self.layers]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def _each(self, states: LayerStates) -> int:
        return states.own_bytes if self.page_bytes is None else self.page_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, in bytes."""
        return {
            "page_bytes": self.page_bytes,
            "request_bytes": self.request_bytes,
            "kinds": [
                {
                    "kind": s.state.kind,
                    "layers": s.layers,
                    "arrays": [part._asdict() | {"shape": list(part.shape)} for part in s.parts],
                    "bytes": s.own_bytes,
                    "states_per_request": s.held,
                }
                for s in self.layers
            ],
            "where": str(self.where),
            "source": self.source,
        }


def of_questions(questions: Iterable[Question]) -> Counter[StateDims | None]:
    """The states of the layers without softmax attention, each with the number of its layers; None: not known."""
    found: Counter[StateDims | None] = Counter()
    for question in questions:
        if question.request is None:
            found[question.state] += len(question.members) or 1
    return found


def counted(
    states: Mapping[StateDims | None, int],
    points: Points,
    rules: StateRules,
    dtype: str,
    proposed: int | None,
    bits: Mapping[str, float],
) -> StatePages | UncountedStates:
    """The states of a run before a page holds them.

    points: the layers with softmax attention. dtype: the dtype in which they compute, "" without such layers.
    proposed: the number of tokens that a draft proposes, None if it is not known. bits: dtype -> the bits of a value.
    """
    known = {state: layers for state, layers in states.items() if state is not None}
    told = [u for u in rules.unknown if proposed != 0 or not u.drafted]
    unknown = next((u for u in told if any(_holds(u.of, state, points) for state in known)), None)
    if unknown is not None:
        return UncountedStates(unknown.because, unknown.of.where, unknown.of.source)
    if proposed is None and (rules.proposed is None or any(state.kind in rules.widened for state in known)):
        cure = f"; give it by {rules.proposed}" if rules.proposed else ""
        text = f"a state grows with the number of tokens that the draft proposes, which is not given{cure}"
        return UncountedStates(text, rules.where, rules.source)
    named = not points or any(rules.config_dtype.holds(point) for point in points)
    found = []
    for state, layers in known.items():
        wider = (proposed or 0) if state.kind in rules.widened else 0
        parts = arrays(state, dtype, wider, named=named)
        odd = next((part.dtype for part in parts if part.dtype not in bits), None)
        if odd is not None:
            return UncountedStates(
                f"the registry knows no dtype {odd!r}, which the config names", rules.where, rules.source
            )
        first = next((h.states for h in rules.held if _holds(h.of, state, points)), None) if points else rules.alone
        held = None if first is None or proposed is None else first + proposed
        found.append(LayerStates(state, layers, parts, state_bytes(parts, bits), held))
    return StatePages(tuple(found), None, rules.where, rules.source)


def smallest_block(
    states: StatePages, points: Points, rules: StateRules, smallest: Sequence[int], tokens: int, token_bytes: int
) -> int | None:
    """The smallest block that holds a state and obeys the rules, in tokens; None if a rule reads a fact that is absent.

    smallest: the smallest block of each backend, the first layer's first. tokens: the block size without states.
    token_bytes: the bytes of a token in one layer.
    """
    unit = max(smallest[0], tokens)
    for rule in rules.multiples:
        for of in (s.state for s in states.layers if _holds(rule.of, s.state, points)):
            if rule.at_least is not None:
                unit = max(unit, rule.at_least)
                continue
            number = of.chunk if rule.multiple_of == "chunk" else rule.multiple_of
            if not isinstance(number, int):
                return None
            unit = math.lcm(unit, number)
    largest = max((s.own_bytes for s in states.layers), default=0)
    block = unit * -(-largest // (unit * token_bytes))
    if rules.all_backends:
        common = math.lcm(*smallest)
        block = common * -(-block // common)
    return max(block, tokens)


def _holds(of: OfStates, state: StateDims, points: Points) -> bool:
    return (
        (not of.kinds or state.kind in of.kinds)
        and of.key_size in (None, state.key_size)
        and any(of.when.holds(point) for point in points)
    )
