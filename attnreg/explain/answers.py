"""Selections rendered for a person or a program: the answer first, then every verdict with its line of data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attnreg.selection.refusal import alternatives, full_dict
from attnreg.selection.remedies import Remedy, remedy
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import Candidate, Reason, Selection

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from attnreg.models.kv_memory import Memory
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.selection.question import Question

_MIN_WIDTH = 60
_MIN_REASON = 28
PLATFORM_NAMES = {"cuda": "CUDA", "rocm": "ROCm", "xpu": "XPU", "cpu": "CPU"}


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
    memory: Memory | None = None

    @property
    def found(self) -> bool:
        """Whether every request found a backend on every platform."""
        return all(s.backend for a in self.answers for v in a.verdicts for s in v.selections)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values: each selection with its trace and what would make each other candidate win."""
        memory = {} if self.memory is None else {"kv_cache": self.memory.to_dict()}
        return {
            "registry": self.registry.title,
            "title": self.title,
            "notes": list(self.notes),
            "answers": [
                {"label": a.question.label, "layers": a.question.layers, "selections": _selections(a)}
                for a in self.answers
            ],
            **memory,
        }


def _selections(answer: Answer) -> list[dict[str, Any]]:
    out = []
    for verdict in answer.verdicts:
        for selection in verdict.selections:
            data = full_dict(selection)
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
    memory: Memory | None = None,
) -> Explanation:
    """Select for every question on every platform; platforms that agree share a verdict.

    Raises `attnreg.RequestError` for words that the registry does not know. Nothing valid is an answer, too.
    """
    answers = []
    for question in questions:
        groups: dict[Any, list[Selection]] = {}
        for platform in platforms:
            if question.request is None:
                break
            selection = evaluate(question.request, platform, registry, backend)
            groups.setdefault(_signature(selection), []).append(selection)
        answers.append(Answer(question, tuple(Verdict(tuple(g)) for g in groups.values())))
    return Explanation(registry, title, tuple(answers), tuple(notes), memory)


def _signature(selection: Selection) -> Any:
    """What must be equal for two platforms to share a verdict: everything but the values that were asked."""
    candidates = tuple(
        (c.title, c.emulates, tuple((r.kind, r.facets, r.where, r.sentence) for r in c.reasons))
        for c in selection.candidates
    )
    winner, order, choice = selection.backend, selection.order, selection.choice
    return winner and winner.name, order and order.where, choice and choice.where, candidates


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
    if explanation.memory is not None and explanation.memory.models:
        _print_memory(explanation.memory, console)
    for note in explanation.notes:
        console.print(Text(f"note: {note}", style="dim"))


def _print_memory(memory: Memory, console: Console) -> None:
    """A table of the KV cache: a line for each group, and the total."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from attnreg.models.groups import describe_indices
    from attnreg.models.kv_memory import readable

    rank = f" on each of {memory.ranks} ranks" if memory.ranks > 1 else ""
    title = f"KV cache of one request{rank}, kv_dtype {memory.models[0].kv_dtype}"
    table = Table(
        box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, collapse_padding=True
    )
    table.add_column("layers", ratio=1)
    for heading in ("bytes/token", *(f"{n:,} tokens" for n in memory.lengths)):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, model in enumerate(memory.models):
        for found in model.groups:
            name = f"{'draft ' * (number > 0)}{describe_indices(found.group.layers)}"
            keeps = f"keeps {found.keeps:,} tokens" if found.keeps is not None else found.what
            sizes = [f"{found.token_bytes:,}", *(readable(found.at(n)) for n in memory.lengths)]
            table.add_row(" · ".join(filter(None, (name, keeps))), *(sizes if not found.what else ["–"] * len(sizes)))
    total = sum(model.token_bytes for model in memory.models)
    sizes = [readable(sum(model.at(n) for model in memory.models)) for n in memory.lengths]
    table.add_section()
    table.add_row("total", f"{total:,}", *sizes, style="bold")
    console.print(table)


def _verdict_lines(verdict: Verdict, width: int, *, platforms: bool) -> list[Text]:
    from rich.text import Text

    selection = verdict.selection
    lines = []
    if platforms:
        names = ", ".join(platform_title(s.platform, s.registry) for s in verdict.selections)
        lines += [Text(part, style="cyan") for part in _wrap(names, width)]
    lines += _winner_lines(selection, width)
    names = ", ".join(alternatives(selection))
    if names:
        lines += [Text(part) for part in _wrap(f"  would accept it if asked for by name: {names}", width, "    ")]
    for warning in selection.warnings:
        lines += [Text(part, style="yellow") for part in _wrap(f"  ! {warning}", width, "    ")]
    others = [c for c in selection.candidates if c is not selection.chosen]
    if others:
        lines += _table(verdict, others, width)
    return lines


def _winner_lines(selection: Selection, width: int) -> list[Text]:
    """The answer, and how it was come to; on one line where there is room."""
    from rich.text import Text

    chosen = selection.chosen
    name = f"▸ {chosen.title}" if chosen else "✗ no backend"
    line = Text(name, style="bold green" if chosen else "bold red")
    how = _how(selection, chosen)
    if len(name) + 3 + len(how) <= width:
        return [line.append(f"   {how}", style="not bold default dim")]
    return [line, *(Text(part, style="dim") for part in _wrap(f"  {how}", width, "  "))]


def _how(selection: Selection, chosen: Candidate | None) -> str:
    choice = selection.choice
    if chosen is None or selection.requested:
        how = "" if not selection.requested else "required" if choice else "requested"
        return f"{how} ({choice.where.short})" if choice and selection.requested else how or _place(selection)
    preferred = choice is not None and chosen.rank == 1
    first = "preferred" if preferred else f"{_ordinal(chosen.rank)} choice of {len(selection.candidates)}"
    return f"{first} {_place(selection)}"


def _place(selection: Selection) -> str:
    order = selection.order
    return f"(order {order.title}, {order.where.short})" if order else "(no order for this platform)"


def _table(verdict: Verdict, candidates: list[Candidate], width: int) -> list[Text]:
    """Rank and name of each candidate, then a line for each reason and its line of data: beside the name or below."""
    from rich.text import Text

    rank_width = max(len(str(c.rank)) for c in candidates)
    name_width = max(len(c.title) for c in candidates)
    wheres = [r.where.short for c in candidates for r in c.reasons] + [c.where.short for c in candidates]
    where_width = min(max(map(len, wheres)), width // 3)
    left = 2 + rank_width + 1 + name_width + 2
    beside = width - left - where_width - 2 >= _MIN_REASON
    if not beside:
        left = 2 + rank_width + 1
    room = width - left - where_width - 2
    lines = []
    for candidate in candidates:
        head = f"  {candidate.rank:>{rank_width}} {candidate.title}"
        style = "dim" if candidate.accepted else "bold"
        start = Text(f"{head:<{left}}" if beside else " " * left, style=style)
        if not beside:
            lines.append(Text(head, style=style))
        for text, where in _rows(verdict, candidate):
            for part in _wrap(text, room):
                line = start.append(f"{part:<{room}}", style="not bold" if candidate.reasons else "dim")
                line.append(f"  {_clipped(where, where_width)}", style="not bold blue" if where else "")
                line.rstrip()
                lines.append(line)
                start, where = Text(" " * left), ""
        found = verdict.remedies.get(candidate.rank)
        if found is not None:
            verb = "would be chosen" if found.by_name else "would win"
            parts = _wrap(f"↳ {verb} {found.text}", width - left, "  ")
            lines += [Text(" " * left + part, style="magenta") for part in parts]
    return lines


def _rows(verdict: Verdict, candidate: Candidate) -> list[tuple[str, str]]:
    """What speaks against a candidate, and the line of data that says so."""
    reasons = [verdict.asked(candidate.rank, i) for i in range(len(candidate.reasons))]
    return [(r.text, r.where.short) for r in reasons] or [("valid too, ranked lower", candidate.where.short)]


def _clipped(text: str, width: int) -> str:
    """The end of a text that is too wide: there is the number of the line."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def _wrap(text: str, width: int, hanging: str = "") -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, break_on_hyphens=False, subsequent_indent=hanging)


def platform_title(platform: Platform, registry: Registry) -> str:
    """``gfx942 (MI300X)``."""
    return registry.vocabulary.architectures[platform.arch].title


def _ordinal(rank: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(rank if rank < 20 else rank % 10, "th")
    return f"{rank}{suffix}"
