"""Prints a plan: one screen, the verdict first, each line with its place in the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from attnreg.explain.layout import Column, emit, table, wrapped
from attnreg.models.groups import describe_indices
from attnreg.planning.plan import layers_of, verdict
from attnreg.selection.question import UNREAD
from attnreg.selection.wording import readable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from attnreg.errors import Location
    from attnreg.planning.memory import MemoryFit
    from attnreg.planning.plan import Plan, PlanGroup
    from attnreg.planning.run import Agreed, Conflict

_MIN_WIDTH = 24
_HEAD = 10
_STYLES = {True: "bold green", False: "bold red", None: "bold yellow"}


def render(plan: Plan, console: Console) -> None:
    """Print a plan. It fits every width from 40 columns up."""
    from rich.text import Text

    width = max(console.width, _MIN_WIDTH)
    lines = _texts(wrapped(plan.title, width), "bold")
    lines += [Text(verdict(plan), style=_STYLES[plan.starts]), Text()]
    lines += _groups(plan, width)
    for conflict in plan.conflicts:
        lines += [Text(), *_conflict(conflict, width)]
    lines += [
        line
        for change in plan.changes
        for line in _texts(wrapped(f"↳ {change.sentence}", width, "    ", first="  "), "magenta")
    ]
    lines.append(Text())
    for name, text, where in _shared(plan):
        lines += _said(name, text, where, width)
    page = plan.page.sentence if plan.page is not None else ""
    unknown = [said for said in plan.unknown if said.text != page]
    lines += _texts((line for said in unknown for line in wrapped(f"? {said.line}", width, "  ")), "yellow")
    if plan.notes:
        lines.append(Text())
    for note in plan.notes:
        lines += _texts(wrapped(f"note: {note}", width, "  "), "dim")
    emit(lines, console)


def _texts(lines: Iterable[str], style: str = "") -> list[Text]:
    from rich.text import Text

    return [Text(line, style=style) for line in lines]


def _groups(plan: Plan, width: int) -> list[Text]:
    """The table of the groups: layers, backend, block, layouts and graphs, where the data has them."""
    alike: dict[object, list[PlanGroup]] = {}
    for group in plan.groups:
        alike.setdefault((_cells(group), group.run.role, group.cache.draft), []).append(group)
    rows = [[layers_of(same), *_cells(same[0])] for same in alike.values()]
    headings = ("layers", "backend", "blocks", "layouts", "graphs", "data")
    kept = [i for i in range(len(headings)) if i < 2 or any(row[i] for row in rows)]
    columns = [Column(headings[i], wraps=i == 0) for i in kept]
    return table(columns, [[row[i] for i in kept] for row in rows], width) if rows else []


def _cells(group: PlanGroup) -> tuple[str, ...]:
    """The cells of a group after its layers; groups of the target and of its draft or towers have different ones."""
    selection, prompts = group.run.selection, group.prompts
    if selection is None:
        title, place = "not known" if group.run.kind == UNREAD else group.label.partition(" · ")[0], ""
    else:
        title = selection.title
        place = selection.chosen.where.short if selection.chosen is not None else ""
    if prompts is not None and selection is not None and prompts.title != selection.title:
        title = f"{title}\nprompts {prompts.title}"
    layouts = group.layouts.text if group.layouts is not None else ""
    graphs = group.graphs.text if group.graphs is not None else ""
    return title, str(group.block or ""), layouts, graphs, place


def _conflict(conflict: Conflict, width: int) -> list[Text]:
    """The reason why the run does not start, and each fact with its line of data."""
    lines = _texts(wrapped(f"✗ {conflict.sentence}", width, "  "), "bold red")
    for fact in conflict.facts:
        of = f"{fact.group}: " if fact.group else ""
        place = f" ({fact.where.short})" if fact.where is not None else ""
        lines += _texts(wrapped(f"{of}{fact.sentence}{place}", width, "    ", first="  "))
    return lines


def _shared(plan: Plan) -> Iterator[tuple[str, str, Location | None]]:
    """What the run has in common: a name, a sentence and its line of data."""
    page = plan.page
    if page is not None and (page.tokens is not None or not plan.conflicts):
        tokens = "not known" if page.tokens is None else f"{page.tokens} token{'s' * (page.tokens != 1)}"
        yield "page", f"{tokens}, {page.text}", page.where
    for block, where, remark in dict.fromkeys((g.block, g.block_where, g.block_remark) for g in plan.groups):
        if remark:
            yield "blocks", f"{block} tokens; {remark}", where
    if plan.layout is not None and (plan.layout.value or not plan.conflicts):
        yield from _agreed("layout", plan.layout)
    if plan.graphs is not None and (plan.graphs.value or not plan.conflicts):
        yield from _agreed("graphs", plan.graphs)
    told = [(s, f) for g in plan.groups for s in (g.run.selection, g.prompts) if s for f in s.consequences]
    yield from dict.fromkeys(("runs", f"{s.title}: {f.text}", f.where) for s, f in told if f.kind == "runs")
    for backend, size, where in plan.workspaces:
        yield "workspace", f"{readable(size)} for {backend} on each GPU", where
    if page is not None and page.states is not None and page.states.request_bytes is not None:
        yield "states", f"{readable(page.states.request_bytes)} for each request", page.states.where
    yield from _cache(plan)
    if plan.fit is not None:
        yield "fits", _fits(plan.fit, plan), plan.fit.where


def _agreed(name: str, agreed: Agreed) -> Iterator[tuple[str, str, Location | None]]:
    """The value and why, then what the engine drops; without the value where the last of these says it."""
    said = any(dropped.endswith(agreed.text) for dropped in agreed.dropped[-1:])
    lines = [] if said or agreed.conflict is not None else [f"{agreed.value or 'not known'}, {agreed.text}"]
    for number, line in enumerate((*lines, *agreed.dropped)):
        yield "" if number else name, line, agreed.where


def _cache(plan: Plan) -> Iterator[tuple[str, str, Location | None]]:
    """The bytes of KV cache of a token on a rank, stage by stage."""
    if not any(stage.at_least or stage.bytes_per_token is None for stage in plan.stages):
        if plan.stages:
            yield "KV cache", "no layer keeps one", None
        return
    ranks = f" on each of {plan.ranks} ranks" if plan.ranks > 1 else ""
    spread = f", spread over {plan.dcp} of them" if plan.dcp > 1 else ""
    for number, stage in enumerate(plan.stages):
        of = ""
        if len(plan.stages) > 1:
            draft = " and the draft's" if stage.draft_layers else ""
            of = f"; stage {number + 1} has layers {describe_indices(stage.layers)}{draft}"
        yield "KV cache" if not number else "", f"{stage.words}{ranks}{spread}{of}", plan.stages_where


def _fits(fit: MemoryFit, plan: Plan) -> str:
    """What fits in the memory of a GPU, and how much of it is left for the cache."""
    taken = [f"{readable(fit.weight_bytes)} of weights"]
    taken += [f"{readable(fit.workspace_bytes)} of workspaces"] if fit.workspace_bytes else []
    left = f"{readable(fit.gpu_bytes)} × {fit.share:g} − {' − '.join(taken)} = {readable(max(fit.cache_bytes, 0))}"
    if fit.requests is None or fit.tokens is None:
        return f"{left} for the KV cache, at most"
    what = f"at most {fit.requests:,} requests of {fit.length:,} tokens, or one of {fit.tokens:,}"
    return f"{what}; {left}. Activations and graphs take more, which is not counted"


def _said(name: str, text: str, where: Location | None, width: int) -> list[Text]:
    place = f" ({where.short})" if where is not None else ""
    lines = _texts(wrapped(f"{text}{place}", width, " " * _HEAD, first=f"{name:<{_HEAD}}"))
    if lines:
        lines[0].stylize("bold", 0, len(name))
    return lines
