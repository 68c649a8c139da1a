"""Evaluates a run: from what a user starts to a `Plan`, without a search for changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnreg.engines.drafts import refuse_encoders
from attnreg.errors import RequestError
from attnreg.explain.answers import in_run, title_of
from attnreg.explain.asked import Asker, unreached
from attnreg.explain.block_size import BlockSize, pages_of, stored
from attnreg.language.engine.runs import LEVELS
from attnreg.models.questions import ModelOptions, ModelQuestions, model_questions
from attnreg.planning.conflicts import refused_run, without_backend
from attnreg.planning.graphs import agree_graphs, levels_of
from attnreg.planning.layout import agree_layout
from attnreg.planning.memory import CacheOfLayers, MemoryFit, PipelineStage, Room, fit_of, stages_of
from attnreg.planning.pages import page_of
from attnreg.planning.plan import Plan, PlanGroup, Stated
from attnreg.planning.run import CacheShape, Conflict, ConflictFact, RunGroup
from attnreg.selection.consequences import following, run_facts
from attnreg.selection.point import Point, refuse_unknown_kv_dtype
from attnreg.selection.question import UNREAD
from attnreg.selection.wording import readable

if TYPE_CHECKING:
    from attnreg.errors import Location
    from attnreg.models.groups import LayerGroup
    from attnreg.models.kv_memory import GroupMemory
    from attnreg.planning.graphs import GroupLevel
    from attnreg.planning.run import Agreed
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest
    from attnreg.selection.consequences import Following
    from attnreg.selection.question import Question
    from attnreg.selection.trace import Selection

    Ask = Callable[[AttentionRequest, Platform], Selection]

# the options that name a backend
_OPTIONS = ("backend", "draft_backend", "vision_backend", "prefill_backend")
# the facet of the tokens that a draft proposes, on which the states of hybrid models depend
_PROPOSED = "speculative_tokens"
UNKNOWN_BYTES = Stated("not every layer's bytes of KV cache are known")
# the attention types of layers with a KV cache in blocks
_CACHED = ("decoder", "encoder_decoder")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a user starts: a model with its options on a platform, with a registry.

    ``config`` is the path of the model's config. Each field with ``backend`` in its name is an option that names one.
    ``stages`` are the stages of pipeline parallelism, ``dcp`` the ranks of decode context parallelism. ``layout`` and
    ``graphs`` are the KV cache layout and the CUDA-graph mode that the user asks for. ``kv_connector`` are the facets
    of the run's KV connector, and ``connector`` is the layout that the user says it wishes. ``speculative_tokens`` are
    the tokens that a draft proposes for each step. ``room`` is the memory of one GPU, if given. ``named`` are the
    user's choices in words, for the title.
    """

    config: str
    options: ModelOptions
    registry: Registry
    platform: Platform
    backend: str | None = None
    draft_backend: str | None = None
    vision_backend: str | None = None
    prefill_backend: str | None = None
    stages: int = 1
    dcp: int = 1
    layout: str | None = None
    graphs: str | None = None
    connector: str | None = None
    kv_connector: Mapping[str, Any] = field(default_factory=dict)
    speculative_tokens: int | None = None
    room: Room | None = None
    named: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def model(self) -> ModelQuestions:
        """The questions of the run's model. Raises `attnreg.ConfigError` and `attnreg.RequestError`."""
        return model_questions(self.config, self.asked, self.registry)

    @property
    def asked(self) -> ModelOptions:
        """The options of the model, with what the run's own options ask of its layers."""
        own = {"dcp_ranks": self.dcp if self.dcp > 1 else None, "pp_stages": self.stages if self.stages > 1 else None}
        own |= {_PROPOSED: self.speculative_tokens, **self.kv_connector}
        known = {facet: n for facet, n in own.items() if n is not None and facet in self.registry.vocabulary.facets}
        features = self.options.features | ({"dcp"} if self.dcp > 1 else set())
        features |= {"kv_connector"} if self.kv_connector else set()
        extra = tuple({**dict(self.options.extra), **known}.items())
        return dataclasses.replace(self.options, features=features, extra=extra)

    @property
    def proposed(self) -> int | None:
        """The tokens that a draft proposes for each step, by the option or by the facet; None if neither is given."""
        return self.speculative_tokens or dict(self.options.extra).get(_PROPOSED)

    def asker(self, model: ModelQuestions) -> Asker:
        """Asks about the requests of the run, with the backends that the user names for them."""
        given = {option: getattr(self, option) for option in _OPTIONS}
        return Asker(self.registry, given, (question.request for question in model.questions))


class _Asked:
    """A run with its questions, and the page that every request of a cache states; None if none is stated."""

    def __init__(self, run: Run, model: ModelQuestions, page: int | None = None) -> None:
        self.run, self.model, self.page = run, model, page
        self._asker = run.asker(model)

    def ask(self, request: AttentionRequest, platform: Platform) -> Selection:
        if self.page is not None and request.block_size is None and _keeps(request):
            request = dataclasses.replace(request, block_size=self.page)
        return self._asker(request, platform)

    def unreached(self) -> list[str]:
        """A note for each option that has reached no layer so far."""
        return unreached(self._asker.given, self._asker.reached, self.run.registry)


def evaluate(run: Run, model: ModelQuestions | None = None) -> Plan:
    """The plan of a run. Raises `attnreg.ConfigError` and `attnreg.RequestError` for what cannot be asked.

    model: the questions of ``run.model()``, if the caller has them.
    """
    refuse_unknown_kv_dtype((run.options.given, run.options.draft_given), run.registry)
    model = run.model() if model is None else model
    refuse_encoders(model)
    asked, page, excluded = _with_page(run, model)
    groups = tuple(_groups(asked, page))
    conflicts = without_backend(groups)
    conflicts += [excluded] if excluded is not None else []
    unknown = [said for group in groups for said in _not_known(group)]
    if (bare := model.memory.models[0].model.of_run if model.memory.models else None) is not None:
        of_run = asked.ask(bare, run.platform)
        conflicts += [refused] if (refused := refused_run(of_run, model.name)) is not None else []
        unknown += _silence("the run", of_run)
    if page is not None and page.tokens is None and not conflicts:
        unknown.append(Stated(page.sentence, page.where))
    silent = bool(unknown)
    groups, layout, graphs = _settled(run, groups)
    for name, agreed in (("KV cache layout", layout), ("CUDA graphs", graphs)):
        if agreed is not None and agreed.conflict is not None:
            conflicts.append(agreed.conflict)
        # a run with a backend that is not known has its reason above
        elif agreed is not None and agreed.value is None and not conflicts and not silent:
            unknown.append(Stated(f"{name}: {agreed.text}", agreed.where))
    workspaces = _workspaces(groups)
    caches = [group.cache for group in groups]
    split = _split(run, model)
    rules = run.registry.stages
    stages = stages_of(caches, split, run.dcp) if split else ()
    fit = None
    if run.room is not None and split:
        length = run.options.lengths[-1] if run.options.lengths else model.memory.lengths[0]
        sizes = sum(size for _, size, _ in workspaces)
        tokens = page.tokens if page and page.tokens else 1
        fit = fit_of(run.room, run.registry.memory, caches, split, sizes, length, page=tokens, dcp=run.dcp)
        # without a length of the user's the engine may start for shorter requests
        conflicts += _too_long(fit) if run.options.lengths and not conflicts else []
    if not split:
        said = f"{run.registry.name} does not say which layers a pipeline stage has"
        unknown.append(
            Stated(said if rules is None else f"which of the layers {model.name} has on a stage is not known")
        )
    unknown += _unknown_bytes(stages)
    return Plan(
        registry=run.registry,
        platform=run.platform,
        title=title_of([run.platform], run.registry, _what(run, model), choices=run.named),
        groups=groups,
        page=page,
        layout=layout,
        graphs=graphs,
        workspaces=workspaces,
        ranks=run.options.ranks,
        dcp=run.dcp,
        stages=stages,
        stages_where=rules.where if rules is not None and run.stages > 1 else None,
        fit=fit,
        conflicts=tuple(conflicts),
        unknown=tuple(dict.fromkeys(unknown)),
        notes=(*run.notes, *model.notes, *asked.unreached()),
    )


def _what(run: Run, model: ModelQuestions) -> str:
    return model.title + (f" · PP {run.stages}" if run.stages > 1 else "")


def _with_page(run: Run, model: ModelQuestions) -> tuple[_Asked, BlockSize | None, Conflict | None]:
    """The run's questions and its page: by the engine's rules, or the one that serves the layers best."""
    registry, given = run.registry, model.memory.block_size
    plain = _Asked(run, model)
    if registry.page is not None or registry.steps:
        pages = pages_of(model.questions, [run.platform], registry, plain.ask, given)
        return plain, next(iter(pages), None), None
    cached = [(q.layers, q.request) for q in model.questions if q.request is not None and _keeps(q.request)]
    page, conflict = page_of(cached, registry, lambda request: plain.ask(request, run.platform))
    return (_Asked(run, model, page.tokens) if page is not None else plain), page, conflict


def _settled(run: Run, groups: tuple[PlanGroup, ...]) -> tuple[tuple[PlanGroup, ...], Agreed | None, Agreed | None]:
    """The groups with the layouts and graphs of their backends, and the layout and the graph mode of the run.

    None for what the registry has no rules for. Raises `ValueError` for a layout or a mode that no run can have.
    """
    registry, rows = run.registry, [group.run for group in groups]
    layout = graphs = None
    if registry.layout is not None:
        layout = agree_layout(rows, registry.layout, asked=run.layout, connector=run.connector)
        groups = tuple(dataclasses.replace(group, layouts=_layouts(group)) for group in groups)
    if (rules := registry.graphs) is not None:
        tokens = 0 if run.options.draft is None else run.proposed or 1
        machine = Point({**run.platform.facts(), "features": frozenset()}, registry)
        graphs = agree_graphs(rows, rules, asked=run.graphs, speculative_tokens=tokens, machine=machine)
        groups = tuple(dataclasses.replace(g, graphs=_graphs(levels_of(g.run, rows, rules))) for g in groups)
    return groups, layout, graphs


def _layouts(group: PlanGroup) -> Stated | None:
    selection = group.run.selection
    variant = selection.variant if selection is not None else None
    if selection is None or variant is None or not group.run.takes_part or not _keeps(selection.request):
        return None
    known = next((f for f in run_facts(variant, selection.point()) if f.kind == "layouts"), None)
    return known and Stated(str(known.value), known.where)


def _graphs(levels: Sequence[GroupLevel]) -> Stated | None:
    least = min(levels, key=lambda level: LEVELS.index(level.level), default=None)
    return least and Stated(least.level.replace("_", " "), least.where)


def _keeps(request: AttentionRequest) -> bool:
    """Whether a request is about layers with a KV cache in blocks."""
    return request.attn_type in _CACHED and request.role in ("target", "draft")


def _groups(asked: _Asked, page: BlockSize | None) -> Iterator[PlanGroup]:
    """The groups of the target's layers, then those of the draft's."""
    run, model = asked.run, asked.model
    memory = model.memory.after(lambda r: stored(asked.ask(r, run.platform)), run.registry.vocabulary.words)
    memory = in_run(memory, asked.ask, run.platform)
    if page is not None and page.states is not None:
        memory = memory.with_states(page.states.by_state)
    questions = iter(model.questions)
    several = model.memory.phases
    for number, part in enumerate(memory.models):
        for group, counted in zip(part.model.groups, part.groups, strict=True):
            first = next(questions)
            # a group has a second question about its prompts: those of MLA, and those of engines that tell phases apart
            again = group.prefill is not None or (several and group.request is not None)
            second = next(questions) if again and "phase" not in run.options.given else None
            yield _group(asked, page, group, counted, (first, second), draft=number > 0)


def _group(
    asked: _Asked,
    page: BlockSize | None,
    group: LayerGroup,
    counted: GroupMemory,
    questions: tuple[Question, Question | None],
    *,
    draft: bool,
) -> PlanGroup:
    run = asked.run
    first, second = questions
    selection = None if first.request is None else asked.ask(first.request, run.platform)
    prompts = None if second is None or second.request is None else asked.ask(second.request, run.platform)
    request = None if selection is None else stored(selection)
    cache = _cache(group, counted, draft)
    stops, block, where, remark = _block(selection, page)
    role = first.request.role if first.request is not None else "draft" if draft else "target"
    shapes = _shapes(selection, request, counted, page)
    # an encoder and a tower have indices of their own
    words = first.layers if role in ("target", "draft") else f"{role} · {first.layers}"
    made = RunGroup(words, role, group.layers, selection, request, first.kind, shapes)
    return PlanGroup(made, first.label, cache, prompts, block, where, remark, stops)


def _cache(group: LayerGroup, counted: GroupMemory, draft: bool) -> CacheOfLayers:
    """The KV cache of a group of layers on a rank."""
    if counted.token_bytes is None:
        return CacheOfLayers(group.layers, draft, None)
    if group.request is None or group.facts.kind == "cross":
        # a state of fixed size, or a cache as long as what is attended to, which is not counted
        state = None if counted.state_bytes is None else counted.state_bytes // len(group.layers)
        return CacheOfLayers(group.layers, draft, 0, state_bytes=state)
    each = counted.first.counted // len(group.layers)
    whole = counted.index_bytes is not None
    return CacheOfLayers(group.layers, draft, each, counted.keeps, counted.compress, whole=whole)


def _block(
    selection: Selection | None, page: BlockSize | None
) -> tuple[Following | None, int | None, Location | None, str]:
    """A failure in pages of this size, and the block in tokens that the kernel reads, with its line and its remark."""
    variant = selection.variant if selection is not None else None
    if selection is None or variant is None or page is None or page.tokens is None or not _keeps(selection.request):
        return None, None, None, ""
    point = selection.point().changed({"block_size": page.tokens})
    stops = next((f for f in following(variant, point) if f.kind == "fails"), None)
    known = next((c for c in variant.consequences if c.kernel_blocks is not None and c.when.holds(point)), None)
    if known is None or known.kernel_blocks is None:
        return stops, page.tokens, page.where, ""
    return stops, known.kernel_blocks.of(page.tokens), known.where, known.says


def _shapes(
    selection: Selection | None, request: AttentionRequest | None, counted: GroupMemory, page: BlockSize | None
) -> tuple[CacheShape, ...] | None:
    """The shapes of the caches of one layer: () if it has none, None if they are not known.

    The cache of an indexer is none of them: it takes every layout.
    """
    if selection is not None and not _keeps(selection.request):
        return ()
    if request is None or page is None or page.tokens is None or counted.token_bytes is None:
        return None
    if counted.token_bytes == 0:
        return ()
    each = counted.token_bytes // len(counted.group.layers)
    heads = 1 if request.attention.startswith("mla") else request.num_kv_heads
    return None if heads is None else (CacheShape(heads, page.tokens, each * page.tokens),)


def _not_known(group: PlanGroup) -> Iterator[Stated]:
    if group.run.selection is None and group.cache.layer_bytes is None:
        why = "" if group.run.kind == UNREAD else f": {group.label}"
        yield Stated(f"what {group.run.label} compute is not known{why}", None, group.run.label)
    for selection in (group.run.selection, group.prompts):
        if selection is not None:
            yield from _silence(f"the backend of {group.run.label}", selection, group.run.label)
            for follows in selection.consequences:
                if follows.kind == "unknown":
                    yield Stated(f"{selection.title}: {follows.text}", follows.where, group.run.label)


def _silence(what: str, selection: Selection, label: str = "") -> Iterator[Stated]:
    """Why an answer is not known, if it is not."""
    refusal = selection.start.refusal if selection.start is not None else None
    if selection.unknown and refusal is not None:
        yield Stated(f"{what}: {refusal.text}", refusal.where, label)
    elif selection.unknown:
        yield Stated(selection.silence, None, label)


def _workspaces(groups: Sequence[PlanGroup]) -> tuple[tuple[str, int, Location], ...]:
    """The largest workspace of each backend of the run."""
    found: dict[str, tuple[int, Location]] = {}
    for group in groups:
        for selection in (group.run.selection, group.prompts):
            for follows in selection.consequences if selection is not None else ():
                if follows.kind == "workspace" and selection is not None and selection.backend is not None:
                    size, name = int(follows.value or 0), selection.backend.name
                    if size > found.get(name, (0, follows.where))[0]:
                        found[name] = size, follows.where
    return tuple((name, size, where) for name, (size, where) in found.items())


def _split(run: Run, model: ModelQuestions) -> tuple[Sequence[int], ...]:
    """The indices of the target's layers on each stage; empty if it is not known how they are shared out.

    Raises `RequestError` for more stages than layers.
    """
    target = model.memory.models[0].model
    own = sorted({facts.layer_idx for facts in target.layers if not facts.part and facts.kind != "vision"})
    if run.stages == 1:
        return (own,)
    count = len(own)
    if run.stages > count:
        raise RequestError(f"{run.stages} pipeline stages share out {count} layers", f"give --pp at most {count}")
    # a config that leaves out indices has layers that are not attention, which the engine counts, too
    if run.registry.stages is None or own != list(range(count)):
        return ()
    return run.registry.stages.split(count, run.stages)


def _too_long(fit: MemoryFit) -> list[Conflict]:
    """Why no request of the length that is asked for fits, if none does."""
    if fit.requests != 0:
        return []
    needed, left = readable(fit.request_bytes), readable(max(fit.cache_bytes, 0))
    text = f"a request of {fit.length:,} tokens needs {needed} of KV cache on a GPU, and at most {left} are left"
    text += f": for one of at most {fit.tokens:,}" if fit.tokens else ""
    return [Conflict("the longest request does not fit", (ConflictFact("", text, fit.where),))]


def _unknown_bytes(stages: Sequence[PipelineStage]) -> list[Stated]:
    return [UNKNOWN_BYTES] if any(s.bytes_per_token is None for s in stages) else []
