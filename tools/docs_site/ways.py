"""The way of a selection through its order: each candidate with its verdict and the reasons."""

from __future__ import annotations

from typing import NamedTuple

from attnreg.errors import Location
from attnreg.selection.trace import Candidate, Selection, how_chosen, verdict_words

# kind of a stop -> its verdict as a word
VERDICTS = {"chosen": "chosen", "refused": "refused", "fails": "fails", "spare": "not needed"}


class Stop(NamedTuple):
    """A candidate: its name, a key of `VERDICTS`, and its reasons, each with its line of data."""

    name: str
    kind: str
    reasons: list[tuple[str, Location | None]]


def way(selection: Selection) -> list[Stop]:
    """The candidates in their order; the chosen one stands once, with how it was chosen."""
    chosen = selection.chosen
    stops = []
    for candidate in selection.candidates:
        if candidate is chosen:
            stops.append(Stop(candidate.title, "chosen", [(how_chosen(selection), None)]))
        elif chosen is None or candidate.name != chosen.name:
            kind = _kind(candidate, candidate.rank in selection.failures)
            stops.append(Stop(candidate.title, kind, [*verdict_words(selection, candidate)]))
    return stops


def _kind(candidate: Candidate, fails: bool) -> str:
    if candidate.accepted:
        return "fails" if fails else "spare"
    return "fails" if fails else "refused"
