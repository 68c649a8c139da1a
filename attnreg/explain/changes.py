"""Prints the changes between two registries: moves of layers, all configurations, and model families."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from attnreg.analysis.boxes import facets_text
from attnreg.explain.layout import Column, emit, table, wrapped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from attnreg.analysis.diff import Diff, SelectionChange
    from attnreg.analysis.history import OutcomeRow
    from attnreg.analysis.model_changes import ModelChanges
    from attnreg.analysis.moves import AskedGroup, Move, Moves

_MOST_PAIRS = 6
_MOST_ARCHS = 12
_MOST_NAMES = 3


class MoveGroup(NamedTuple):
    """Moves from one outcome to another for the same reasons.

    Each of ``rows`` has architectures and the models whose layers move on them.
    """

    before: str
    after: str
    changes: tuple[str, ...]
    why: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


def grouped(moves: Moves) -> list[MoveGroup]:
    """The moves in groups with equal outcomes and reasons, in the order of their first moves."""
    alike: dict[tuple[str, str, tuple[str, ...], tuple[str, ...]], list[Move]] = {}
    for move in moves.moves:
        key = move.before.title, move.after.title, move.changes, tuple(map(str, move.why))
        alike.setdefault(key, []).append(move)
    return [MoveGroup(*key, _rows(same, moves.asked)) for key, same in alike.items()]


def _rows(moves: Iterable[Move], asked: Sequence[AskedGroup]) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    archs: dict[AskedGroup, list[str]] = {}
    for move in moves:
        archs.setdefault(move.asked, []).append(move.platform.arch)
    rows: dict[tuple[str, ...], list[AskedGroup]] = {}
    for item, names in archs.items():
        rows.setdefault(tuple(dict.fromkeys(names)), []).append(item)
    return tuple((names, tuple(_models(items, asked))) for names, items in rows.items())


def _models(items: Sequence[AskedGroup], asked: Sequence[AskedGroup]) -> Iterable[str]:
    """Each model's name, with its layers if only some of the model's layers are among the items."""
    for model in dict.fromkeys(item.model for item in items):
        some, every = ([x for x in group if x.model == model] for group in (items, asked))
        layers = ", ".join(dict.fromkeys(" ".join(filter(None, (x.layers, _stage(x)))) for x in some))
        if model:
            yield model if len(some) == len(every) else f"{model} ({layers})"
        else:
            yield some[0].label


def _stage(item: AskedGroup) -> str:
    """``prefill`` for the second request of MLA layers, which have the same indices as the first."""
    request = item.requests[1] or item.requests[0]
    return request.phase if request is not None and request.phase != "any" else ""


def print_changes(
    title: str,
    moves: Moves,
    everywhere: Diff | str | None,
    console: Console,
    *,
    known: bool = False,
    boxes: bool = False,
) -> None:
    """Print the changes: the headline about models, the models that move, then all configurations.

    title: both registries and the question. everywhere: the difference over all configurations, if it is wanted. known:
    whether the models are attnreg's bundled ones, not the user's. boxes: print the boxes of all configurations.
    """
    from rich.text import Text

    console.print(Text(title, style="bold"))
    _print_hanging(console, _headline(moves, everywhere, known), "", "")
    print_moves(moves, console)
    if isinstance(everywhere, str):
        _print_hanging(console, everywhere, "note: ", "dim")
    elif everywhere is not None:
        console.print()
        _print_everywhere(everywhere, console, boxes)


def print_upgrade(title: str, moves: Moves, console: Console, *, known: bool = False) -> None:
    """Print the changes of an upgrade, model by model and layer by layer, with the reasons of both sides.

    known: whether the models are attnreg's bundled ones, not the user's.
    """
    from rich.text import Text

    console.print(Text(title, style="bold"))
    _print_hanging(console, _headline(moves, None, known), "", "")
    _print_refused(moves, console)
    for model in sorted(moves.models, key=lambda name: not any(name in names for names in moves.refused.values())):
        for items, archs, first in _same_answers(moves, model):
            console.print()
            for item in items:
                where = " · ".join(filter(None, (item.model, item.layers, item.label, ", ".join(archs))))
                _print_hanging(console, where, "", "bold", indent=2)
            console.print(Text("  ").append_text(_arrow(first.before.title, first.after.title)))
            for side, sentence in zip(("before", "after"), first.how, strict=True):
                _print_hanging(console, sentence, f"    {side}: ", "", indent=6)
            if first.turns:
                _print_hanging(console, "; ".join(map(str, first.turns)), "    when: ", "", indent=6)
            for line in (*first.changes, *map(str, first.why)):
                _print_hanging(console, line, "    ", "dim", indent=6)
    _print_renamed(moves, console)
    for note in moves.notes:
        _print_hanging(console, note, "note: ", "dim")


def print_outcomes(title: str, names: Sequence[str], rows: Sequence[OutcomeRow], console: Console) -> None:
    """Print the layers whose outcome changes between several registries as one table. names: of the registries."""
    from rich.text import Text

    console.print(Text(title, style="bold"))
    changing: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for row in rows:
        if row.changes:
            layers = " ".join(filter(None, (row.asked.layers, _stage(row.asked)))) or row.asked.label
            changing.setdefault((row.asked.model, layers, tuple(outcome_spans(row, names))), []).append(
                row.platform.arch
            )
    few = sum(row.changes for row in rows)
    _print_hanging(console, f"{few} of {len(rows)} pairs of layers and architectures change", "", "")
    if changing:
        columns = [Column("model", "bold"), Column("layers", wraps=True), Column("on", wraps=True)]
        alike: dict[tuple[str, str, str], list[str]] = {}
        for (model, layers, spans), archs in changing.items():
            alike.setdefault((model, ", ".join(archs), "\n".join(spans)), []).append(layers)
        cells = [[model, "\n".join(layers), on, outcomes] for (model, on, outcomes), layers in alike.items()]
        console.print()
        emit(table([*columns, Column("outcomes", wraps=True)], cells, console.width), console)


def outcome_spans(row: OutcomeRow, names: Sequence[str]) -> list[str]:
    """Successive registries with equal outcomes, as ``FLASH_ATTN: vllm-0.30.0, vllm-0.31.0``."""
    spans: list[tuple[str, list[str]]] = []
    before = None
    for title, differs, name in zip(row.titles, row.differs, names, strict=True):
        if title != before or differs:
            spans.append((f"{title} ({differs})" if differs else title, []))
        spans[-1][1].append(name)
        before = title
    return [f"{outcome}: {', '.join(some)}" for outcome, some in spans]


def _print_refused(moves: Moves, console: Console) -> None:
    """Print the models that no longer start, each reason once."""
    ran = {move.asked.model for move in moves.moves if not move.before.problem}
    for text, models in moves.refused.items():
        names, one = ", ".join(filter(None, models)) or "the request", len(models) == 1
        verb = f"no longer start{'s' * one}" if ran & {*models} else f"do{'es' * one} not start"
        _print_hanging(console, f"{names} {verb}: {text}", "", "bold red")


def _same_answers(moves: Moves, model: str) -> list[tuple[list[AskedGroup], list[str], Move]]:
    """The layers of a model that move alike on the same architectures, with these, and one of their moves."""
    archs: dict[tuple[object, ...], dict[AskedGroup, list[str]]] = {}
    firsts: dict[tuple[object, ...], Move] = {}
    for move in moves.moves:
        if move.asked.model == model:
            key = move.before.title, move.after.title, move.changes, move.how, tuple(map(str, (*move.turns, *move.why)))
            archs.setdefault(key, {}).setdefault(move.asked, []).append(move.platform.arch)
            firsts.setdefault(key, move)
    out = []
    for answers, by_item in archs.items():
        alike: dict[tuple[str, ...], list[AskedGroup]] = {}
        for item, names in by_item.items():
            alike.setdefault(tuple(dict.fromkeys(names)), []).append(item)
        out += [(items, list(names), firsts[answers]) for names, items in alike.items()]
    return out


def print_moves(moves: Moves, console: Console) -> None:
    """Print the models that no longer start, the groups of moves, each with its reasons, the renames and the notes."""
    from rich.text import Text

    _print_refused(moves, console)
    for group in grouped(moves):
        console.print()
        head = _arrow(group.before, group.after) if group.before != group.after else Text(group.after, style="bold")
        console.print(head)
        for line in group.changes:
            _print_hanging(console, line, "  also  " if group.before != group.after else "  ", "")
        for line in group.why:
            _print_hanging(console, line, "  ", "dim", indent=4)
        for archs, models in group.rows:
            _print_hanging(console, ", ".join(models), f"  {', '.join(archs)}: ", "", indent=4)
    _print_renamed(moves, console)
    for note in moves.notes:
        _print_hanging(console, note, "note: ", "dim")


def _headline(moves: Moves, everywhere: Diff | str | None, known: bool) -> str:
    """``2 of 24 known models move on sm100, sm103 (7 architectures compared)``; where none moves, whether all stays.

    known: whether the models are attnreg's bundled ones, not the user's.
    """
    others = () if everywhere is None or isinstance(everywhere, str) else everywhere.changes
    models, compared = moves.models, list(dict.fromkeys(platform.arch for platform in moves.platforms))
    moving = {move.asked.model for move in moves.moves}
    where = f"({len(compared)} architecture{'s' * (len(compared) != 1)} compared)"
    changed = {move.platform.arch for move in moves.moves}
    if moving:
        where = f"on {_archs_words(changed, compared)} {where}"
    if len(models) == 1:
        still = "is not known to move" if moves.unknown else "does not move"
        text = f"{models[0] or 'the request'} {'moves' if moving else still} {where}"
    else:
        noun = f"of {len(models)} {'known ' * known}models move{'s' * (len(moving) < 2)}"
        text = f"{len(moving) or 'none'} {noun} {where}"
    elsewhere = {arch for change in others for arch in change.archs} - changed
    if elsewhere:
        return f"{text}; other configurations change on {_archs_words(elsewhere, compared)}"
    if moving or others:
        return text
    return f"nothing {'is known to change' if moves.unknown else 'changes'}: {text}"


def _archs_words(archs: set[str], compared: Sequence[str]) -> str:
    """``sm100, sm103``, ``all 25 architectures`` or ``13 of 25 architectures``."""
    if len(archs) <= _MOST_ARCHS:
        return ", ".join([*(arch for arch in compared if arch in archs), *sorted(archs - set(compared))])
    return f"{'all' if archs >= set(compared) else f'{len(archs)} of'} {len(compared)} architectures"


def _print_renamed(moves: Moves, console: Console) -> None:
    """Print each renamed variant with the number of models that keep its kernel."""
    alike: dict[tuple[str, str, str], dict[str, None]] = {}
    for move in moves.renamed:
        names = move.before.title, move.after.title, move.why[0].where.short if move.why[0].where else ""
        alike.setdefault(names, {})[move.asked.model or "the request"] = None
    for (before, after, where), models in alike.items():
        of = ", ".join(models) if len(models) <= _MOST_NAMES else f"{len(models)} models"
        text = f"{before} is {after} now, the same kernel ({where}): {of}"
        _print_hanging(console, text, "renamed: ", "dim")


def _print_everywhere(difference: Diff, console: Console, boxes: bool) -> None:
    """Print the pairs of backends between which configurations move; with ``boxes`` their boxes and counts."""
    from rich.text import Text

    for registry, words in ((difference.before, difference.gone), (difference.after, difference.new)):
        if words:
            text = "; ".join(f"{facet} {', '.join(names)}" for facet, names in words.items())
            _print_hanging(console, text, f"only {registry.name} knows ", "dim")
    pairs = len(difference.changes)
    if not pairs:
        console.print(Text("all configurations: none gets another backend"))
        return
    noun = f"{pairs} pair{'s' * (pairs != 1)} of backends"
    if boxes:
        counts = f"{difference.count:,} of {difference.size:,} distinguishable configurations change"
        _print_hanging(console, f"{counts}, between {noun}", "all configurations: ", "")
        for change in difference.changes:
            _print_boxes(change, console)
        return
    narrow = ", and --arch, --kv-dtype and their like narrow the question" if pairs > _MOST_PAIRS else ""
    hint = f"--boxes lists the values of what changes{narrow}"
    _print_hanging(console, f"{noun} change{'s' * (pairs == 1)}; {hint}", "all configurations: ", "")
    for change in difference.changes if pairs <= _MOST_PAIRS else ():
        facets = [(name, text) for name, text in change.frame if name != "arch"]
        console.print(Text("  ").append_text(_arrow(change.before or "none", change.after or "none")))
        _print_hanging(console, facets_text([("on", ", ".join(change.archs)), *facets]), "    ", "dim")


def _print_boxes(change: SelectionChange, console: Console) -> None:
    from rich.text import Text

    console.print()
    head = _arrow(change.before or "none", change.after or "none")
    console.print(
        head.append(f"   {change.kind} · {change.count:,} configuration{'s' * (change.count != 1)}", style="dim")
    )
    _print_hanging(console, facets_text(change.frame), "  where ", "dim")
    for region in change.regions if len(change.regions) > 1 or any(r.facets for r in change.regions) else ():
        _print_hanging(console, f"{region.text} ({region.count:,})", "  • ", "")
    if change.rest:
        console.print(Text(f"  … and {change.rest:,} more (--limit shows more boxes)", style="dim"))


def print_model_changes(changes: ModelChanges, console: Console) -> None:
    """Print the model families whose descriptions change between two registries; nothing if none changes."""
    from rich.text import Text

    lines = changes.lines()
    if lines:
        console.print()
        console.print(Text("model families", style="bold"))
    for line in lines:
        _print_hanging(console, line, "  • ", "")


def _arrow(before: str, after: str) -> Text:
    from rich.text import Text

    lost = after in ("none", "not known")
    head = Text(before, style="bold red" if lost else "red").append(" → ")
    return head.append(after, style="bold red" if lost else "green")


def _print_hanging(console: Console, text: str, head: str, style: str, indent: int | None = None) -> None:
    """Print ``head`` and a text; further lines are indented by the width of ``head``, or by ``indent``."""
    from rich.text import Text

    for line in wrapped(text, console.width, " " * (len(head) if indent is None else indent), first=head):
        console.print(Text(line, style=style))
