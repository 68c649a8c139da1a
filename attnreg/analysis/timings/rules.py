"""Rules: the orders that follow from samples, with conditions for the measured requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attnreg.analysis.timings.ranking import Compared, compared, rankable, ranked
from attnreg.analysis.timings.samples import Samples
from attnreg.selection.selector import evaluate

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest

# the facets of a condition; it lists only measured values
FACETS = ("attention", "attn_type", "role", "dtype", "kv_dtype", "head_size", "head_size_v", "phase", "features")
PHASES = ("any", "prefill", "decode")


@dataclass(frozen=True)
class MeasuredOrder:
    """An order, the fastest first, and the measured values of each facet.

    ``entries`` has the order and the backends that were not measured. ``cells`` are the indices of the cells.
    """

    order: tuple[str, ...]
    values: Mapping[str, frozenset[Any]]
    cells: tuple[int, ...]
    entries: tuple[str, ...] = ()

    @property
    def when(self) -> dict[str, Any]:
        """The condition, as YAML."""
        out: dict[str, Any] = {}
        for facet, values in self.values.items():
            if facet == "features":
                out |= _features(values)
            elif facet == "phase":
                out |= {} if values == {*PHASES} else {facet: _listed(v for v in PHASES if v in values)}
            elif not (facet == "head_size_v" and values == {None}):
                out[facet] = _listed(sorted(values, key=lambda v: (v is not None, str(type(v)), v)))
        return out


def names_of(registry: Registry, platform: Platform, request: AttentionRequest) -> list[str]:
    """Every backend and variant that may be ranked for a request: first those of its order, then the others."""
    order = evaluate(request, platform, registry).order
    named = [entry.backend for entry in order.entries] if order else []
    rows = [row for row in registry.backends.values() if platform.platform in row.platforms]
    usable = {r.name: r for r in rows if r.status != "experimental" and r.only_on_request is None}
    out: dict[str, None] = {}
    for name in (*named, *usable):
        row = registry.row(name)
        if row is not None and row.name in usable:
            out |= dict.fromkeys([f"{row.name}/{v}" for v in row.variant_names] or [row.name])
    return list(out)


def rules_of(samples: Samples, registry: Registry, platform: Platform) -> list[MeasuredOrder]:
    """The rules that follow from samples; a request with fewer than two measured backends has none."""
    rules = []
    for request in dict.fromkeys(_without_numbers(cell.request) for cell in samples.cells):
        names = names_of(registry, platform, request)
        # no condition distinguishes numbers of heads, so a rule must hold for all measured ones
        mine = [i for i, cell in enumerate(samples.cells) if _without_numbers(cell.request) == request]
        measured = [i for i in mine if len(rankable(samples, [i], names)) > 1]
        # a layer whose request names one phase has no other
        for phase in (request.phase,) if request.phase != "any" else PHASES:
            cells = [i for i in measured if phase in ("any", samples.cells[i].phase)]
            # a rule for all phases needs times of all phases
            if phase == "any" and {samples.cells[i].phase for i in cells} < {samples.cells[i].phase for i in mine}:
                continue
            order = ranked(samples, cells, names) if cells else []
            if len(order) > 1:
                values = {f: frozenset({getattr(request, f)}) for f in FACETS}
                values["phase"] = frozenset({phase})
                if entries := _entries(registry, platform, request, order):
                    rules.append(MeasuredOrder(tuple(order), values, tuple(cells), entries))
    return merged(rules)


def evidence_of(samples: Samples, rule: MeasuredOrder) -> tuple[Compared, str] | None:
    """The ratio of the first backend to the next one, and the next one; None if there is no next one."""
    if len(rule.order) < 2:
        return None
    return compared(samples, rule.cells, *rule.order[:2]), rule.order[1]


def merged(rules: Iterable[MeasuredOrder]) -> list[MeasuredOrder]:
    """Merges rules with the same order whose values differ in one facet, unless the result overlaps another rule.

    A rule with fewer features comes first: a condition that allows more features also accepts requests with fewer.
    """
    left = list(rules)
    changed = True
    while changed:
        changed = False
        for facet in ("phase", "head_size", "kv_dtype", "dtype", "role", "features", "attn_type", "head_size_v"):
            for i, one in enumerate(left):
                for other in left[i + 1 :]:
                    union = _union(one, other, facet)
                    rest = [
                        r
                        for r in left
                        if r is not one and r is not other and (r.order, r.entries) != (one.order, one.entries)
                    ]
                    if union is not None and not any(_overlap(union, r) for r in rest):
                        left = [union if r is one else r for r in left if r is not other]
                        changed = True
                        break
                if changed:
                    break
            if changed:
                break
    return sorted(left, key=lambda rule: max(len(f) for f in rule.values["features"]))


def _union(one: MeasuredOrder, other: MeasuredOrder, facet: str) -> MeasuredOrder | None:
    alike = (one.order, one.entries) == (other.order, other.entries)
    if not alike or any(one.values[f] != other.values[f] for f in FACETS if f != facet):
        return None
    values = {**one.values, facet: one.values[facet] | other.values[facet]}
    return replace(one, values=values, cells=tuple(sorted({*one.cells, *other.cells})))


def _overlap(one: MeasuredOrder, other: MeasuredOrder) -> bool:
    """Whether some request fits both. A condition accepts every set of features between the common ones and all."""
    if any(one.values[f].isdisjoint(other.values[f]) for f in FACETS if f != "features"):
        return False
    (least, most), (low, high) = _span(one.values["features"]), _span(other.values["features"])
    return least <= high and low <= most


def _span(sets: Iterable[frozenset[str]]) -> tuple[frozenset[str], frozenset[str]]:
    every = list(sets)
    return frozenset.intersection(*every), frozenset.union(*every)


def _features(sets: frozenset[frozenset[str]]) -> dict[str, Any]:
    least, most = _span(sets)
    out: dict[str, Any] = {"features": {"only": sorted(most)}}
    return {**out, "any": [{"features": sorted(least)}]} if least else out


def _listed(values: Iterable[Any]) -> Any:
    several = list(values)
    return several[0] if len(several) == 1 else several


def _without_numbers(request: AttentionRequest) -> AttentionRequest:
    """The request without facets that no condition of a rule has; its phase is any, unless it is for prompts."""
    phase = "prefill" if request.phase == "prefill" else "any"
    return replace(request, num_heads=None, num_kv_heads=None, block_size=None, model=None, phase=phase, extra=())


def _entries(
    registry: Registry, platform: Platform, request: AttentionRequest, order: Sequence[str]
) -> tuple[str, ...]:
    """The registry's order, with the measured backends sorted by their times.

    A backend that was not measured stays behind the one that it was behind. Unmeasured variants of a backend become one
    entry, the backend: an entry with a single variant would request its kernel. A backend that the registry's order
    lacks is inserted if it is faster than one of the order's own. Empty for an order with a conditional entry.
    """
    everything = replace(platform, packages=None, flags=frozenset(registry.vocabulary.flags))
    base = evaluate(request, platform, registry).order
    first: list[str] = []
    behind: dict[str, list[str]] = {}
    here = first
    for entry in base.entries if base else ():
        row = registry.row(entry.backend)
        assert row is not None
        if entry.condition.describe() != "always":
            return ()
        titles = [f"{row.name}/{variant}" for variant in row.variant_names] or [row.name]
        for title in titles:
            if title in order and title not in behind:
                here = behind[title] = []
        if any(t not in order and evaluate(request, everything, registry, t).backend is not None for t in titles):
            here.append(entry.backend)
    out = [*first]
    for name in order:
        out += [name, *behind.get(name, ())]
    own = {*first, *behind, *(name for names in behind.values() for name in names)}
    while own and out[-1] not in own:
        out.pop()
    return tuple(out)
