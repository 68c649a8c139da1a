"""Blocks: answers that are printed together, because they differ only in refused features."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnreg.selection.trace import verdict_words

if TYPE_CHECKING:
    from attnreg.errors import Location
    from attnreg.explain.answers import Answer, Verdict
    from attnreg.selection.remedies import Remedy
    from attnreg.selection.trace import Candidate, Reason


@dataclass(frozen=True)
class Block:
    """Answers with the same winners, candidates and reasons, except for features that a candidate does not support."""

    answers: tuple[Answer, ...]

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts of the first answer, which represent all answers."""
        return self.answers[0].verdicts

    def candidates(self, verdict: Verdict) -> list[Candidate]:
        """The candidates that were not chosen, without further places of the winner in the order."""
        chosen = verdict.selection.chosen
        return [c for c in verdict.selection.candidates if chosen is None or c.title != chosen.title]

    def words(self, number: int, candidate: Candidate) -> list[tuple[str, Location]]:
        """Each reason against a candidate of the verdict with index ``number``, with its line of data.

        If only some answers ask for a feature, their layers follow it.
        """
        verdicts = [answer.verdicts[number] for answer in self.answers]
        reasons = _reasons(verdicts[0], candidate)
        asking: dict[Reason, list[Answer]] = {}
        for answer, verdict in zip(self.answers, verdicts, strict=True):
            for reason in _reasons(verdict, candidate):
                if reason.kind == "feature":
                    asking.setdefault(reason, []).append(answer)
        features = [_marked(reason, some, len(self.answers)) for reason, some in asking.items()]
        # features go before rules, as in the answers
        at = next((i for i, r in enumerate(reasons) if r.kind in ("feature", "rule")), len(reasons))
        others = [r for r in reasons if r.kind != "feature"]
        return verdict_words(verdicts[0].selection, candidate, [*others[:at], *features, *others[at:]])

    def remedy(self, verdict: Verdict, candidate: Candidate) -> Remedy | None:
        """The remedy after which a candidate wins; for a model's layers None if the remedy changes the model itself."""
        return _remedy(self.answers[0], verdict, candidate)


def blocks(answers: Iterable[Answer]) -> list[Block]:
    """The answers in blocks, in the order of their first answers."""
    alike: dict[Any, list[Answer]] = {}
    for number, answer in enumerate(answers):
        alike.setdefault(_signature(answer) or number, []).append(answer)
    return [Block(tuple(same)) for same in alike.values()]


def _signature(answer: Answer) -> Any:
    """The common parts of the answers of a block; empty for layers without softmax attention."""
    return tuple(
        (
            tuple(s.platform for s in v.selections),
            v.selection.order,
            v.selection.choice,
            v.selection.requested,
            v.selection.chosen and (v.selection.chosen.rank, v.selection.chosen.title),
            v.selection.started,
            v.selection.warnings,
            v.selection.facts,
            tuple(v.selection.failures.items()),
            v.runs,
            tuple(
                (
                    (c.title, c.accepted, _remedy(answer, v, c)),
                    tuple(r for r in _reasons(v, c) if r.kind != "feature"),
                )
                for c in v.selection.candidates
            ),
        )
        for v in answer.verdicts
    )


def _reasons(verdict: Verdict, candidate: Candidate) -> list[Reason]:
    own = next(c for c in verdict.selection.candidates if c.rank == candidate.rank)
    return [verdict.reason(candidate.rank, i) for i in range(len(own.reasons))]


def _remedy(answer: Answer, verdict: Verdict, candidate: Candidate) -> Remedy | None:
    found = verdict.remedies.get(candidate.rank)
    return None if found is not None and found.of_model and answer.question.layers else found


def _marked(reason: Reason, answers: list[Answer], of: int) -> Reason:
    """The reason, followed by its layers if it does not apply to all layers of the block."""
    if len(answers) == of:
        return reason
    layers = ", ".join(re.sub(r"\d+ layers? \((.*)\)", r"layers \1", a.question.layers) for a in answers)
    return dataclasses.replace(reason, asked=f"{reason.asked} ({layers})")
