"""The generated blocks of a page about what changed between two bundled registries of one engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from attnreg.analysis.diff import diff, words_of
from attnreg.analysis.moves import Moves, compare, paired
from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.explain.changes import grouped
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.platforms import Platform
from attnreg.registry import Registry
from docs.markdown import plain, table
from docs.registries import bundled

# the architectures of the page, in the order of the columns
ARCHS = ("sm80", "sm90", "sm100", "sm120", "gfx942", "gfx1100")
# name of a block -> the KV dtype of its table, the first that both registries know
KV_DTYPES = {"models": ("auto",), "models-fp8": ("fp8", "fp8_e4m3")}


@cache
def change_blocks(before: str, after: str) -> dict[str, str]:
    """Name of each generated block -> its Markdown."""
    old, new = bundled(before), bundled(after)
    return {**moved_blocks(before, after), "words": _words(old, new), "everything": _everything(old, new)}


class Compared(NamedTuple):
    """The newer of two registries, the moves for each table of `KV_DTYPES`, and notes on the comparison."""

    newer: Registry
    moves: Mapping[str, Moves]
    notes: tuple[str, ...]


@cache
def compared(before: str, after: str) -> Compared:
    """Two bundled registries, compared for well-known models on `ARCHS`."""
    old, new = bundled(before), bundled(after)
    notes: tuple[str, ...] = ()
    # as `attnreg upgrade` compares releases
    if bool(old.steps) != bool(new.steps):
        silent = old if new.steps else new
        notes = (f"{silent.name} says nothing of its start: the selectors of both are compared",)
        old, new = old.selector, new.selector
    known = old.vocabulary.words["kv_dtypes"].keys() & new.vocabulary.words["kv_dtypes"].keys()
    kv_dtypes = {name: next(word for word in words if word in known) for name, words in KV_DTYPES.items()}
    return Compared(new, {name: _moves(old, new, kv_dtype) for name, kv_dtype in kv_dtypes.items()}, notes)


@cache
def moved_blocks(before: str, after: str) -> dict[str, str]:
    """Name of each generated block about well-known models -> its Markdown."""
    new, moves, notes = compared(before, after)
    tables = {name: _table(new, some) for name, some in moves.items()}
    whys = dict.fromkeys(line for some in moves.values() for line in _why(some))
    said = dict.fromkeys([f"- {note}" for note in notes])
    said |= dict.fromkeys(f"- {plain(note)}" for some in moves.values() for note in some.notes)
    return {**tables, "why": "\n".join([*whys, *said])}


def _moves(old: Registry, new: Registry, kv_dtype: str) -> Moves:
    asked = []
    for path in bundled_configs().values():
        options = ModelOptions(given={"kv_dtype": kv_dtype})
        sides = [model_questions(str(path), options, registry) for registry in (old, new)]
        asked += paired(sides[1].name, sides[0].questions, sides[1].questions)
    archs = [arch for name in ARCHS if (arch := new.vocabulary.architectures.get(name))]
    both = [arch for arch in archs if arch.name in old.vocabulary.architectures]
    platforms = [Platform(platform=arch.platform, arch=arch.name) for arch in both]
    return compare(asked, platforms, old, new)


def _table(registry: Registry, moves: Moves) -> str:
    """The layers that change their backend, and the change on each architecture; empty where there is no change."""
    if not moves.moves:
        return "No well-known model moves."
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for move in moves.moves:
        by_arch = cells.setdefault((move.asked.model, f"{move.asked.layers}: {move.asked.label}"), {})
        by_arch[move.platform.arch] = plain(_arrow(move.before.title, move.after.title, move.changes))
    archs = {a: registry.vocabulary.architectures[a] for a in ARCHS if a in registry.vocabulary.architectures}
    columns = [("model", 16), ("layers", 16), *((archs[a].title, 16) for a in archs)]
    rows = []
    last = ""
    for (model, layers), by_arch in cells.items():
        name, last = "" if model == last else model, model
        rows.append([name, plain(layers), *(by_arch.get(arch, "") for arch in archs)])
    return table(columns, rows)


def _arrow(before: str, after: str, changes: Sequence[str]) -> str:
    """``FLASH_ATTN/FA3 → FLASH_ATTN/FA3-4``. If the name stays the same: the name and the changes."""
    return f"{before} → {after}" if before != after else f"{after}: {'; '.join(changes)}"


def _why(moves: Moves) -> Iterator[str]:
    """A line for each group of moves, with the reasons for it."""
    for group in grouped(moves):
        archs = list(dict.fromkeys(arch for names, _ in group.rows for arch in names))
        also = [*group.changes] if group.before != group.after else []
        text = f"{'; '.join([', '.join(archs), *also])}. {'. '.join(group.why)}"
        yield f"- **{_arrow(group.before, group.after, group.changes)}**: {plain(text)}"


def _words(old: Registry, new: Registry) -> str:
    """The backends and the words that only one of the registries has."""
    lines = []
    for which, names in (
        ("gone", sorted(set(old.backends) - set(new.backends))),
        ("new", sorted(set(new.backends) - set(old.backends))),
    ):
        lines += [f"- backends {which}: {', '.join(names)}"] if names else []
    for which, facets in (("only before", words_of(old, new)), ("only after", words_of(new, old))):
        lines += [f"- {facet}, {which}: {', '.join(names)}" for facet, names in facets.items()]
    return "\n".join(lines)


def _everything(old: Registry, new: Registry) -> str:
    """Every pair of backends, before and after, that some configuration of a served model has; folded away."""
    difference = diff(old, new, within={"arch": ARCHS, "role": "target", "phase": "any"}, limit=0)
    lines = sorted(
        f"- {change.before or 'none'} → {change.after or 'none'}: {', '.join(change.archs)}"
        for change in difference.changes
    )
    head = f"<details><summary>{len(lines)} pairs of backends</summary>"
    return "\n".join([head, "", *lines, "", "</details>"])
