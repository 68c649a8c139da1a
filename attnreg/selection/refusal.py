"""NoBackendError: no backend accepts a request. Its text has the reasons, and the backends to ask for by name."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from attnreg.language.vocabulary import NAMED
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import trace_lines

if TYPE_CHECKING:
    from attnreg.selection.trace import Selection


class NoBackendError(LookupError):
    """Raised where no backend accepts the request. ``selection`` has the whole trace; its ``backend`` is None.

    ``alternatives`` and the text are computed at first use, because they need further selections.
    """

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        super().__init__(selection)

    def __str__(self) -> str:
        return refusal_text(self.selection, self.alternatives)

    @cached_property
    def alternatives(self) -> tuple[str, ...]:
        """The backends that serve the request if a user names them, those of the order first."""
        return alternatives(self.selection)


def alternatives(selection: Selection) -> tuple[str, ...]:
    """The backends that accept a refused request if a user names them, those of the order first.

    Backends with which the engine then fails are left out. If the user named a variant, its backend is listed with the
    variant that accepts.
    """
    # a registry without data for the platform has rows of another release
    if selection.backend is not None or selection.silence:
        return ()
    request, platform, registry = selection.request, selection.platform, selection.registry
    ordered = [entry.row for entry in selection.order.entries] if selection.order else []
    rows = [registry.backends[name] for name in dict.fromkeys([*ordered, *registry.backends])]
    names = [r.name for r in rows if platform.platform in r.platforms and request.attention in r.attention]
    by_name = ((name, evaluate(request, platform, registry, name, unloadable=selection.unloadable)) for name in names)
    selected = [(name, selected.backend) for name, selected in by_name if not selected.fails]
    variant_of = (selection.requested or "").partition("/")[0] if selection.requested not in registry.backends else ""
    return tuple(
        f"{name}/{backend.variant}" if name == variant_of else name
        for name, backend in selected
        # a fallback may have chosen a backend other than the named one
        if backend and backend.name == name
    )


def refusal_text(selection: Selection, alternatives: tuple[str, ...]) -> str:
    """The text of a refusal: a line for each reason, and the backends that would accept."""
    where = f"{selection.platform.platform} {selection.platform.arch}"
    order, nearest, start = selection.order, selection.nearest, selection.start
    refusal = start.refusal if start is not None else None
    if refusal is not None:
        what = "The answer is not known" if selection.unknown else "The run is refused"
        first = f"{what} on {where}: {refusal.text} ({refusal.name}, {refusal.where.short})"
    elif start is not None and start.named is not None:
        named = f"{start.facts[NAMED]}, which {start.named.name} names ({start.named.where.short}),"
        first = f"{named} does not accept this request on {where}:"
    elif selection.requested:
        first = f"{selection.requested} does not accept this request on {where}:"
    elif order:
        first = f"No backend accepts this request on {where} (order `{order.title}`, {order.where.short}):"
    elif selection.silence:
        first = f"The answer is not known on {where}: {selection.silence}"
    else:
        first = f"{selection.registry.title} has no order for this request on {where}."
    lines = [first, *(f"  {line}" for line in trace_lines(selection))]
    if alternatives:
        by_name = "would accept it" if selection.requested else "would accept it if asked for by name"
        lines.append(f"  help: {by_name}: {', '.join(alternatives)}")
    elif selection.requested:
        lines.append("  help: no other backend serves it either")
    elif nearest:
        lines.append(f"  help: the nearest is {nearest.title}, with {_count(len(nearest.reasons))}")
    return "\n".join(lines)


def full_dict(selection: Selection) -> dict[str, Any]:
    """The selection as JSON-ready values. If no backend is chosen, it has the backends to ask for by name."""
    data = selection.to_dict()
    candidates = data.pop("candidates")
    return {**data, "alternatives": list(alternatives(selection)), "candidates": candidates}


def _count(reasons: int) -> str:
    return "one reason against it" if reasons == 1 else f"{reasons} reasons against it"
