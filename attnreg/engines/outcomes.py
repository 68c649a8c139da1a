"""What a selection means for a run: the backends that it gets, and the reasons why it does not start."""

from __future__ import annotations

from attnreg.selection.trace import Selection, verdict_words

# the facet of a draft's backend, for engines that resolve it together with the target's
_OF_DRAFTS = "speculative_draft_attention_backend"


def runs(selection: Selection) -> tuple[str | None, object]:
    """The backend of the layers, and that of their draft; the same one if the engine sets no other."""
    name = selection.backend.name if selection.backend is not None else None
    return name, (selection.start.facts.get(_OF_DRAFTS) if selection.start is not None else None) or name


def refused_at_start(selection: Selection) -> str:
    """The reason why the engine refuses a run before it chooses; "" if it does not."""
    refusal = selection.start.refusal if selection.start is not None else None
    return refusal.effect.refuses if refusal is not None else ""


def refusals(selection: Selection) -> list[str]:
    """The reasons why a run with a selection does not start; empty if it starts."""
    if refusal := refused_at_start(selection):
        return [refusal]
    if selection.backend is None:
        return [text for text, _ in verdict_words(selection, selection.nearest)] if selection.nearest else []
    return [follows.text for follows in selection.consequences if follows.kind == "fails"]


def not_known(selection: Selection) -> list[str]:
    """What the table does not know of a run with a selection: its start, its results, or the wish of its connector."""
    if selection.unknown:
        return [refused_at_start(selection)]
    doubts = [follows.text for follows in selection.consequences if follows.kind == "unknown"]
    point, layout = selection.point(), selection.registry.layout
    wish = next((w for w in layout.wishes if w.when.holds(point)), None) if layout is not None else None
    return [*doubts, *([wish.unknown] if wish is not None and wish.unknown else [])]
