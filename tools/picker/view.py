"""An explanation for the picker's page: sentences with their lines of data, so that the page knows no field."""

from __future__ import annotations

import re
from typing import Any

from attnreg.errors import Location
from attnreg.explain.answers import Answer, Explanation, Verdict
from attnreg.models.groups import describe_indices
from attnreg.models.kv_memory import Memory
from attnreg.packages.proven import unproven_choice
from attnreg.selection.refusal import alternatives
from attnreg.selection.trace import Candidate, Selection, how_chosen, verdict_words

_PHASE = re.compile(r" · (prefill|decode)$")
# a sentence, and the file and line of data that it comes from, "" if there is none
Line = list[str]


def view(explanation: Explanation) -> dict[str, Any]:
    """An explanation as JSON-ready values, as the page shows it."""
    return {
        "title": explanation.title,
        "registry": explanation.registry.title,
        "summary": _summary(explanation.answers),
        "answers": [
            {
                "heading": " · ".join(filter(None, (answer.question.layers, answer.question.label))),
                "verdicts": [_verdict(answer, verdict) for verdict in answer.verdicts],
            }
            for answer in explanation.answers
        ],
        "blocks": [
            *(_line(page.sentence, page.where) for page in explanation.pages),
            *(_line(f"✗ {stop.text}") for stop in explanation.stops),
        ],
        "tables": [_table(memory) for memory in explanation.memory if memory.models],
        "notes": list(explanation.notes),
    }


def _line(text: str, where: Location | None = None) -> Line:
    return [text, f"{where.file}:{where.line}" if where is not None else ""]


def _verdict(answer: Answer, verdict: Verdict) -> dict[str, Any]:
    """The choice and how it was made, the remarks on it, and each other candidate with the reasons against it."""
    selection, chosen = verdict.selection, verdict.selection.chosen
    lost = [c for c in selection.candidates if chosen is None or c.title != chosen.title]
    return {
        "kind": "chosen" if chosen else "unknown" if selection.unknown else "none",
        "name": selection.title,
        "rank": chosen.rank if chosen else None,
        "how": how_chosen(selection),
        "lines": [{"mark": mark, "line": line} for mark, line in _said(verdict)],
        "others": [_other(answer, verdict, candidate) for candidate in lost],
    }


def _said(verdict: Verdict) -> list[tuple[str, Line]]:
    """The sentences below a winner, each with its mark, in the command's order."""
    selection = verdict.selection
    names = ", ".join(alternatives(selection))
    start = selection.start
    steps = (*start.changes, *([start.refusal] if start.refusal else [])) if start is not None else ()
    following = [f for f in selection.consequences if f.kind != "fails"]
    return [
        *([("", _line(f"would accept it if asked for by name: {names}"))] if names else []),
        *(("▹", _line(text)) for text in verdict.runs),
        *(("→", _line(step.text, step.where)) for step in steps),
        *(("!", _line(warning)) for warning in selection.warnings),
        *(("·", _line(fact.text, fact.where)) for fact in following),
        *(("·", _line(text)) for text in ([selection.evidence] if selection.evidence else [])),
        *(("·", _line(one.text)) for one in unproven_choice(selection)),
    ]


def _other(answer: Answer, verdict: Verdict, candidate: Candidate) -> dict[str, Any]:
    remedy = verdict.remedies.get(candidate.rank)
    # a remedy that changes the model is left out if the question is about a model
    told = remedy is not None and not (remedy.of_model and answer.question.layers)
    return {
        "rank": candidate.rank,
        "name": candidate.title,
        "reasons": [_line(text, where) for text, where in verdict_words(verdict.selection, candidate)],
        "remedy": remedy.sentence if remedy is not None and told else "",
    }


def _summary(answers: tuple[Answer, ...]) -> str:
    """The winners in one line, each with its layers if there are several, for screen readers."""
    winners: dict[str, list[str]] = {}
    for answer in answers:
        phase = _PHASE.search(answer.question.label)
        layers = " ".join(filter(None, (answer.question.layers, phase[1] if phase else "")))
        for verdict in answer.verdicts:
            winners.setdefault(_winner(verdict.selection), []).append(layers)
    if not winners:
        return "No layer of this model computes softmax attention."
    if len(winners) == 1:
        return next(iter(winners)).removesuffix(",")
    return "; ".join(f"{name} for {' and '.join(layers)}" for name, layers in winners.items())


def _winner(selection: Selection) -> str:
    return f"{selection.title}, which then fails," if selection.fails else selection.title


def _table(memory: Memory) -> dict[str, Any]:
    """The KV cache: a row for each group of layers, and the total."""
    rank = f" on each of {memory.ranks} ranks" if memory.ranks > 1 else ""
    stored = ", draft ".join(dict.fromkeys(" and ".join(model.kv_dtypes) for model in memory.models))
    rows = []
    for number, model in enumerate(memory.models):
        for part in model.groups:
            layers = f"{'draft ' * (number > 0)}{describe_indices(part.group.layers)} · {part.group.label}"
            dtype = part.kv_dtype if len(model.kv_dtypes) > 1 else ""
            rows.append([" · ".join(filter(None, (layers, dtype, part.remark))), *part.words(memory.lengths)])
    return {
        "title": f"KV cache of one request{rank}, kv_dtype {stored}",
        "head": ["Layers", "Bytes per token", *(f"{n:,} tokens" for n in memory.lengths)],
        "rows": [*rows, ["total", *memory.totals()]],
    }
