"""Explanations as text for a terminal: the winner first, then each other candidate with its lines of data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnreg.selection.refusal import alternatives
from attnreg.selection.trace import how_chosen, verdict_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from attnreg.explain.answers import Explanation, Verdict
    from attnreg.models.kv_memory import Memory
    from attnreg.selection.trace import Candidate, Selection

_MIN_WIDTH = 60
_MIN_REASON = 28


def render(explanation: Explanation, console: Console) -> None:
    """Print an explanation. It fits every width from 60 columns up."""
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
    """Print the table of the KV cache: a line for each group of layers, and the total."""
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
        for part in model.groups:
            name = f"{'draft ' * (number > 0)}{describe_indices(part.group.layers)}"
            keeps = f"keeps {part.keeps:,} tokens" if part.keeps is not None else part.what
            sizes = [f"{part.token_bytes:,}", *(readable(part.at(n)) for n in memory.lengths)]
            table.add_row(" · ".join(filter(None, (name, keeps))), *(sizes if not part.what else ["–"] * len(sizes)))
    total = sum(model.token_bytes for model in memory.models)
    sizes = [readable(sum(model.at(n) for model in memory.models)) for n in memory.lengths]
    table.add_section()
    table.add_row("total", f"{total:,}", *sizes, style="bold")
    console.print(table)


def _verdict_lines(verdict: Verdict, width: int, *, platforms: bool) -> list[Text]:
    """The lines of a verdict; with ``platforms`` its platforms stand above it."""
    from rich.text import Text

    selection = verdict.selection
    lines = []
    if platforms:
        names = ", ".join(s.registry.vocabulary.architectures[s.platform.arch].title for s in verdict.selections)
        lines += [Text(part, style="cyan") for part in wrapped(names, width)]
    lines += _winner_lines(selection, width)
    names = ", ".join(alternatives(selection))
    if names:
        lines += [Text(part) for part in wrapped(f"  would accept it if asked for by name: {names}", width, "    ")]
    for warning in selection.warnings:
        lines += [Text(part, style="yellow") for part in wrapped(f"  ! {warning}", width, "    ")]
    others = [c for c in selection.candidates if c is not selection.chosen]
    if others:
        lines += _candidate_lines(verdict, others, width)
    return lines


def _winner_lines(selection: Selection, width: int) -> list[Text]:
    """The winner and how it was chosen, on one line where there is room."""
    from rich.text import Text

    chosen = selection.chosen
    name = f"▸ {chosen.title}" if chosen else "✗ no backend"
    line = Text(name, style="bold green" if chosen else "bold red")
    how = how_chosen(selection)
    if len(name) + 3 + len(how) <= width:
        return [line.append(f"   {how}", style="not bold default dim")]
    return [line, *(Text(part, style="dim") for part in wrapped(f"  {how}", width, "  "))]


def _candidate_lines(verdict: Verdict, candidates: list[Candidate], width: int) -> list[Text]:
    """Rank and name of each candidate, then each reason with its line of data.

    The reasons stand beside the name, or below it where less than 28 columns would be left.
    """
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
        reasons = [verdict.reason(candidate.rank, i) for i in range(len(candidate.reasons))]
        for text, location in verdict_words(candidate, reasons):
            where = location.short
            for part in wrapped(text, room):
                line = start.append(f"{part:<{room}}", style="not bold" if candidate.reasons else "dim")
                line.append(f"  {_clipped(where, where_width)}", style="not bold blue" if where else "")
                line.rstrip()
                lines.append(line)
                start, where = Text(" " * left), ""
        change = verdict.remedies.get(candidate.rank)
        if change is not None:
            verb = "would be chosen" if change.by_name else "would win"
            parts = wrapped(f"↳ {verb} {change.text}", width - left, "  ")
            lines += [Text(" " * left + part, style="magenta") for part in parts]
    return lines


def _clipped(text: str, width: int) -> str:
    """A location of at most ``width`` characters. The end is kept, because it has the line number."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def wrapped(text: str, width: int, hanging: str = "", *, first: str = "") -> list[str]:
    """The lines of a text, at most ``width`` wide: the first is indented by ``first``, all others by ``hanging``."""
    import textwrap

    return textwrap.wrap(text, width, break_on_hyphens=False, initial_indent=first, subsequent_indent=hanging)
