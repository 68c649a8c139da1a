"""Moves: layers of models that get another outcome on some platforms, and the lines of data behind each move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.analysis.outcome import FOLLOWS, Decided, Outcome, changes, decide, same_kernel, unknown_notes, variant_of
from attnreg.compile.source.yaml_source import as_written
from attnreg.models.groups import describe_indices
from attnreg.selection.judge import Judge, denial
from attnreg.selection.point import point_of
from attnreg.selection.question import UNREAD
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import how_chosen

if TYPE_CHECKING:
    from attnreg.errors import Location
    from attnreg.platforms import Platform
    from attnreg.registry import Registry, Variant
    from attnreg.request import AttentionRequest
    from attnreg.selection.question import Question
    from attnreg.selection.trace import Reason, Selection

_MOST_REASONS = 3
_UNREAD = "what attention its layers ask for"
NO_LAYERS = "the model has no such layers"
# facets that an engine's start may change and that a move prints, without names of backends
_SHOWN = ("dtype", "kv_dtype", "block_size", "flash_attn_version")


class AskedGroup(NamedTuple):
    """One group of a model's layers, with its request on each side: two registries may read the model differently.

    ``requests`` are those before and after; None if the model has no such layers. Both are None for layers whose
    attention is not known.
    """

    model: str
    layers: str
    label: str
    requests: tuple[AttentionRequest | None, AttentionRequest | None]


class Why(NamedTuple):
    """One reason for a move: a sentence about the data before or after, and its line."""

    side: str
    text: str
    where: Location | None = None

    def __str__(self) -> str:
        return f"{self.side}: {self.text}" + (f"  [{self.where.short}]" if self.where else "")


class Turn(NamedTuple):
    """An outcome that the table of a release has, and the table of the release before it has not."""

    title: str
    registry: str
    earlier: str

    def __str__(self) -> str:
        return f"{self.title} in {self.registry}, and not in {self.earlier}"


@dataclass(frozen=True)
class Move:
    """A group of layers whose outcome on a platform changes.

    ``why`` has the reasons for the change. ``how`` has a sentence for each side on how it came to its answer.
    ``refused`` is the sentence with which the engine refuses the run afterwards, "" if it starts. ``turns`` are the
    releases between the two at which the outcome changes; empty where no table between them is known.
    """

    asked: AskedGroup
    platform: Platform
    before: Outcome
    after: Outcome
    why: tuple[Why, ...]
    how: tuple[str, ...] = ()
    refused: str = ""
    turns: tuple[Turn, ...] = ()

    @property
    def changes(self) -> tuple[str, ...]:
        """The changes except that of the backend's name."""
        return changes(self.before, self.after)

    def to_dict(self) -> dict[str, Any]:
        """The move as JSON-ready values."""
        request = self.asked.requests[1] or self.asked.requests[0]
        return {
            "model": self.asked.model,
            "layers": self.asked.layers,
            "label": self.asked.label,
            "platform": self.platform.to_dict(),
            "request": request.to_dict() if request else None,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "changes": list(self.changes),
            "why": [{"side": w.side, "text": w.text, "where": w.where and str(w.where)} for w in self.why],
            "turns": [turn._asdict() for turn in self.turns],
        }


@dataclass(frozen=True)
class Moves:
    """The moves of some groups of layers on some platforms.

    ``renamed`` are the layers that keep their kernel, whose variant has another name; they do not move. ``notes`` list
    questions that a registry cannot answer. ``unknown`` names the models with such a layer.
    """

    moves: tuple[Move, ...]
    asked: tuple[AskedGroup, ...]
    platforms: tuple[Platform, ...]
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    renamed: tuple[Move, ...] = ()

    @property
    def refused(self) -> dict[str, list[str]]:
        """The sentence with which the engine refuses a run afterwards -> the models that no longer start for it."""
        found: dict[str, list[str]] = {}
        for move in self.moves:
            if move.refused and move.asked.model not in found.setdefault(move.refused, []):
                found[move.refused].append(move.asked.model)
        return found

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models."""
        return tuple(dict.fromkeys(item.model for item in self.asked))

    def to_dict(self) -> dict[str, Any]:
        """The moves as JSON-ready values."""
        return {
            "models": list(self.models),
            "platforms": [platform.to_dict() for platform in self.platforms],
            "compared": len(self.asked) * len(self.platforms),
            "moved": len(self.moves),
            "refused": [{"text": text, "models": models} for text, models in self.refused.items()],
            "moves": [move.to_dict() for move in self.moves],
            "renamed": [move.to_dict() for move in self.renamed],
            "notes": list(self.notes),
            "unknown": list(self.unknown),
        }


def paired(model: str, before: Sequence[Question], after: Sequence[Question]) -> list[AskedGroup]:
    """The groups of a model's layers, each with its request on both sides; layers without attention are left out.

    Layers whose attention is not known come last.

    If the two sides group the layers differently, a group has the layers that are together on both sides. A question
    about both phases is that about each phase, where the other side asks about each.
    """
    before, after = _halved(before, after), _halved(after, before)
    old, new = _by_layers(before), _by_layers(after)
    out = [AskedGroup(model, q.layers, q.label, (old[key].request, q.request)) for key, q in new.items() if key in old]
    out += _regrouped(
        model, [q for key, q in old.items() if key not in new], [q for key, q in new.items() if key not in old]
    )
    unread = {q.layers: q.label for q in (*before, *after) if q.kind == UNREAD}
    return out + [AskedGroup(model, layers, label, (None, None)) for layers, label in unread.items()]


def _by_layers(questions: Iterable[Question]) -> Mapping[Any, Question]:
    """(layers, number) -> question, for layers with a backend; the number counts questions about the same layers."""
    out: dict[Any, Question] = {}
    for question in questions:
        if question.request is not None:
            place = sum(layers == question.layers for layers, _ in out)
            out[question.layers, place] = question
    return out


def _halved(side: Iterable[Question], other: Iterable[Question]) -> list[Question]:
    """The questions of a side, with those about both phases twice where the other side asks about each phase."""
    phases: dict[Any, set[str]] = {}
    for layers, r in ((q.layers, q.request) for q in other if q.request):
        phases.setdefault((layers, r.attn_type), set()).add(r.phase)
    apart = {key for key, found in phases.items() if found == {"decode", "prefill"}}
    calls = [(q, q.request and q.request.phase == "any" and (q.layers, q.request.attn_type) in apart) for q in side]
    return [q for q, twice in calls for _ in range(2 if twice else 1)]


def _regrouped(model: str, before: Sequence[Question], after: Sequence[Question]) -> list[AskedGroup]:
    """The groups of layers that are together on both sides, and the layers of only one side."""
    out = []
    left: list[dict[int, set[Any]]] = [
        {i: set(question.members) for i, question in enumerate(side)} for side in (before, after)
    ]
    for i, old in enumerate(before):
        for j, new in enumerate(after):
            common = left[0][i] & left[1][j]
            if common and _calls(old) == _calls(new):
                left[0][i] -= common
                left[1][j] -= common
                indices = describe_indices([member[-1] for member in common])
                layers = f"{len(common)} layer{'s' * (len(common) != 1)} ({indices})"
                out.append(AskedGroup(model, layers, new.label, (old.request, new.request)))
    for number, side in enumerate((before, after)):
        for i, question in enumerate(side):
            if left[number][i] or not question.members:
                requests = (question.request, None) if number == 0 else (None, question.request)
                out.append(AskedGroup(model, question.layers, question.label, requests))
    return out


def _calls(question: Question) -> tuple[str, ...]:
    """The key by which a layer's request is found among the layer's other requests."""
    request = question.request
    return () if request is None else (request.role, request.phase, request.attn_type)


def compare(asked: Sequence[AskedGroup], platforms: Sequence[Platform], before: Registry, after: Registry) -> Moves:
    """The moves between two registries, and the renamed variants apart from them.

    Raises `RequestError` for a word of a request that neither registry knows.
    """
    moves, renamed, notes = list[Move](), list[Move](), dict[str, None]()
    # (registry, sentence) -> the models that the sentence is about
    unknown: dict[tuple[str, str], dict[str, None]] = {}
    for item in asked:
        if item.requests == (None, None):
            unknown.setdefault((f"{before.name} and {after.name}", _UNREAD), {})[item.model] = None
            continue
        for platform in platforms:
            old, new = (
                Decided(Outcome(problem=NO_LAYERS), None) if request is None else decide(request, platform, registry)
                for request, registry in zip(item.requests, (before, after), strict=True)
            )
            if (old.outcome.problem and new.outcome.problem) or not set(old.ignored).isdisjoint(new.ignored):
                # neither registry knows a word: raise the error of a selection
                for request, registry in zip(item.requests, (before, after), strict=True):
                    if request is not None:
                        evaluate(request, platform, registry)
            for decided, registry in ((old, before), (new, after)):
                notes |= dict.fromkeys(f"{registry.name} has no {w}: compared without it" for w in decided.ignored)
                if decided.selection is not None and decided.selection.unknown:
                    unknown.setdefault((registry.name, decided.outcome.problem), {})[item.model or "the request"] = None
            if (line := same_kernel(old, new)) is not None:
                sides = how(old), how(new)
                renamed.append(Move(item, platform, old.outcome, new.outcome, (renaming(line),), sides))
            elif moved(old.outcome, new.outcome):
                sides, refused = (how(old), how(new)), refusal_of(new)
                moves.append(Move(item, platform, old.outcome, new.outcome, why(old, new), sides, refused))
    said = unknown_notes(unknown)
    models = dict.fromkeys(model for of in unknown.values() for model in of)
    # a run that no longer starts matters most
    moves.sort(key=lambda move: not move.refused)
    about = tuple(asked), tuple(platforms), (*notes, *said), tuple(models)
    return Moves(tuple(moves), *about, tuple(renamed))


def renaming(line: Location) -> Why:
    """The reason for the other name of a variant, with the line of data that states the old name."""
    return Why("after", "the same kernel, whose variant has another name", line)


def refusal_of(decided: Decided) -> str:
    """The sentence with which the engine refuses the run; "" if it starts, or if that is not known."""
    start = decided.selection.start if decided.selection is not None else None
    if start is None or start.refusal is None or start.refusal.effect.unknown:
        return ""
    return start.refusal.text


def moved(before: Outcome, after: Outcome) -> bool:
    """Whether two outcomes differ in the backend, its variant, or its consequences."""
    return before.title != after.title or bool(changes(before, after))


def why(old: Decided, new: Decided) -> tuple[Why, ...]:
    """The reasons for a move: of the new data against the old choice, else of the old data against the new choice.

    The old selection is None if only its outcome is known, as from a lock.
    """
    if problems := [Why(side, d.outcome.problem) for side, d in _sides(old, new) if d.outcome.problem]:
        return tuple(problems)
    was, now = old.outcome, new.outcome
    if was.backend is not None and was.backend == now.backend:
        return tuple(_why_variant(was, now, old.selection, new.selection))
    if was.backend is not None and new.selection and (against := _against("after", was.backend, new.selection)):
        return against
    if now.backend is not None and old.selection and (against := _against("before", now.backend, old.selection)):
        return against
    if new.selection is None or new.selection.chosen is None:
        return ()
    rest = f"; {was.title} {_rank_words(was.backend, new.selection)}" if was.backend else ""
    return (Why("after", f"{now.title}: {how_chosen(new.selection)}{rest}", new.selection.chosen.where),)


def _rank_words(name: str, selection: Selection) -> str:
    """Words for a backend that a selection accepts and does not choose."""
    fails = [selection.failures.get(c.rank, ()) for c in selection.candidates if c.name == name and c.accepted]
    if all(fails):
        return f"is accepted, and would then fail: {'; '.join(f.text for f in fails[0])}"
    return "is valid too, ranked lower"


def how(decided: Decided) -> str:
    """How one side came to its answer: ``FLASH_ATTN/FA3, 1st choice of 5 (order cuda/mha, priorities.yaml:107)``."""
    selection = decided.selection
    if selection is None or selection.silence:
        return decided.outcome.problem
    start = selection.start
    if start is not None and start.refusal is not None:
        return f"{how_chosen(selection)}: {start.refusal.effect.refuses}"
    changed = {name: value for step in (start.taken if start else ()) for name, (_, value) in step.sets.items()}
    sets = ", ".join(f"{name} {as_written(value)}" for name, value in changed.items() if name in _SHOWN)
    title = decided.outcome.title if selection.chosen else "no backend accepts"
    return f"{title}, {how_chosen(selection)}" + (f"; the engine's start sets {sets}" if sets else "")


def _sides(old: Decided, new: Decided) -> Iterable[tuple[str, Decided]]:
    return ("before", old), ("after", new)


def _against(side: str, name: str, selection: Selection) -> tuple[Why, ...]:
    """The reasons of a selection against a backend; empty if it accepts the backend and only ranks it lower."""
    registry, order = selection.registry, selection.order
    if name not in registry.backends:
        return (Why(side, f"{registry.name} has no {name}"),)
    candidates = [c for c in selection.candidates if c.name == name]
    if any(c.accepted for c in candidates):
        return ()
    if candidates:
        first = candidates[0]
        more = len(first.reasons) - _MOST_REASONS
        reasons = [Why(side, f"{first.title}: {r.text}", r.where) for r in first.reasons[:_MOST_REASONS]]
        return (*reasons, *([Why(side, f"{first.title}: {more} more reasons")] if more > 0 else []))
    if selection.requested:
        return (Why(side, how_chosen(selection)),)
    refusal = selection.start.refusal if selection.start is not None else None
    if refusal is not None:
        return (Why(side, refusal.text, refusal.where),)
    if order is None:
        return (Why(side, f"{registry.name} has no order for this request on {selection.platform.arch}"),)
    return (Why(side, f"the order {order.title} does not name {name}", order.where),)


def _why_variant(was: Outcome, now: Outcome, before: Selection | None, after: Selection | None) -> Iterable[Why]:
    """The reasons for another variant of the same backend, or for the same variant with other changes."""
    assert was.backend is not None
    assert after is not None
    new = variant_of(after.registry, was.backend, now.variant)
    assert new is not None
    if was.variant == now.variant:
        yield from _why_follows(was, now, before, after) or [Why("after", f"the row of {now.title}", new.where)]
        return
    if after.choice is not None and after.choice.strength != "deny" and after.chosen and after.chosen.rank == 1:
        yield Why("after", f"{now.title}: {how_chosen(after)}", after.choice.where)
        return
    same = variant_of(after.registry, was.backend, was.variant)
    earlier = before and variant_of(before.registry, was.backend, now.variant)
    if same is None:
        lost = f"{was.backend} has {f'no variant {was.variant}' if was.variant else 'variants now'}"
        yield Why("after", f"{lost}; {now.variant or 'the row'} is for {new.when.describe()}", new.where)
    elif reasons := _reasons(after, was.backend, same):
        for reason in reasons[:_MOST_REASONS]:
            yield Why("after", f"{was.title}: {reason.text}", reason.where)
    elif before and earlier and (reasons := _reasons(before, was.backend, earlier)):
        for reason in reasons[:_MOST_REASONS]:
            yield Why("before", f"{now.title}: {reason.text}", reason.where)
    elif before and not earlier:
        yield Why("before", f"{was.backend} has no variant {now.variant}")
    else:
        entries = after.order.entries if after.order else ()
        # an order may name one variant of a backend
        where = next((e.where for e in entries if e.backend == now.title), new.where)
        yield Why("after", f"{now.title} is tried before {was.title}", where)


def _why_follows(was: Outcome, now: Outcome, before: Selection | None, after: Selection) -> list[Why]:
    """The lines of consequences that only one side has, if nothing else changes."""
    plain = replace(now, fails=was.fails, follows=was.follows)
    if changes(was, plain):
        return []
    out = []
    for side, selection, outcome, other in (("after", after, now, was), ("before", before, was, now)):
        for f in selection.consequences if selection else ():
            if f.kind == "fails":
                if f.text not in other.fails and (side == "after" or not other.fails):
                    out.append(Why(side, f"{outcome.title} fails", f.where))
            elif other.follows is not None and f.fact not in other.follows.get(FOLLOWS[f.kind], ""):
                out.append(Why(side, f"the row of {outcome.title}", f.where))
    return out


def _reasons(selection: Selection, name: str, variant: Variant) -> list[Reason]:
    """Every reason against one variant of a backend."""
    registry = selection.registry
    point = point_of(selection.request, selection.platform, registry)
    denials = [c for c in registry.choices if c.strength == "deny" and f"{name}/{variant.name}" in c.backends]
    reasons = [denial(choice) for choice in denials if choice.when.holds(point)]
    return reasons + Judge(registry, point, {}, None).reasons_against(variant)
