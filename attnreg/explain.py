"""Selections rendered for a person or a program: the answer first, then every verdict with its line of data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attnreg.remedies import Remedy, remedy
from attnreg.selection import Candidate, Reason, Selection
from attnreg.selector import evaluate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest

_MIN_WIDTH = 60
PLATFORM_NAMES = {"cuda": "CUDA", "rocm": "ROCm", "xpu": "XPU", "cpu": "CPU"}


@dataclass(frozen=True)
class Question:
    """One request to explain: what to call it, and (for a model) how many layers it stands for, in words."""

    request: AttentionRequest
    label: str = ""
    layers: str = ""


@dataclass(frozen=True)
class Verdict:
    """One answer, and the platforms that share it: the same candidates with the same verdicts for the same reasons."""

    selections: tuple[Selection, ...]

    @property
    def selection(self) -> Selection:
        return self.selections[0]

    @cached_property
    def remedies(self) -> dict[int, Remedy]:
        """Rank of each candidate that did not win -> what would make it win."""
        found = {}
        for candidate in self.selection.candidates:
            if not candidate.accepted:
                answers = {remedy(s, s.candidates[candidate.rank - 1]) for s in self.selections}
                if len(answers) == 1 and (answer := answers.pop()) is not None:
                    found[candidate.rank] = answer
        return found

    def asked(self, rank: int, index: int) -> Reason:
        """A reason, with the values of all platforms that share the verdict."""
        reasons = [s.candidates[rank - 1].reasons[index] for s in self.selections]
        first = reasons[0]
        if first.sentence or len({r.asked for r in reasons}) == 1:
            return first
        return dataclasses.replace(first, asked=", ".join(dict.fromkeys(str(r.asked) for r in reasons)))


@dataclass(frozen=True)
class Answer:
    """A question and its verdicts, one for each set of platforms that agree."""

    question: Question
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Explanation:
    """Everything that one run of ``attnreg explain`` says."""

    registry: Registry
    title: str
    answers: tuple[Answer, ...]
    notes: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether every request found a backend on every platform."""
        return all(s.backend for a in self.answers for v in a.verdicts for s in v.selections)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values: each selection with its trace and what would make each other candidate win."""
        return {
            "registry": self.registry.title,
            "title": self.title,
            "notes": list(self.notes),
            "answers": [
                {"label": a.question.label, "layers": a.question.layers, "selections": _selections(a)}
                for a in self.answers
            ],
        }


def _selections(answer: Answer) -> list[dict[str, Any]]:
    out = []
    for verdict in answer.verdicts:
        for selection in verdict.selections:
            data = selection.to_dict()
            for candidate in data["candidates"]:
                found = verdict.remedies.get(candidate["rank"])
                candidate["would_win"] = found.to_dict() if found else None
            out.append(data)
    return out


def explain(
    questions: Iterable[Question],
    platforms: Sequence[Platform],
    registry: Registry,
    *,
    backend: str | None = None,
    title: str = "",
    notes: Iterable[str] = (),
) -> Explanation:
    """Select for every question on every platform; platforms that agree share a verdict.

    Raises `attnreg.request.RequestError` for words that the registry does not know. Nothing valid is an answer, too.
    """
    answers = []
    for question in questions:
        groups: dict[Any, list[Selection]] = {}
        for platform in platforms:
            selection = evaluate(question.request, platform, registry, backend)
            groups.setdefault(_signature(selection), []).append(selection)
        answers.append(Answer(question, tuple(Verdict(tuple(g)) for g in groups.values())))
    return Explanation(registry, title, tuple(answers), tuple(notes))


def _signature(selection: Selection) -> Any:
    """What must be equal for two platforms to share a verdict: everything but the values that were asked."""
    candidates = tuple(
        (c.title, c.emulates, tuple((r.kind, r.facets, r.where, r.sentence) for r in c.reasons))
        for c in selection.candidates
    )
    return selection.order and selection.order.where, selection.backend and selection.backend.name, candidates


# for a person --------------------------------------------------------------------------------------------------------


def render(explanation: Explanation, console: Console) -> None:
    """Print an explanation; it fits any width from 60 columns up."""
    from rich.text import Text

    width = max(console.width, _MIN_WIDTH)
    if explanation.title:
        console.print(Text(explanation.title, style="bold"), soft_wrap=False)
        console.print()
    for answer in explanation.answers:
        head = Text()
        if answer.question.layers:
            head.append(answer.question.layers, style="bold").append("   ")
        head.append(answer.question.label)
        console.print(head)
        for verdict in answer.verdicts:
            for line in _verdict_lines(verdict, width, platforms=len(answer.verdicts) > 1):
                console.print(line, no_wrap=True, overflow="ignore", crop=False)
        console.print()
    for note in explanation.notes:
        console.print(Text(f"note: {note}", style="dim"))


def _verdict_lines(verdict: Verdict, width: int, *, platforms: bool) -> list[Text]:
    from rich.text import Text

    lines = []
    if platforms:
        lines.append(Text(f"{_platform_names(verdict.selections)}", style="cyan"))
    lines.append(_winner_line(verdict.selection))
    lines += [Text(f"  ! {warning}", style="yellow") for warning in verdict.selection.warnings]
    others = [c for c in verdict.selection.candidates if c is not verdict.selection.chosen]
    if others:
        lines += _table(verdict, others, width)
    return lines


def _winner_line(selection: Selection) -> Text:
    from rich.text import Text

    chosen, line = selection.chosen, Text()
    if chosen is None:
        line.append("✗ no backend", style="bold red")
        line.append(f"   {_place(selection)}", style="dim")
        return line
    line.append(f"▸ {chosen.title}", style="bold green")
    total = len(selection.candidates)
    if selection.requested:
        how = "required" if selection.choice else "requested"
        line.append(f"   {how}", style="dim")
        if selection.choice:
            line.append(f" ({selection.choice.where.short})", style="dim")
    else:
        first = "preferred" if selection.choice and chosen.rank == 1 else f"{_ordinal(chosen.rank)} choice of {total}"
        line.append(f"   {first} {_place(selection)}", style="dim")
    return line


def _place(selection: Selection) -> str:
    order = selection.order
    return f"(order {order.title}, {order.where.short})" if order else "(no order for this platform)"


def _table(verdict: Verdict, candidates: list[Candidate], width: int) -> list[Text]:
    """A line for each reason: rank and name, what speaks against it, and the line of data, in three columns."""
    from rich.text import Text

    name_width = max(len(c.title) for c in candidates)
    rank_width = max(len(str(c.rank)) for c in candidates)
    wheres = [r.where.short for c in candidates for r in c.reasons] + [c.where.short for c in candidates]
    where_width = max(map(len, wheres))
    left = 2 + rank_width + 1 + name_width + 2
    room = max(width - left - where_width - 2, 20)
    lines = []
    for candidate in candidates:
        rows = [
            (reason.text, reason.where.short)
            for reason in (verdict.asked(candidate.rank, i) for i in range(len(candidate.reasons)))
        ] or [("valid too, ranked lower", candidate.where.short)]
        style = "dim" if candidate.accepted else ""
        for i, (text, where) in enumerate(rows):
            for j, part in enumerate(_wrap(text, room)):
                line = Text()
                head = f"  {candidate.rank:>{rank_width}} {candidate.title:<{name_width}}  "
                line.append(head if i == j == 0 else " " * left, style="bold" if not candidate.accepted else "dim")
                line.append(part if j else f"{part:<{room}}", style=style)
                if j == 0:
                    line.append(f"  {where}", style="blue")
                line.rstrip()
                lines.append(line)
        found = verdict.remedies.get(candidate.rank)
        if found is not None:
            verb = "would win " if not found.by_name else "would be chosen "
            for j, part in enumerate(_wrap(f"{verb}{found.text}", width - left - 2)):
                lines.append(Text(" " * left + ("↳ " if j == 0 else "  ") + part, style="magenta"))
    return lines


def _wrap(text: str, room: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, room, break_on_hyphens=False, break_long_words=True) or [""]


def _platform_names(selections: Iterable[Selection]) -> str:
    return ", ".join(platform_title(s.platform, s.registry) for s in selections)


def platform_title(platform: Platform, registry: Registry) -> str:
    """``gfx942 (MI300X)``."""
    return registry.vocabulary.architectures[platform.arch].title


def _ordinal(rank: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(rank if rank < 20 else rank % 10, "th")
    return f"{rank}{suffix}"
