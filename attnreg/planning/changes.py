"""Changes of options after which a run starts: each is evaluated before it is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from attnreg.errors import RequestError
from attnreg.models.fields import ConfigError
from attnreg.planning.plan import Plan, RunChange

if TYPE_CHECKING:
    from attnreg.planning.evaluate import Run

    Evaluate = Callable[[Run], Plan]

# the most changes that are named, and the most of one option
MOST, _MOST_EACH = 6, 3
# an option and its value; None leaves it out
_Setting = tuple[str, str | None]


def changes_of(run: Run, plan: Plan, evaluate: Evaluate) -> tuple[RunChange, ...]:
    """The changes after which a run starts that does not start as it is: one option, or two if one is not enough."""
    # how much fits is known only at most
    if not plan.conflicts or (plan.fit is not None and plan.fit.requests == 0):
        return ()
    single = list(_settings(run, plan))
    found = list(_tried(run, ((setting,) for setting in single), evaluate))
    # another KV dtype changes what the model computes
    if len(found) < _MOST_EACH:
        found += _tried(run, ((setting,) for setting in _kv_dtypes(run)), evaluate)
    if not found:
        targets, drafts = ([s for s in single if s[0] == name and s[1]] for name in ("--backend", "--draft-backend"))
        found = list(_tried(run, ((a, b) for a in targets for b in drafts), evaluate))
    return tuple(found[:MOST])


def _tried(run: Run, several: Iterable[tuple[_Setting, ...]], evaluate: Evaluate) -> Iterator[RunChange]:
    counts: dict[tuple[str, ...], int] = {}
    for settings in several:
        names = tuple(name for name, _ in settings)
        if counts.get(names, 0) >= _MOST_EACH:
            continue
        changed = run
        for name, value in settings:
            changed = _changed(changed, name, value)
        try:
            starts = evaluate(changed).starts
        except (ConfigError, RequestError):
            continue
        if starts:
            counts[names] = counts.get(names, 0) + 1
            yield RunChange(settings)


def _settings(run: Run, plan: Plan) -> Iterator[_Setting]:
    """Single options to change, those that change least first."""
    given = run.options.given
    for name, value in (("--layout", run.layout), ("--graphs", run.graphs), ("--connector-layout", run.connector)):
        if value is not None:
            yield name, None
    if given.get("block_size") is not None:
        yield "--block-size", None
    if run.draft_backend is not None:
        yield "--draft-backend", None
    if run.backend is not None:
        yield "--backend", None
    if run.options.draft is not None:
        yield from (("--draft-backend", name) for name in _others(plan, draft=True) if name != run.draft_backend)
    yield from (("--backend", name) for name in _others(plan, draft=False) if name != run.backend)
    if run.options.draft is not None:
        yield "--draft", None


def _kv_dtypes(run: Run) -> Iterator[_Setting]:
    stated = run.options.given.get("kv_dtype") or "auto"
    for word in dict.fromkeys(("auto", *run.registry.vocabulary.words["kv_dtypes"])):
        if word != stated:
            yield "--kv-dtype", word


def _others(plan: Plan, *, draft: bool) -> list[str]:
    """The backends of the target's or the draft's layers that are not chosen, in the order in which they are tried."""
    groups = [g for g in plan.groups if g.cache.draft is draft and g.run.takes_part and g.run.selection is not None]
    selections = [group.run.selection for group in groups if group.run.selection is not None]
    chosen = {s.backend.name for s in selections if s.backend is not None}
    names = dict.fromkeys(c.name for s in selections for c in s.candidates)
    # a named backend is the only candidate: any backend of the platform may take its place
    if any(selection.requested for selection in selections):
        orders = [selection.order for selection in selections if selection.order is not None]
        names |= dict.fromkeys(entry.backend.partition("/")[0] for order in orders for entry in order.entries)
    return [name for name in names if len(chosen) > 1 or name not in chosen]


def _changed(run: Run, name: str, value: str | None) -> Run:
    """The run after one option is changed."""
    if name in ("--layout", "--graphs", "--connector-layout", "--backend", "--draft-backend"):
        field = name.removeprefix("--").replace("-", "_").removesuffix("_layout")
        return dataclasses.replace(run, **{field: value})  # type: ignore[arg-type]
    if name == "--draft":
        options = dataclasses.replace(run.options, draft=None, draft_given={})
        return dataclasses.replace(run, options=options, draft_backend=None, speculative_tokens=None)
    facet = name.removeprefix("--").replace("-", "_")
    return dataclasses.replace(run, options=run.options.with_given({facet: value}))
