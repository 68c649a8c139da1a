"""The layout of the KV cache that an engine settles for a whole run, or the facts that exclude each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from attnreg.errors import Location
from attnreg.planning.run import Agreed, CacheShape, Conflict, ConflictFact, RunGroup, joined
from attnreg.selection.consequences import layouts_of
from attnreg.selection.question import UNREAD

if TYPE_CHECKING:
    from attnreg.language.engine.runs import ConnectorWish, LayoutRules

_CACHED = ("decoder", "encoder_decoder")


class _Reader(NamedTuple):
    """The kernels of one backend in the layers of one kind, and the layouts that they read; () if they read all."""

    name: str
    kind: str
    group: str
    layouts: tuple[str, ...]
    where: Location
    source: str | None

    @property
    def fact(self) -> ConflictFact:
        return ConflictFact(self.group, f"{self.name} reads {joined(self.layouts, 'or')}", self.where)


def agree_layout(
    groups: Sequence[RunGroup], rules: LayoutRules | None, *, asked: str | None = None, connector: str | None = None
) -> Agreed:
    """The layout that the engine settles for these groups.

    groups: the layers of one rank, with a backend each. Towers take no part.
    asked: the layout that the user asks for by the engine's environment variable.
    connector: the layout that the KV connector wishes.

    Raises ValueError if one of the two names no layout of this engine.
    """
    if rules is None:
        return Agreed(None, "this table has no rules for the layout of a run", None)
    asked, connector = _layout(asked, rules), _layout(connector, rules)
    groups = [group for group in groups if group.takes_part]
    silent = next((g for g in groups if g.selection is not None and g.selection.backend is None), None)
    if silent is not None:
        return Agreed(None, f"no backend is known for {silent.label}", rules.where, rules.source)
    if any(group.kind == UNREAD for group in groups):
        return Agreed(None, "what some layers compute is not known", rules.where, rules.source)
    points = [group.point for group in groups if group.selection is not None]
    mixers = any(group.selection is None for group in groups)
    for unknown in rules.unknown:
        holds = any(unknown.when.holds(point) for point in points)
        if (mixers or not unknown.mixers) and (holds or not unknown.when.facets):
            return Agreed(None, unknown.because, unknown.where, unknown.source)
    readers = list[_Reader]()
    for group in groups:
        found = _readers(group, rules)
        if found is None:
            return Agreed(None, f"the layouts that {group.name} reads are not known", rules.where, rules.source)
        readers += [r for r in found if (r.name, r.kind) not in {(k.name, k.kind) for k in readers}]
    if connector is None and (wish := _wish(groups, rules)) is not None:
        if wish.unknown:
            return Agreed(None, wish.unknown, wish.where, wish.source)
        connector = wish.layout and rules.aliases.get(wish.layout, wish.layout)
    if rules.agree == "required":
        return _required(readers, rules, asked, connector)
    return _common(readers, groups, rules, asked, connector)


def _wish(groups: Sequence[RunGroup], rules: LayoutRules) -> ConnectorWish | None:
    """What the run's KV connector wishes; None without a connector."""
    first = next((group.point for group in groups if group.selection is not None), None)
    return next((wish for wish in rules.wishes if first is not None and wish.when.holds(first)), None)


def _layout(name: str | None, rules: LayoutRules) -> str | None:
    if name is None:
        return None
    layout = rules.aliases.get(name, name)
    if layout not in rules.layouts:
        known = ", ".join((*rules.layouts, *(a for a in rules.aliases if a not in rules.layouts)))
        raise ValueError(f"{name} is no layout of the KV cache; known: {known}")
    return layout


def _readers(group: RunGroup, rules: LayoutRules) -> list[_Reader] | None:
    """The readers of a group's caches; None if the layouts of its backend are not known."""
    selection = group.selection
    if selection is None:
        # a state is addressed by its block alone
        return []
    point, variant = group.point, selection.variant
    assert variant is not None
    assert selection.backend is not None
    known = layouts_of(variant, point)
    if known is None or known.layouts is None:
        return None
    kind = group.kind if group.kind in rules.apart else ""
    found = [_Reader(selection.backend.name, kind, group.label, known.layouts, known.where, known.source)]
    beside = (other for other in rules.beside if other.when.holds(point))
    found += [_Reader(o.name, "", group.label, o.layouts, o.where, o.source) for o in beside]
    return found


def _common(
    readers: Sequence[_Reader],
    groups: Sequence[RunGroup],
    rules: LayoutRules,
    asked: str | None,
    connector: str | None,
) -> Agreed:
    """The layout that all readers read, the preferred first; blocks of several shapes need a compact one."""
    stated = [reader for reader in readers if reader.layouts]
    candidates = _candidates(stated, rules)
    if not candidates:
        return _conflict("no layout of the KV cache is read by every backend", _smallest(stated, rules), rules)
    shapes = _Shapes.of(groups, rules)
    compact = tuple(layout for layout in candidates if layout in rules.block_compact)
    if shapes.mixed is None and not _same(candidates, compact, asked, connector):
        text = f"{joined(candidates, 'or')}: whether the blocks of all layers have one shape is not known"
        return Agreed(None, text, rules.where, rules.source)
    if shapes.mixed and not compact:
        blamed = _smallest(stated, rules, rules.block_compact)
        sentence = "blocks of several shapes need a layout that keeps each block together, and no backend's does"
        return _conflict(sentence, (*blamed, *shapes.facts), rules)
    if shapes.mixed:
        candidates = compact
    if asked is not None:
        return _asked(asked, candidates, stated, shapes, rules)
    first = _first(candidates, stated, rules)
    if connector is None or connector in candidates:
        if connector is None:
            return first
        return Agreed(connector, "which the KV connector wishes", rules.where, rules.source)
    wish = f"the KV connector wishes {connector}, which is dropped: {joined(candidates, 'or')} can be read"
    return first._replace(dropped=(wish,))


def _candidates(stated: Sequence[_Reader], rules: LayoutRules) -> tuple[str, ...]:
    """The layouts that every reader reads, the preferred first. stated: the readers with a preference."""
    if not stated:
        return rules.default
    lists = [reader.layouts for reader in stated]
    if len({*lists}) == 1:
        return lists[0]
    votes = Counter(layouts[0] for layouts in lists)
    common = set.intersection(*map(set, lists))
    return tuple(sorted((x for x in rules.layouts if x in common), key=lambda layout: -votes[layout]))


def _same(candidates: tuple[str, ...], compact: tuple[str, ...], asked: str | None, connector: str | None) -> bool:
    """Whether the outcome is the same for all candidates as for the compact ones alone."""
    wish = asked or connector
    return bool(compact) and candidates[0] == compact[0] and (wish in candidates) == (wish in compact)


def _first(candidates: Sequence[str], stated: Sequence[_Reader], rules: LayoutRules) -> Agreed:
    """The preferred of the candidates, with the reader that decides it."""
    value = candidates[0]
    if not stated:
        return Agreed(value, "the default, since every backend reads every layout", rules.where, rules.source)
    reader = next((r for r in stated if r.layouts[0] == value), stated[0])
    names = [*dict.fromkeys(r.name for r in stated)]
    read = f"which {joined(names, 'and')} read{'s' * (len(names) == 1)}"
    if reader.layouts[0] == value:
        text = f"which {reader.name} prefers" if len(names) == 1 else f"{read}, and {reader.name} prefers"
    else:
        text = read
    return Agreed(value, text, reader.where, reader.source)


def _asked(
    asked: str, candidates: Sequence[str], stated: Sequence[_Reader], shapes: _Shapes, rules: LayoutRules
) -> Agreed:
    if asked in candidates:
        return Agreed(asked, f"as {rules.variable} asks for", rules.where, rules.source)
    wish = ConflictFact("", f"{rules.variable} asks for {asked}", rules.where)
    reader = next((reader for reader in stated if asked not in reader.layouts), None)
    others = (reader.fact,) if reader is not None else shapes.facts
    if reader is None and not shapes.mixed:
        others = (ConflictFact("", f"the engine has {joined(candidates, 'or')}", rules.where),)
    return _conflict(
        f"the engine stops, for {asked} is not read by all; {joined(candidates, 'or')} is", (wish, *others), rules
    )


def _required(readers: Sequence[_Reader], rules: LayoutRules, asked: str | None, connector: str | None) -> Agreed:
    """The layout that a backend requires, else the user's, else the connector's, else the default."""
    stated = [reader for reader in readers if reader.layouts]
    if len({reader.layouts for reader in stated}) > 1:
        names = joined((f"{r.name} ({joined(r.layouts, 'or')})" for r in stated), "and")
        text = f"{names} require different layouts; the engine keeps that of the layer built last"
        return Agreed(None, text, stated[-1].where, stated[-1].source)
    wishes = [(f"{rules.variable} asks for {asked}", asked), (f"the KV connector wishes {connector}", connector)]
    given = [(text, layout) for text, layout in wishes if layout is not None]
    if stated:
        value, reader = stated[0].layouts[0], stated[0]
        dropped = tuple(f"{text}, which {reader.name} overrides" for text, layout in given if layout != value)
        return Agreed(value, f"which {reader.name} requires", reader.where, reader.source, dropped=dropped)
    if given:
        return Agreed(given[0][1], f"as {given[0][0]}", rules.where, rules.source)
    return Agreed(rules.default[0], "the default, since no backend requires one", rules.where, rules.source)


class _Shapes(NamedTuple):
    """Whether blocks of the run have several shapes, None if that is not known, and two groups that show it."""

    mixed: bool | None
    facts: tuple[ConflictFact, ...] = ()

    @classmethod
    def of(cls, groups: Iterable[RunGroup], rules: LayoutRules) -> _Shapes:
        known = [(group, block) for group in groups if (block := _block(group)) is not None]
        for group, _ in known:
            beside = next((o for o in rules.beside if group.selection and o.when.holds(group.point)), None)
            if beside is not None:
                more = ConflictFact(group.label, f"{beside.name} keeps a cache beside it", beside.where)
                return cls(True, (_shape_fact(group), more))
        unsure = False
        for (first, one), (second, other) in combinations(known, 2):
            differ = one.differs(other)
            if differ:
                return cls(True, (_shape_fact(first), _shape_fact(second)))
            unsure = unsure or differ is None
        return cls(None if unsure else False)


class _Block(NamedTuple):
    """A block of a group: its shape if it is known, else what the shape depends on.

    ``slots`` are its slots for heads, 0 for a state, None if they are not known. ``content`` is what a slot holds of a
    token: bits, or a format with its numbers of values. ``of`` is the role of the layers and the KV dtype.
    """

    shape: CacheShape | None
    slots: int | None
    content: int | tuple[object, ...]
    of: tuple[str, object] = ("", None)

    def differs(self, other: _Block) -> bool | None:
        """Whether the two have different shapes; None if that is not known."""
        if self.shape is not None and other.shape is not None:
            return self.shape != other.shape
        if None in (self.slots, other.slots) or self.slots == other.slots == 0:
            return None
        if self.slots != other.slots or self.content == other.content:
            return self.slots != other.slots
        (role, stored), (other_role, other_stored) = self.of, other.of
        # an engine may pad the blocks of layers that keep a plain cache beside a quantised one
        padded = role == other_role and stored != other_stored
        return None if padded or isinstance(self.content, tuple) or isinstance(other.content, tuple) else True


def _block(group: RunGroup) -> _Block | None:
    """The block of a group; None if its layers keep no cache."""
    shape = group.shapes[0] if group.shapes else None
    if group.shapes == ():
        return None
    if group.selection is None:
        return _Block(shape, 0, 0)
    point, variant = group.point, group.selection.variant
    if point["attn_type"] not in _CACHED:
        return None
    known = layouts_of(variant, point) if variant is not None else None
    slots = known.slots if known is not None else None
    heads = 1 if point["attention"] != "mha" else point["num_kv_heads"]
    width = point["head_size"] + (point["head_size_v"] or point["head_size"])
    values = width if slots is None else width * (heads or 1) // slots
    stored = next((f.value for f in group.selection.consequences if f.kind == "stores"), point["kv_dtype"])
    words = group.selection.registry.vocabulary.words
    word = words["dtypes"].get(point["dtype"]) if stored in (None, "auto") else words["kv_dtypes"].get(str(stored))
    # formats with scales or codes beside the values are told apart by their names
    plain = word is not None and not {"packed", "latent_bytes", "head_bytes", "stored_bits"} & word.facts.keys()
    bits = word.facts.get("bits") if word is not None and plain else None
    if shape is not None and slots is not None:
        shape = shape._replace(heads=slots)
    return _Block(shape, slots or heads, values * bits if bits is not None else (stored, values), (group.role, stored))


def _shape_fact(group: RunGroup) -> ConflictFact:
    if group.selection is None:
        return ConflictFact(group.label, "keeps one state for each request", None)
    point, variant = group.point, group.selection.variant
    known = layouts_of(variant, point) if variant is not None else None
    heads = 1 if point["attention"] != "mha" else point["num_kv_heads"]
    if known is not None and known.slots is not None:
        text = f"{group.name} keeps blocks of {known.slots} slots of {heads} heads of {point['head_size']}"
        return ConflictFact(group.label, text, known.where)
    text = f"keeps blocks of {heads} head{'s' if heads != 1 else ''} of {point['head_size']}"
    return ConflictFact(group.label, text, known.where if known is not None else None)


def _smallest(
    stated: Sequence[_Reader], rules: LayoutRules, within: Iterable[str] | None = None
) -> tuple[ConflictFact, ...]:
    """The fewest readers without a common layout. within: the layouts that count; by default all."""
    allowed = set(rules.layouts if within is None else within)
    for size in range(1, len(stated) + 1):
        for chosen in combinations(stated, size):
            if not allowed.intersection(*(reader.layouts for reader in chosen)):
                return tuple(reader.fact for reader in chosen)
    return tuple(reader.fact for reader in stated)


def _conflict(sentence: str, facts: tuple[ConflictFact, ...], rules: LayoutRules) -> Agreed:
    return Agreed(None, sentence, rules.where, rules.source, Conflict(sentence, facts))
