"""The backend that attnreg itself runs in place of an order's choice, from the data alone, without an import."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attnreg.selection.selector import evaluate, without_module

if TYPE_CHECKING:
    from attnreg.selection.trace import Reason, Selection

_ALONE = {"prefill": " for prompts alone", "decode": " for generated tokens alone"}


@dataclass(frozen=True)
class OwnKernel:
    """The backend that attnreg runs in a phase: ``selection`` is ``select(to_run=True)`` if every module loads.

    why: the reasons against the order's backend, if attnreg runs another one. alone: the question is about both phases,
    and this is one of them.
    """

    phase: str
    selection: Selection
    why: tuple[Reason, ...] = ()
    alone: bool = False

    @property
    def title(self) -> str | None:
        """``FLASH_ATTN/FA3``; None if attnreg runs nothing."""
        chosen = self.selection.chosen
        return None if chosen is None else chosen.title

    @property
    def text(self) -> str:
        """``attnreg itself runs TRITON_ATTN: FLASH_ATTN/FA3 runs where it is named (backends.yaml:466)``."""
        order = self.selection.order
        runs = f"attnreg itself runs {self.title or 'nothing here'}{_ALONE[self.phase] if self.alone else ''}"
        if self.why:
            return f"{runs}: {self.why[0].text} ({self.why[0].where.short})"
        return f"{runs} (order {order.title}, {order.where.short})" if order is not None else runs

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        backend, order = self.selection.backend, self.selection.order
        return {
            "phase": self.phase,
            "backend": None if backend is None else {"name": backend.name, "variant": backend.variant},
            "order": None if order is None else {"name": order.title, "where": str(order.where)},
            "why": [reason.to_dict() for reason in self.why],
        }


def runs_of(selection: Selection) -> tuple[OwnKernel, ...]:
    """The backend that attnreg runs for a selection, then each phase in which it runs another backend.

    Empty if the selection has no backend, and for an engine's registry, whose backends the engine runs.
    """
    request, registry, chosen = selection.request, selection.registry, selection.chosen
    if chosen is None or not registry.imports:
        return ()
    # the selection was already made with `unloadable`
    own = selection if selection.unloadable is not None else _own(selection, request.phase)
    winner = own.chosen
    named = next((c for c in own.candidates if c.name == chosen.name and not c.accepted), None)
    moved = named is not None and (winner is None or winner.title != chosen.title)
    runs = [OwnKernel(request.phase, own, named.reasons if named is not None and moved else ())]
    by_phase = request.phase == "any" and request.attention == "mha" and request.attn_type == "decoder"
    if by_phase and selection.requested is None and selection.unloadable is None:
        for phase in (p for p in _ALONE if p in registry.vocabulary.words_of("phase")):
            other = OwnKernel(phase, _own(selection, phase), alone=True)
            runs += [other] if other.title != runs[0].title else []
    return tuple(runs)


def run_lines(selection: Selection) -> tuple[str, ...]:
    """A sentence for each of `runs_of` that differs from the selected backend."""
    chosen = selection.chosen
    runs = runs_of(selection)
    return tuple(run.text for run in runs if run is not runs[0] or chosen is None or run.title != chosen.title)


def _own(selection: Selection, phase: str) -> Selection:
    request = selection.request if phase == selection.request.phase else replace(selection.request, phase=phase)
    # an overlay's required backend is found again from the registry; an argument's is passed on
    by_argument = selection.requested if selection.choice is None else None
    return evaluate(request, selection.platform, selection.registry, by_argument, unloadable=without_module)
