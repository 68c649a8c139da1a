"""Explanations as text for a terminal: the winner first, then each other candidate with its lines of data."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attnreg.explain.grouping import Block, blocks
from attnreg.explain.layout import MOST, Column, emit, table, wrapped
from attnreg.packages.proven import unproven_choice
from attnreg.selection.refusal import alternatives
from attnreg.selection.trace import how_chosen
from attnreg.selection.wording import arch_words, place_words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.text import Text

    from attnreg.explain.answers import Answer, Explanation, Verdict
    from attnreg.language.vocabulary import Vocabulary
    from attnreg.models.kv_memory import Memory
    from attnreg.selection.question import Question
    from attnreg.selection.trace import Candidate, Selection

_MIN_WIDTH = 24
_MIN_REASON = 28
_STOPS, _DOUBTS = "a run of these layers does not start", "a run of these layers is partly not known"
# the styles of words that are printed in place of a backend
_STYLES = {"no backend": "bold red", "not known": "bold yellow"}


class _Winner(NamedTuple):
    """The title of a winner, and sentences on what attnreg itself runs, if that is not the winner."""

    title: str
    runs: tuple[str, ...]


def render(explanation: Explanation, console: Console, *, brief: bool = False) -> None:
    """Print an explanation. It fits every width from 40 columns up.

    brief: print the winners alone: one line for each group of layers, or a single line if all groups agree.
    """
    from rich.text import Text

    width = max(console.width, _MIN_WIDTH)
    lines = _texts(wrapped(explanation.title, width), "bold")
    if brief:
        lines += _brief_lines(explanation, width)
    else:
        lines += [Text()] if explanation.title else []
        for block in blocks(explanation.answers):
            for answer in block.answers:
                # the title of a question about one request has the request already
                if not explanation.title.startswith(answer.question.label):
                    lines += _head_lines(answer.question, width)
            for number in range(len(block.verdicts)):
                lines += _verdict_lines(block, number, width)
            lines.append(Text())
        for page in explanation.pages:
            where = f" on {', '.join(arch_words(a, explanation.registry.vocabulary) for a in page.archs)}"
            text = f"{page.sentence}{where if page.archs else ''} ({page.where.short})"
            lines += _texts(wrapped(text, width, "  "))
        lines += [Text()] if explanation.pages else []
    for stop in explanation.stops:
        text = f"✗ {stop.text(_STOPS)}; `attnreg plan` says which facts exclude each other"
        lines += _texts(wrapped(text, width, "  "), "bold red")
    for doubt in explanation.doubts:
        lines += _texts(wrapped(f"? {doubt.text(_DOUBTS)}; `attnreg plan` says more", width, "  "), "yellow")
    if (explanation.stops or explanation.doubts) and not brief:
        lines.append(Text())
    if not brief:
        for memory in explanation.memory:
            if memory.models:
                lines += [*_memory_lines(memory, width, explanation.registry.vocabulary), Text()]
    for note in explanation.notes:
        lines += _texts(wrapped(f"note: {note}", width, "  "), "dim")
    emit(lines, console)


def _texts(lines: Iterable[str], style: str = "") -> list[Text]:
    from rich.text import Text

    return [Text(line, style=style) for line in lines]


def _head_lines(question: Question, width: int) -> list[Text]:
    """The layers and the label of a question."""
    lines = _texts(wrapped("   ".join(filter(None, (question.layers, question.label))), width, "  "))
    if lines:
        lines[0].stylize("bold", 0, len(question.layers))
    return lines


def _brief_lines(explanation: Explanation, width: int) -> list[Text]:
    """A line for each group of layers with the backend that it gets, and the warnings."""
    winners = [(answer, _winners(answer)) for answer in explanation.answers]
    asked = [answer for answer, _ in winners if answer.verdicts]
    members = frozenset[object]().union(*(a.question.members for a in asked))
    lines: list[Text] = []
    # "all 1 layers" would be wrong for a single layer of a model
    if len(members) != 1 and len({tuple(names.items()) for answer, names in winners if answer.verdicts}) == 1:
        which = "attention " if len(asked) < len(winners) else ""
        layers = f"all {len(members)} {which}layers"
        for winner, where in _winners(asked[0]).items():
            lines += _brief_line(winner, f"{where}{f' for {layers}' if members else ''}", width)
    else:
        for answer, names in winners:
            label = f"{answer.question.layers}   {answer.question.label}"
            lines += [] if names else _texts(wrapped(label, width, "  "))
            for winner, where in names.items():
                lines += _brief_line(winner, f"{where} for {label}", width)
    selections = [s for a in asked for v in a.verdicts for s in v.selections]
    # a run that is refused, or not known, has its reason in its last step
    refused = dict.fromkeys(s.started[-1] for s in selections if s.start is not None and s.start.refusal is not None)
    lines += [line for text in refused for line in _texts(wrapped(f"→ {text}", width, "    ", first="  "))]
    warnings = [w for s in selections for w in s.warnings]
    return lines + [line for warning in dict.fromkeys(warnings) for line in _warning_lines(warning, width)]


def _winners(answer: Answer) -> dict[_Winner, str]:
    """Each winner -> where it wins, "" if that is everywhere."""
    places: dict[_Winner, list[str]] = {}
    for verdict in answer.verdicts:
        places.setdefault(_Winner(verdict.selection.title, verdict.runs), []).extend(_platform_titles(verdict))
    return {winner: f" on {', '.join(archs)}" if len(places) > 1 else "" for winner, archs in places.items()}


def _brief_line(winner: _Winner, rest: str, width: int) -> list[Text]:
    name, runs = winner
    lines = _texts(wrapped(f"{name}{rest}", width, "  "))
    lines[0].stylize(_STYLES.get(name, "bold green"), 0, len(name))
    return [*lines, *_run_lines(runs, width)]


def _memory_lines(memory: Memory, width: int, vocabulary: Vocabulary) -> list[Text]:
    """The table of the KV cache: a line for each group of layers, and the total."""
    from attnreg.models.groups import describe_indices

    rank = f" on each of {memory.ranks} ranks" if memory.ranks > 1 else ""
    target, *drafts = (" and ".join(model.kv_dtypes) for model in memory.models)
    title = f"KV cache of one request{rank}, kv_dtype {', draft '.join([target, *(d for d in drafts if d != target)])}"
    title += f" on {', '.join(arch_words(arch, vocabulary) for arch in memory.archs)}" if memory.archs else ""
    headings = ("bytes/token", *(f"{n:,} tokens" for n in memory.lengths))
    rows = []
    for number, model in enumerate(memory.models):
        for part in model.groups:
            name = f"{'draft ' * (number > 0)}{part.group.named or describe_indices(part.group.layers)}"
            stored = part.kv_dtype if len(model.kv_dtypes) > 1 else ""
            rows.append([" · ".join(filter(None, (name, stored, part.remark))), *part.words(memory.lengths)])
    rows.append(["total", *memory.totals()])
    columns = [Column("layers", wraps=True), *(Column(heading, right=True) for heading in headings)]
    return [*_texts(wrapped(title, width), "bold"), *table(columns, rows, width, total=True)]


def _platform_titles(verdict: Verdict) -> list[str]:
    return [place_words(s.platform, s.registry.vocabulary) for s in verdict.selections]


def _warning_lines(warning: str, width: int) -> list[Text]:
    return _texts(wrapped(f"! {warning}", width, "    ", first="  "), "yellow")


def _verdict_lines(block: Block, number: int, width: int) -> list[Text]:
    """The lines of one verdict of a block; if the block has several, the verdict's platforms come first."""
    verdict = block.verdicts[number]
    selection = verdict.selection
    lines: list[Text] = []
    if len(block.verdicts) > 1:
        lines += _texts(wrapped(", ".join(_platform_titles(verdict)), width), "cyan")
    lines += _winner_lines(selection, width)
    names = ", ".join(alternatives(selection))
    if names:
        lines += _texts(wrapped(f"would accept it if asked for by name: {names}", width, "    ", first="  "))
    lines += _run_lines(verdict.runs, width)
    for change in selection.started:
        lines += _texts(wrapped(f"→ {change}", width, "    ", first="  "))
    for warning in selection.warnings:
        lines += _warning_lines(warning, width)
    for fact in selection.facts:
        lines += _texts(wrapped(f"· {fact}", width, "    ", first="  "))
    for text in dict.fromkeys(u.text for s in verdict.selections for u in unproven_choice(s)):
        lines += _texts(wrapped(f"· {text}", width, "    ", first="  "))
    candidates = block.candidates(verdict)
    return lines + (_candidate_lines(block, number, candidates, width) if candidates else [])


def _run_lines(runs: Iterable[str], width: int) -> list[Text]:
    return [line for text in runs for line in _texts(wrapped(f"▹ {text}", width, "    ", first="  "), "cyan")]


def _winner_lines(selection: Selection, width: int) -> list[Text]:
    """The winner and how it was chosen, on one line if there is room."""
    from rich.text import Text

    name = f"{'▸' if selection.chosen else '?' if selection.unknown else '✗'} {selection.title}"
    line = Text(name, style=_STYLES.get(selection.title, "bold green"))
    how = how_chosen(selection)
    if len(name) + 3 + len(how) <= width:
        return [line.append(f"   {how}", style="not bold default dim")]
    return [line, *_texts(wrapped(how, width, "  ", first="  "), "dim")]


def _candidate_lines(block: Block, number: int, candidates: list[Candidate], width: int) -> list[Text]:
    """Rank and name of each candidate, then each reason with its line of data.

    The reasons stand beside the name, or below it if they would have less than 28 columns. The line of data stands
    beside its reason, or below it by the same rule.
    """
    from rich.text import Text

    verdict = block.verdicts[number]
    words = {c.rank: block.words(number, c) for c in candidates}
    reasons = [reason for pairs in words.values() for reason in pairs]
    rank_width = max(len(str(c.rank)) for c in candidates)
    where_width = max(len(where.short) for _, where in reasons)
    left = 2 + rank_width + 1 + max(len(c.title) for c in candidates) + 2
    beside = width - left - where_width - 2 >= _MIN_REASON
    if not beside:
        left = 2 + rank_width + 1
    place_beside = width - left - where_width - 2 >= _MIN_REASON
    room = width - left - (where_width + 2 if place_beside else 0)
    # the lines of data stand near their reasons on a wide terminal too
    room = min(room, MOST, max(len(text) for text, _ in reasons))
    lines = []
    for candidate in candidates:
        head = f"  {candidate.rank:>{rank_width}} {candidate.title}"
        valid = candidate.accepted and candidate.rank not in verdict.selection.failures
        style = "dim" if valid else "bold"
        start = Text(f"{head:<{left}}" if beside else " " * left, style=style)
        if not beside:
            lines.append(Text(head, style=style))
        for text, where in words[candidate.rank]:
            place = f"  {where.short}"
            for part in wrapped(text, room):
                line = start.append(f"{part:<{room}}", style="dim" if valid else "not bold")
                lines.append(line.append(place if place_beside else "", style="not bold blue"))
                start, place = Text(" " * left), "" if place_beside else place
            lines += [] if place_beside else [Text(" " * left + place, style="blue")]
        change = block.remedy(verdict, candidate)
        if change is not None:
            lines += _texts(wrapped(f"↳ {change.sentence}", width, " " * (left + 2), first=" " * left), "magenta")
    return lines
