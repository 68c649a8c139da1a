"""The block size of the KV cache that an engine chooses for a whole model, once each layer has its backend."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.errors import Location
from attnreg.explain.state_pages import StatePages, UncountedStates, counted, of_questions, smallest_block
from attnreg.language.matchers import ANY, Matcher
from attnreg.models.kv_memory import token_bytes
from attnreg.request import AttentionRequest
from attnreg.selection.point import point_of
from attnreg.selection.question import UNREAD
from attnreg.selection.wording import readable

if TYPE_CHECKING:
    from attnreg.language.engine.pages import DefaultSize, KernelBlocks, PageRules, StateRules
    from attnreg.models.states import StateDims
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.selection.question import Question
    from attnreg.selection.trace import Selection

    Ask = Callable[[AttentionRequest, Platform], Selection]

_WITH_BLOCKS = ("decoder", "encoder_decoder", "encoder_only")


class BlockSize(NamedTuple):
    """The block size of a run in ``tokens``, None if it is unknown, with the reason and its line of data.

    ``archs`` are the architectures with this block size; it is empty if all architectures of the question share it.
    ``states`` are the states of layers without softmax attention, None without such layers or if they are not known.
    """

    tokens: int | None
    text: str
    where: Location
    source: str | None = None
    archs: tuple[str, ...] = ()
    states: StatePages | None = None

    @property
    def sentence(self) -> str:
        """``KV cache in blocks of 16 tokens, which every backend of the model reads``."""
        if self.tokens is None:
            return f"KV cache in blocks of a size that is not known: {self.text}"
        return f"KV cache in blocks of {self.tokens} token{'s' if self.tokens > 1 else ''}, {self.text}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        values = {"tokens": self.tokens, "text": self.text, "where": str(self.where), "source": self.source}
        states = {"states": self.states.to_dict()} if self.states is not None else {}
        return {**values, **({"archs": list(self.archs)} if self.archs else {}), **states}


class _BlockSizeReader(NamedTuple):
    """A reader of cache blocks: the backend of some layers, or the kernel of a second cache beside them.

    ``prefers`` is the block size that it requests if it is the only reader, in place of the engine's default. ``pages``
    is the backend's claim on block sizes. ``blocks`` are the blocks of its kernel; None if the kernel reads whole
    pages. ``kind`` is the kind of layers that count as a separate reader, else "".
    """

    name: str
    blocks: KernelBlocks | None
    pages: Matcher
    where: Location
    source: str | None = None
    prefers: int | None = None
    kind: str = ""

    def reads(self, tokens: int) -> bool:
        return self.pages.matches(tokens) and (self.blocks is None or self.blocks.of(tokens) is not None)

    @property
    def units(self) -> tuple[int, ...]:
        """The smallest sizes that it reads; a common size is a multiple of one of them. (1,) if it reads every size."""
        return self.blocks.units if self.blocks else tuple(sorted(self.pages.constants | self.pages.moduli)) or (1,)

    def own(self, default: int) -> int:
        """The block size that it requests if it is the only reader."""
        return self.prefers or (default if self.reads(default) else min(self.units))


def pages_of(
    questions: Iterable[Question], platforms: Sequence[Platform], registry: Registry, ask: Ask, given: int | None
) -> tuple[BlockSize, ...]:
    """The block sizes of a whole model's run; platforms that agree share one entry.

    They follow from the registry's rules, or from a step that sets them. A platform on which no run starts has none.
    given: the block size that the user requests.
    """
    questions, found = tuple(questions), dict[BlockSize, list[str]]()
    requests = [question.request for question in questions if question.request is not None]
    prompts = bool(requests) and all(request.phase == "prefill" for request in requests)
    if prompts and any(request.attention != "mha" for request in requests):
        # the questions are about prompts alone, and another kernel reads the cache of MLA
        return ()
    for platform in platforms:
        kept = [(q, ask(q.request, platform)) for q in questions if q.request is not None and _has_blocks(q, prompts)]
        if any(s.silence or (s.backend is None and not (s.unknown and registry.page)) for _, s in kept):
            continue
        page = _settled(questions, _in_order(kept), registry, platform, given) if registry.page else _written(kept)
        if page is not None:
            found.setdefault(page, []).append(platform.arch)
    return tuple(p._replace(archs=tuple(archs)) for p, archs in found.items()) if len(found) > 1 else tuple(found)


def _written(layers: Iterable[tuple[Question, Selection]]) -> BlockSize | None:
    """The block size that a step of the engine's start wrote, the same for all layers of the model."""
    starts = [s.start for _, s in layers if s.request.role == "target" and s.start is not None]
    taken = [start.decided_by("block_size") for start in starts]
    sizes = {start.facts["block_size"] for start in starts}
    if not taken or taken[0] is None or len(sizes) > 1:
        return None
    return BlockSize(sizes.pop(), f"which {taken[0].name} sets", taken[0].where, taken[0].step.source)


def _has_blocks(question: Question, prompts: bool) -> bool:
    """Whether the question is about layers with a cache in blocks.

    prompts: whether all questions are about prompts. If not, other questions ask about the same layers, and prompts are
    skipped.
    """
    request = question.request
    assert request is not None
    # a tower has a cache only if it is a decoder
    of_tower = all(member[1] for member in question.members if isinstance(member, tuple))
    return (
        (prompts or request.phase != "prefill")
        and request.role in ("target", "draft")
        and request.attn_type in (_WITH_BLOCKS[:2] if of_tower else _WITH_BLOCKS)
    )


def _in_order(layers: list[tuple[Question, Selection]]) -> list[tuple[Question, Selection]]:
    """The questions in the order of their first layers; the draft's come after the target's."""

    def place(layer: tuple[Question, Selection]) -> tuple[bool, int]:
        indices = [member[-1] for member in layer[0].members if isinstance(member, tuple)]
        return layer[1].request.role == "draft", min(indices, default=0)

    return sorted(layers, key=place)


def _settled(
    questions: Sequence[Question],
    layers: list[tuple[Question, Selection]],
    registry: Registry,
    platform: Platform,
    given: int | None,
) -> BlockSize:
    """The block size of a run. given: the one that the user requests."""
    rules, points = registry.page, [s.point() for _, s in layers]
    assert rules is not None
    refusal = next((s.start.refusal for _, s in layers if s.start and s.unknown), None)
    if refusal is not None:
        return BlockSize(None, refusal.text, refusal.where, refusal.step.source)
    fails = next((f for _, s in layers for f in s.consequences if f.kind == "fails"), None)
    if fails is not None:
        return BlockSize(None, "the engine is known to stop with a backend that it chose", fails.where, fails.source)
    if any(question.kind == UNREAD for question in questions):
        # such a layer may read other blocks than its neighbours
        return BlockSize(None, "what some layers compute is not known", rules.where, rules.source)
    states = of_questions(questions)
    # whether there are states that the rules cannot count
    uncounted = bool(states) and (None in states or rules.states is None)
    for unknown in rules.unknown:
        about = unknown.mixers is None or (uncounted if unknown.mixers else not states)
        if about and any(unknown.when.holds(point) for point in points):
            return BlockSize(None, unknown.because, unknown.where, unknown.source)
    default = next((d for d in rules.default if points and d.when.holds(points[0])), rules.default[-1])
    readers = _readers(layers, rules)
    names = Counter((reader.name, reader.kind) for reader in readers)
    divided = next((reader for reader in readers if names[reader.name, reader.kind] > 1), None)
    if divided is not None:
        text = f"{divided.name} reads other blocks in other layers, and the engine asks it once"
        return BlockSize(None, text, divided.where, divided.source)
    # a step of the start may have changed the user's block size; that of a draft's own configuration is not the run's
    own = [s.point() for _, s in layers if s.request.role != "draft"] or points
    given = next((size for point in own if (size := point["block_size"]) is not None), given)
    if given is not None:
        page = BlockSize(given, "as asked for", rules.where, rules.source)
    elif not readers:
        page = _unread(rules, registry, platform, default)
    else:
        page = _agreed(readers, rules, default)
    if states and None not in states and rules.states is not None:
        page = _with_states(page, states, readers, layers, registry)
    return _raised(page, readers, points, rules)


def _unread(rules: PageRules, registry: Registry, platform: Platform, default: DefaultSize) -> BlockSize:
    """The block size of a run without a layer that reads it. The default of a platform is that of runs with layers."""
    point = point_of(AttentionRequest(head_size=128, num_heads=1), platform, registry)
    own = next((size for size in rules.default if size.when.holds(point)), default)
    if own.tokens == default.tokens:
        return BlockSize(default.tokens, "which no layer reads", default.where, default.source)
    text = "no layer reads it, and what the engine takes for such a run on this platform was not recorded"
    return BlockSize(None, text, own.where, own.source)


def _readers(layers: Iterable[tuple[Question, Selection]], rules: PageRules) -> list[_BlockSizeReader]:
    """The readers of the run's blocks, each once, in the order of the layers; a second cache comes before its layer.

    A backend has two readers if it reads different blocks in different layers.
    """
    found: dict[object, _BlockSizeReader] = {}
    for question, selection in layers:
        point, variant = selection.point(), selection.variant
        assert selection.backend is not None
        assert variant is not None
        for other in rules.beside:
            if other.when.holds(point):
                found.setdefault(other.name, _BlockSizeReader(other.name, other.blocks, ANY, other.where, other.source))
        known = next((c for c in variant.consequences if c.kernel_blocks is not None and c.when.holds(point)), None)
        claim = next((c for c in variant.claims if c.facet == "block_size"), None)
        blocks, prefers = (known.kernel_blocks, known.prefers) if known is not None else (None, None)
        pages = claim.matcher if claim is not None else ANY
        kind = question.kind if question.kind in rules.apart else ""
        where = known.where if known is not None else claim.where if claim is not None else variant.where
        source = known.source if known is not None else variant.source
        reader = _BlockSizeReader(selection.backend.name, blocks, pages, where, source, prefers, kind)
        found.setdefault((reader.name, kind, blocks, pages, prefers), reader)
    return list(found.values())


def _agreed(readers: Sequence[_BlockSizeReader], rules: PageRules, default: DefaultSize) -> BlockSize:
    """The block size that the engine chooses without a user's request."""
    if len(readers) == 1 or rules.agree == "first":
        first = readers[0]
        tokens = first.own(default.tokens)
        if tokens == default.tokens:
            return BlockSize(tokens, f"the default, which {first.name} reads", default.where, default.source)
        asks = f"which {first.name} asks for" if first.prefers else f"the smallest that {first.name} reads"
        return BlockSize(tokens, asks, first.where, first.source)
    names = list(dict.fromkeys(reader.name for reader in readers))
    all_of_them = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"all layers of {names[0]}"
    if all(reader.reads(default.tokens) for reader in readers):
        verb = "all read" if len(names) > 1 else "read"
        return BlockSize(default.tokens, f"the default, which {all_of_them} {verb}", default.where, default.source)
    refusing = next(reader for reader in readers if not reader.reads(default.tokens))
    for tokens in sorted({math.lcm(*units) for units in product(*(reader.units for reader in readers))}):
        if all(reader.reads(tokens) for reader in readers):
            return BlockSize(tokens, f"the smallest that {all_of_them} read", refusing.where, refusing.source)
    return BlockSize(
        None, f"{all_of_them} read no blocks of one size, and the engine stops", refusing.where, rules.source
    )


def _raised(page: BlockSize, readers: Sequence[_BlockSizeReader], points: Sequence[Any], rules: PageRules) -> BlockSize:
    """The block size after the rules that raise it."""
    for raised in rules.raised:
        if page.tokens is None or not readers or not any(raised.when.holds(point) for point in points):
            continue
        smallest = min(readers[0].units)
        step = max(smallest, page.tokens)
        tokens = step * -(-raised.units * smallest // step)
        if tokens > page.tokens:
            text = f"raised from {page.tokens}: {raised.because}"
            page = BlockSize(tokens, text, raised.where, raised.source)
    return page


# states beside the cache ---------------------------------------------------------------------------------------------


def _with_states(
    page: BlockSize,
    states: Mapping[StateDims | None, int],
    readers: Sequence[_BlockSizeReader],
    layers: Sequence[tuple[Question, Selection]],
    registry: Registry,
) -> BlockSize:
    """The block size of a run that keeps states beside its KV cache: a block has at least the bytes of a state."""
    assert registry.page is not None
    rules, words = registry.page.states, registry.vocabulary.words
    assert rules is not None
    own = [s for _, s in layers if s.request.role == "target"]
    points = [s.point() for s in own]
    dtype = str(points[0]["dtype"]) if points else ""
    bits = {word: float(entry.facts["bits"]) for word, entry in words["dtypes"].items() if "bits" in entry.facts}
    found = counted(states, points, rules, dtype, _proposed(layers, rules), bits)
    if isinstance(found, UncountedStates):
        return BlockSize(None, found.text, found.where, found.source)
    if page.tokens is None or not readers:
        return page._replace(states=found if page.tokens is not None else None)
    sizes = {None if (kept := stored(s)) is None else token_bytes(kept, words) for s in own}
    if len(sizes) != 1 or None in sizes:
        text = "its layers keep tokens of several sizes" if len(sizes) > 1 else "the bytes of a token are not known"
        return BlockSize(None, text, found.where, found.source)
    size = sizes.pop() or 1
    tokens = smallest_block(found, points, rules, [min(r.units) for r in readers], page.tokens, size)
    if tokens is None:
        return BlockSize(
            None, "the number of tokens that a layer computes at a time is not known", found.where, found.source
        )
    found = found._replace(page_bytes=tokens * size)
    if tokens == page.tokens:
        return page._replace(states=found)
    refusing = next((reader for reader in readers if not reader.reads(tokens)), None)
    if refusing is not None:
        text = f"a state takes {tokens} tokens, {refusing.name} reads no blocks of that size, and the engine stops"
        return BlockSize(None, text, refusing.where, refusing.source)
    largest = readable(max(each.own_bytes for each in found.layers))
    text = f"raised from {page.tokens}: a block is as large as a state of a layer without softmax, {largest}"
    return BlockSize(tokens, text, found.where, found.source, states=found)


def _proposed(layers: Sequence[tuple[Question, Selection]], rules: StateRules) -> int | None:
    """The number of tokens that a draft proposes, 0 without a draft; None if it is not known."""
    points = [s.point() for _, s in layers]
    given = (point[rules.proposed] for point in points) if rules.proposed else ()
    number = next((number for number in given if number is not None), None)
    drafts = [(q, s) for q, s in layers if s.request.role == "draft"]
    if number is not None or not drafts:
        return number or 0
    models = {s.request.model for _, s in layers}
    # the model's own layers that predict further tokens propose one each
    return len(frozenset[object]().union(*(q.members for q, _ in drafts))) if len(models) == 1 else None


def stored(selection: Selection) -> AttentionRequest | None:
    """The request whose cache the engine stores: as its start and the chosen backend leave it; None if not known.

    A start that is refused ends before the steps that decide what is stored.
    """
    # without data for the platform, the cache of the unchanged request is counted
    refused = selection.start is not None and selection.start.refusal is not None
    if refused or (selection.unknown and not selection.silence):
        return None
    kept = next((f.value for f in selection.consequences if f.kind == "stores"), None)
    start, request = selection.start, selection.request
    asked = request if start is None else start.request(request, selection.registry)
    return asked if kept is None else dataclasses.replace(asked, kv_dtype=str(kept))
